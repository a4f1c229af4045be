"""Training and evaluating on a folder of pictures with boxes, and the options that need no config of one's own."""

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from visdet.checks.arguments import AtLeast0, Positive, Range, Seed, checked, with_other_names
from visdet.engine.config.checks import is_iteration_based, section_of
from visdet.engine.config.other_names import NAMES_OF_TRAINING
from visdet.engine.config.packaged import existing_config, packaged_configs
from visdet.engine.process.console import is_main_process, say
from visdet.engine.process.places import no_empty_folders
from visdet.errors import InvalidInputError, UserError

if TYPE_CHECKING:
    from mmengine.config import Config

    from visdet.engine.run import TrainingResult

__all__ = ["evaluate", "train"]

_DEVICE = re.compile(r"(cpu|cuda)(?::(\d*))?")
_MODEL = "dino-small"
_OF_COCO = "_coco"  # ends the names of the configs whose data --data replaces
# The small model is validated every 20 iterations for each 24 images, which takes about a tenth of the time.
_EVERY, _IMAGES_OF_VALIDATION = 20, 24
_CONFIG = """_base_ = [{base!r}]

data_root = {root!r}
classes = {classes!r}
model = dict(bbox_head=dict(num_classes=len(classes)))
images = dict(data_root=data_root, data_prefix=dict(img=""), metainfo=dict(classes=classes))
train_dataloader = dict(dataset=dict(ann_file={train!r}, **images))
val_dataloader = dict(dataset=dict(ann_file={val!r}, **images))
test_dataloader = dict(dataset=dict(ann_file={test!r}, **images))
val_evaluator = dict(ann_file={val!r})
test_evaluator = dict(ann_file={test!r})
"""


@checked
@with_other_names(NAMES_OF_TRAINING)
def train(
    config: "str | os.PathLike | Config | None" = None,
    options: Mapping[str, Any] | None = None,
    /,
    *,
    data: str | os.PathLike | None = None,
    model: str | dict | None = None,
    iters: Positive | None = None,
    epochs: Positive | None = None,
    batch_size: Positive | None = None,
    lr: AtLeast0 | None = None,
    workers: Annotated[int, Range(0, 512)] | None = None,
    device: str | int | None = None,
    seed: Seed | None = None,
    deterministic: bool | None = None,
    work_dir: str | os.PathLike | None = None,
    resume: str | os.PathLike | bool | None = None,
    launcher: str | None = None,
    **others: Any,
) -> "TrainingResult":
    """Train a model on a folder of pictures, or the model of a config. This is the command ``visdet train``.

    Args:
        config, options, work_dir, resume, launcher: see :func:`visdet.engine.train`. With ``data``, the config is the
            base, and the default work_dir is ``work_dirs/<name of the folder>``.
        data: a folder in a format that ``visdet convert`` reads: COCO, YOLO, Pascal VOC or CSV tables. A validation
            part that it lacks is drawn from the training images. The config that is made is written into the run.
        model: the model for ``data``, such as 'dino-small', which is the default; or a dict, which is merged into the
            model of a config.
        iters, epochs: the length of the run; one of them.
        batch_size: images of a training iteration. lr: the learning rate. workers: processes that read the images.
        device: 'cpu', 'cuda', or 'cuda:1'. The default is the GPU if there is one.
        seed: the seed of all random numbers.
        deterministic: train to the same bits in every run; without a seed, it is 0 (``randomness.deterministic``).
        others: see :func:`visdet.engine.train`.

    Raises:
        UserError: the folder, an option or the config cannot be used. The message says why.
    """
    from visdet.engine.checkpoints.held_config import load_config
    from visdet.engine.run import agreed_folder
    from visdet.engine.run import train as train_config

    _use_device(device)
    given = options or {}
    if isinstance(model, str) and data is None:
        raise InvalidInputError(
            f"model={model!r} names the model for data=FOLDER; a config has a model of its own"
        )
    if isinstance(model, dict):
        others["model"], model = model, None
    if data is not None:
        root = Path(data).expanduser().resolve()
        folder = os.path.expanduser(work_dir or os.path.join("work_dirs", root.name))
        work_dir = folder if resume else agreed_folder(folder, launcher)
        base = os.path.abspath(existing_config(os.fspath(config))) if config is not None else None
        with no_empty_folders(work_dir):
            config = config_for(root, base or _base_of(model or _MODEL), Path(work_dir))
    short = (iters, epochs, batch_size, lr, workers, seed, deterministic)
    if any(value is not None for value in short):
        config = others.get("from_") if config is None else config
        cfg, remarks = load_config(config, given, work_dir and os.fspath(work_dir))  # type: ignore[arg-type]
        for remark in remarks:
            say(remark)
        config, given = cfg, _short_options(cfg, *short)
    return train_config(config, given, work_dir=work_dir, resume=resume, launcher=launcher, **others)


def evaluate(
    config: "str | os.PathLike | Config",
    checkpoint: str | os.PathLike | None = None,
    options: Mapping[str, Any] | None = None,
    /,
    *,
    data: str | os.PathLike | None = None,
    work_dir: str | os.PathLike | None = None,
    launcher: str | None = None,
    **others: Any,
) -> dict[str, float]:
    """Evaluate a checkpoint on the test set of its config, or on a folder of pictures. This is ``visdet test``.

    Args:
        config, checkpoint, options, launcher, others: see :func:`visdet.engine.evaluate`.
        data: a folder as for :func:`train`. Its test part counts, or else its validation part, or else the fifth that
            is drawn for it.
        work_dir: the folder to write. With ``data``, the default is the first free one of
            ``work_dirs/<name of the folder>_test``, …_2.
    """
    from visdet.engine.run import agreed_folder
    from visdet.engine.run import evaluate as evaluate_config

    given = options or {}
    if data is not None:
        root = Path(data).expanduser().resolve()
        if work_dir is None:
            folder = os.path.join("work_dirs", f"{root.name}_test")
            work_dir = agreed_folder(folder, launcher, for_training=False)
        with no_empty_folders(str(work_dir)):
            files, _ = _converted(root, Path(work_dir))
        file = str(next(files[split] for split in ("test", "val", "train") if split in files))
        dataset = {
            "data_root": f"{root}/",
            "data_prefix": {"img": ""},
            "ann_file": file,
            "allow_absent_classes": True,
        }
        given = {**given, "test_dataloader.dataset": dataset, "test_evaluator.ann_file": file}
    return evaluate_config(config, checkpoint, given, work_dir=work_dir, launcher=launcher, **others)


def config_for(root: Path, base: str, folder: Path) -> str:
    """Write a config for a folder of pictures into the folder of a run, print it, and return its path.

    The main process writes, and the others wait for it.

    Args:
        root: the folder of pictures. base: the config that it inherits. folder: the folder of the run.

    Raises:
        UserError: the folder cannot be read, or has nothing to train on.
    """
    from mmengine.dist import barrier

    from visdet.engine.process.places import check_work_dir
    from visdet.files.writing import write_atomically
    from visdet.structures.coco_json import corners_of

    file = folder / "data" / f"{root.name}.py"  # The run writes the whole config beside the checkpoints.
    if is_main_process():
        check_work_dir(folder)
        files, contents = _converted(root, folder)
        if not {"train", "val"} <= files.keys():
            raise UserError(
                f"{root} has nothing to train on: its images are for {' and '.join(files)}, and one for training and "
                "one for validation are needed"
            )
        content = contents["train"]
        classes = tuple(category["name"] for category in content["categories"])
        corners = [corners_of(annotation) for annotation in content["annotations"]]
        if base == _base_of(_MODEL) and corners and all(corners):
            say(
                f"all outlines in {root} have four corners: {_MODEL} finds the upright boxes around them, and "
                f"--model rotated-{_MODEL} boxes that turn"
            )
        parts = {split: str(files.get(split, files["val"])) for split in ("train", "val", "test")}
        text = _CONFIG.format(base=base, root=f"{root}/", classes=classes, **parts)
        if base.endswith("dino-small_coco.py"):
            interval = _EVERY * math.ceil(len(contents["val"]["images"]) / _IMAGES_OF_VALIDATION)
            text += f"train_cfg = dict(val_interval={interval})\n"
        write_atomically(file, text)
        say(f"{file}:\n{text}")
    barrier()
    return str(file)


def _converted(root: Path, folder: Path) -> tuple[dict[str, Path], dict[str, dict[str, Any]]]:
    """Write COCO files of a data set into a folder of a run, and return them and their contents by their splits."""
    from visdet.datasets.coco_report import coco_report
    from visdet.datasets.conversion import convert
    from visdet.structures.coco_json import load_coco_json

    files, lines = convert(root, (folder / "data").resolve())
    found = {file.stem: file for file in files}
    contents: dict[str, dict[str, Any]] = {}
    for line in lines:
        say(line)
    parts = []
    for split in ("train", "val", "test"):
        if split not in found:
            continue
        content = contents[split] = load_coco_json(found[split])
        _, *remarks = coco_report(content, str(root))
        for remark in remarks:
            say(f"{split}: {remark}")
        parts.append(f"{len(content['images'])} images for {split}")
    say(f"data: {', '.join(parts)}")
    return found, contents


def _base_of(model: str) -> str:
    """Return the base for a model, whose name is that of a config without its folder and the end ``_coco``."""
    from visdet.engine.config.files import read_config
    from visdet.engine.errors import nearest_names

    named = {path.rpartition("/")[2].removesuffix(_OF_COCO): path for path in packaged_configs()}
    path = named.get(model, model)
    base = f"visdet::{path}.py"
    kind = read_config(base).train_dataloader.dataset.type if path in named.values() else None
    if kind != "CocoDataset":
        of_coco = [name for name, path in named.items() if path.endswith(_OF_COCO)]
        near = ", ".join(nearest_names(model, of_coco) or of_coco)
        reason = f", whose data are those of {kind}" if kind else ""
        raise InvalidInputError(
            f"model must be one of {near}, or a config of the package for CocoDataset, got {model!r}{reason}"
        )
    return base


def _short_options(
    cfg: "Config",
    iters: int | None,
    epochs: int | None,
    batch_size: int | None,
    lr: float | None,
    workers: int | None,
    seed: int | None,
    deterministic: bool | None,
) -> dict[str, Any]:
    """Return the values of a config that the short options stand for, by their dotted keys."""
    by_iterations = is_iteration_based(section_of(cfg, "train_cfg"))
    if iters and epochs:
        raise InvalidInputError("give either iters or epochs, not both")
    if iters and not by_iterations:
        raise InvalidInputError("iters: the schedule of this config counts epochs; give epochs (--epochs)")
    if epochs and by_iterations:
        iters, epochs = epochs * _iterations_of_epoch(cfg, batch_size), None
    paths: dict[str, Any] = {
        "train_dataloader.batch_size": batch_size,
        "optim_wrapper.optimizer.lr": lr,
        "randomness.seed": seed,
        "randomness.deterministic": deterministic,
        "train_cfg.max_iters": iters,
        "train_cfg.max_epochs": epochs,
    }
    for section in ("train_dataloader", "val_dataloader", "test_dataloader"):
        if cfg.get(section):
            paths[f"{section}.num_workers"] = workers
    return {path: value for path, value in paths.items() if value is not None}


def _iterations_of_epoch(cfg: "Config", batch_size: int | None) -> int:
    from visdet.engine.config.load import build_dataset

    batch = (batch_size or cfg.train_dataloader.batch_size) * int(os.environ.get("WORLD_SIZE", 1))
    return math.ceil(len(build_dataset(cfg, "train")) / batch)


def _use_device(device: str | int | None) -> None:
    """Let this process see the device alone that it trains on.

    Raises:
        UserError: there is no such device, or this process uses a GPU already.
    """
    if device is None:
        return
    import torch

    given = str(device)
    found = _DEVICE.fullmatch(f"cuda:{given}" if given.isdecimal() else given)
    if found is None:
        raise InvalidInputError(f"device must be 'cpu', 'cuda' or 'cuda:N', got {device!r}")
    kind, index = found.groups("")
    is_cuda, gpus = kind == "cuda", torch.cuda
    if is_cuda and int(index or 0) >= gpus.device_count():
        raise UserError(f"device {device!r} is not available: torch sees {gpus.device_count()} GPUs")
    if index or not is_cuda:
        if gpus.is_initialized():
            raise UserError(f"device {device!r} must be chosen before this process uses a GPU")
        os.environ["CUDA_VISIBLE_DEVICES"] = index if is_cuda else ""
