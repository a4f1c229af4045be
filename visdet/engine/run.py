"""Training and evaluating a config: what the commands ``visdet train`` and ``visdet test`` do."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from visdet.checks.arguments import checked, with_other_names
from visdet.errors import InvalidInputError

from .checkpoints.held_config import load_config, names_checkpoint
from .config.checks import section_of
from .config.load import check_required_keys
from .config.other_names import NAMES_OF_TRAINING
from .process.console import say
from .process.places import check_work_dir, free_folder, no_empty_folders

if TYPE_CHECKING:
    from mmengine.config import Config


@dataclass(frozen=True)
class TrainingResult:
    """What a training leaves.

    Attributes:
        work_dir: the folder of the run.
        last_checkpoint, best_checkpoint: paths, or None if the run wrote no such checkpoint.
        metrics: the metrics of the last validation by name, such as ``coco/bbox_mAP``.
    """

    work_dir: str
    last_checkpoint: str | None
    best_checkpoint: str | None
    metrics: dict[str, float] = field(default_factory=dict)


@checked
@with_other_names(NAMES_OF_TRAINING)
def train(
    config: "str | os.PathLike | Config | None" = None,
    options: Mapping[str, Any] | None = None,
    /,
    *,
    work_dir: str | os.PathLike | None = None,
    from_: str | os.PathLike | None = None,
    resume: str | os.PathLike | bool | None = None,
    amp: bool = False,
    graph: bool | None = None,
    auto_scale_lr: bool = False,
    launcher: str | None = None,
    **overrides: Any,
) -> TrainingResult:
    """Train the model of a config, and validate it as the config says. This is the command ``visdet train``.

    Args:
        config: a config file, the name of one of the package's configs, or a loaded config, which is not changed.
        options: values of the config to change by their dotted keys, such as ``{"train_cfg.max_iters": 100}``.
            Without one, it is that of the checkpoint ``from_``.
        work_dir: the folder to write. The default is ``work_dirs/<name of the config>``. If it holds another run, and
            this one does not resume, the next free one of ``<work_dir>_2``, ``<work_dir>_3`` … is taken.
        from_: weights to start from: a file, an http(s) address, or a name of docs/model_zoo.md, of visdet, mmdet, the
            original implementations or transformers. Those that do not fit the model, such as those of other classes,
            begin anew, and the log names them.
        resume: 'auto' or True to continue from the newest checkpoint of the folder if there is one, or a checkpoint.
        amp: train under bfloat16 autocast.
        graph: replay steps as CUDA graphs on a GPU. The default is the config's choice.
        auto_scale_lr: scale the learning rate by the total batch size over ``auto_scale_lr.base_batch_size``.
        launcher: 'none' or 'pytorch'. The default is 'pytorch' under torchrun.
        overrides: more options. A dict is merged into that of the config: ``train_cfg=dict(max_iters=100)``.

    Raises:
        UserError: the config, an option or the data cannot be used. The message says why.
    """
    if config is None and names_checkpoint(from_):
        config = from_
    if config is None:
        raise InvalidInputError(
            "train: config must be a path, a name, or a checkpoint that is given as from_, got None"
        )
    cfg = _loaded(config, options, overrides, work_dir, graph, launcher, for_training=True)
    from .checkpoints.newest import newest_named
    from .prepare import build_runner, enable_amp, enable_auto_scale_lr, set_resume
    from .process.default_device import training_defaults

    if amp:
        enable_amp(cfg)
    if auto_scale_lr:
        enable_auto_scale_lr(cfg)
    if from_:
        cfg.load_from = os.path.expanduser(from_)
        cfg.strict_load = False
    if resume:
        set_resume(cfg, "auto" if resume is True else os.fspath(resume))
    elif not cfg.get("resume"):
        cfg.work_dir = agreed_folder(cfg.work_dir, cfg.launcher, cfg.get("env_cfg"))
    with no_empty_folders(cfg.work_dir), training_defaults():
        runner = build_runner(cfg)
        runner.train()
    return TrainingResult(
        runner.work_dir,
        newest_named(runner.work_dir) or None,
        runner.message_hub.get_info("best_ckpt"),
        dict(getattr(runner, "metrics", {})),  # mmengine's own runner keeps none.
    )


def agreed_folder(
    folder: str,
    launcher: str | None,
    env_cfg: dict | None = None,
    for_training: bool = True,
) -> str:
    """Return what :func:`free_folder` does, the same one in all processes."""
    from mmengine.dist import broadcast_object_list, is_main_process

    from .build import enter_environment
    from .process.distributed import checked_launcher

    launcher = checked_launcher(launcher)
    if launcher != "none":
        enter_environment(env_cfg or {}, launcher)
    chosen = [free_folder(folder, for_training) if is_main_process() else folder]
    broadcast_object_list(chosen)
    (agreed,) = chosen
    if agreed != folder:
        remark = ". --resume would continue it" if for_training else ""
        say(f"{folder} holds another run; this one writes to {agreed}{remark}")
    return agreed


@checked
def evaluate(
    config: "str | os.PathLike | Config",
    checkpoint: str | os.PathLike | None = None,
    options: Mapping[str, Any] | None = None,
    /,
    *,
    work_dir: str | os.PathLike | None = None,
    out: str | os.PathLike | None = None,
    show_dir: str | os.PathLike | None = None,
    amp: bool = False,
    graph: bool | None = None,
    launcher: str | None = None,
    **overrides: Any,
) -> dict[str, float]:
    """Evaluate a checkpoint on the test set of a config and return the metrics. This is the command ``visdet test``.

    Args:
        config, options, graph, launcher, overrides: see :func:`train`.
        work_dir: the folder to write. The default is the first free one of ``work_dirs/<name>_test``, …_2.
        checkpoint: a checkpoint file, its http(s) address, or a name of docs/model_zoo.md. It may be given in place of
            the config, which it holds.
        out: a JSON file to write the predictions of every sample to, in COCO's format of results if it is named
            ``*.bbox.json``.
        show_dir: a folder to write pictures of predictions and ground truth to.
        amp: predict under bfloat16 autocast.

    Raises:
        UserError: the config, an option, the checkpoint or the data cannot be used. The message says why.
    """
    if checkpoint is None and names_checkpoint(config):
        checkpoint = config
    if checkpoint is None:
        raise InvalidInputError("evaluate: checkpoint must be a path, an address or a name, got None")
    cfg = _loaded(config, options, overrides, work_dir, graph, launcher, for_training=False)
    from .prepare import build_runner, draw_detections, write_detections
    from .process.default_device import cpu_by_default

    if work_dir is None:
        cfg.work_dir = agreed_folder(
            f"{cfg.work_dir}_test", cfg.launcher, cfg.get("env_cfg"), for_training=False
        )
    cfg.load_from = os.path.expanduser(checkpoint)
    cfg.resume = False
    if amp:
        cfg.test_cfg = {**section_of(cfg, "test_cfg"), "fp16": True}
    with no_empty_folders(cfg.work_dir, show_dir), cpu_by_default():
        if out:
            write_detections(cfg, os.fspath(out))
        if show_dir:
            check_work_dir(show_dir, "--show-dir")
            draw_detections(cfg, show_dir)
        metrics = build_runner(cfg).test()
    if out:
        say(f"predictions: {out}")
    if show_dir:
        say(f"pictures: {show_dir}")
    return metrics


def _loaded(
    config: Any,
    options: Any,
    overrides: dict,
    work_dir: Any,
    graph: bool | None,
    launcher: str | None,
    for_training: bool,
) -> Any:
    """Return a config with what training and evaluation alike set in it, and print remarks on it."""
    folder = work_dir and os.path.expanduser(work_dir)
    cfg, remarks = load_config(config, {**(options or {}), **overrides}, folder)
    check_required_keys(cfg, for_training)
    # This imports torch, as the caller's imports do, and a mistake in the config is told before.
    from .process.distributed import checked_launcher

    cfg.launcher = checked_launcher(launcher)
    if graph is not None:
        cfg.graph = graph
    for remark in remarks:
        say(remark)
    return cfg
