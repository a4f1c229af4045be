"""A hook that describes a run at its start and reports its results at its end."""

import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from mmengine.dist import get_world_size
from mmengine.hooks import EarlyStoppingHook, EMAHook, Hook

import visdet
from visdet.checks.state_dicts import parameters_of
from visdet.registry import HOOKS
from visdet.structures.tables import table_text

from ..checkpoints.checkpoint import BEST
from ..checkpoints.score_thresholds import write_curves
from ..first_hook import first_hook
from ..inference.detector_config import takes_images
from ..optim.wrappers import unwrapped
from ..process.console import is_main_process, say
from ..process.places import short_path
from .visualization_hook import val_pictures_folder


@HOOKS.register_module()
class RunReportHook(Hook):
    """Prints a summary of the run before training, and the AP of each class and the written files after it."""

    priority = "LOWEST"

    def before_train(self, runner: Any) -> None:
        """Print the model, the data sets, the length of the run and the folder that it writes to."""
        model = unwrapped(runner.model)
        loop = runner.train_loop
        start = runner.load_from
        done = runner.iter
        total, trained = parameters_of(model)
        loader = loop.dataloader
        data = loader.dataset
        processes = get_world_size()
        batch = getattr(loader.batch_sampler, "batch_size", "?")
        length = f"{loop.max_epochs} epochs, " if loop.by_epoch else ""
        rows = {
            "visdet": f"{visdet.__version__}, torch {torch.__version__}, {_device()}, seed {runner.seed}",
            "model": f"{type(model).__name__}, {_millions(total)} parameters ({_millions(trained)} trained)",
            "train": f"{_size(data)}, batch {batch} x {processes} "
            f"process{'es' if processes > 1 else ''}, {length}{loop.max_iters} iterations",
        }
        if isinstance(batch, int) and batch > len(data):
            rows["train"] += ". A batch is larger than the data set; --batch-size sets a smaller one"
        if runner.val_loop is not None:
            rows["val"] = f"{_size(runner.val_dataloader.dataset)}, {_validations(loop)}"
        rows["optimizer"] = _optimizer(runner.optim_wrapper)
        if averaging := first_hook(runner.hooks, EMAHook):
            options = dict(averaging.ema_cfg)
            kind = options.pop("type")
            rows["EMA"] = ", ".join([kind, *(f"{key} {value}" for key, value in options.items())])
        rows["start"] = f"weights of {start}" if start else "from scratch"
        if done > 0:
            resumed = short_path(runner.resumed_from)
            rows["start"] = f"resumed from {resumed} at iteration {done} of {loop.max_iters}"
        rows["writes to"] = f"{short_path(runner.work_dir)} (log: {short_path(runner.logger.log_file)})"
        for name, row in rows.items():
            say(f"{name:<10} {row}")

    def after_train(self, runner: Any) -> None:
        """Print the AP of each class and the paths of the written files."""
        loop = runner.train_loop
        work_dir = runner.work_dir
        done = runner.iter
        total = runner.max_iters
        if runner.val_loop is not None:
            _print_metrics(runner.val_evaluator, runner.metrics)
        if loop.stop_training and done < total:
            reasons = [
                f"EarlyStoppingHook: {hook.monitor} is {runner.metrics.get(hook.monitor)}, the best was "
                f"{hook.best_score:.4g}, and {hook.wait_count} validations brought no more"
                for hook in runner.hooks
                if isinstance(hook, EarlyStoppingHook)
            ]
            reason = "; ".join(reasons) or "a hook has set stop_training"
            say(f"stopped after {done} of {total} iterations: {reason}")
        say("written:")
        known = runner.message_hub.get_info
        written = {
            "last checkpoint": known("last_ckpt"),
            "best checkpoint": known("best_ckpt"),
            "log": runner.logger.log_file,
            "pictures": val_pictures_folder(runner),
            "TensorBoard": f"{runner.log_dir}/vis_data",
        }
        for label, path in written.items():
            if path and Path(path).exists():
                say(f"  {label:<16} {short_path(path)}")
        say("look at it:")
        folder = shlex.quote(short_path(work_dir))
        say(f"  tensorboard --logdir {folder}")
        if Path(work_dir, BEST).exists() and takes_images(runner.cfg):
            say(f"  visdet infer {folder}/{BEST} IMAGE|VIDEO|FOLDER ...")
        say(f"  visdet curves {folder}")

    def after_test(self, runner: Any) -> None:
        """Print the AP of each class, and write and draw the precision over the recall of each class."""
        evaluator = runner.test_evaluator
        _print_metrics(evaluator, runner.metrics)
        for file in write_curves(evaluator.metrics, runner.work_dir) if is_main_process() else ():
            say(f"curves: {short_path(file)}")
        say(f"log: {short_path(runner.logger.log_file)}")


def _print_metrics(evaluator: Any, values: Mapping[str, Any]) -> None:
    """Print a table with one row per class and one for all classes, for each metric that has results per class."""
    of_all = {name.split("/", 1)[-1].removeprefix("bbox_"): value for name, value in values.items()}
    for metric in evaluator.metrics:
        rows = getattr(metric, "classwise_results", None)
        if not rows:
            continue
        names = [name for name in rows[0] if name.startswith(("mAP", "AP"))]
        total = {"name": "all", "num_boxes": sum(row["num_boxes"] for row in rows), **of_all}
        table = []
        for row in (*rows, total):
            table.append([row.get(name, math.nan) for name in ("name", "num_boxes", *names)])
        say(table_text(("class", "boxes", *names), table))


def _validations(loop: Any) -> str:
    """Return when a run is validated, such as "every 5 iterations from iteration 1000 on, and at the end"."""
    unit = "epoch" if loop.by_epoch else "iteration"
    interval = loop.val_interval
    _, total = loop.progress()
    first = math.ceil(max(loop.val_begin, 1) / interval) * interval
    if first >= total:
        return "at the end"
    every = f"every {unit}" if interval == 1 else f"every {interval} {unit}s"
    begins = f" from {unit} {first} on" if first > interval else ""
    return f"{every}{begins}{', and at the end' if total % interval else ''}"


def _size(dataset: Any) -> str:
    """Return the number of samples with the data set's ``unit``, which is 'images' by default."""
    return f"{len(dataset)} {getattr(dataset, 'unit', 'images')}"


def _device() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    threads = torch.get_num_threads()
    return f"CPU ({threads} thread{'s' if threads > 1 else ''})"


def _millions(count: int) -> str:
    return f"{count / 1e6:.2f} M" if count >= 1e5 else f"{count / 1e3:.1f} k"


def _optimizer(wrapper: Any) -> str:
    dtype = getattr(wrapper, "cast_dtype", None)
    precision = "float32" if dtype is None else f"{str(dtype).removeprefix('torch.')} autocast"
    rates = sorted({group.get("initial_lr", group["lr"]) for group in wrapper.param_groups})
    shown = " / ".join(f"{rate:.1e}" for rate in rates)
    counts = wrapper._accumulative_counts
    updates = f", gradients of {counts} iterations" if counts > 1 else ""
    return f"{type(wrapper.optimizer).__name__}, learning rate {shown}, {precision}{updates}"
