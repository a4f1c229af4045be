"""Exports of a config with a checkpoint, and the metrics of an exported model on data."""

import copy
import itertools
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from torch import nn

from visdet.checks.heads import check_heads
from visdet.engine.checkpoints.held_config import load_config
from visdet.engine.checkpoints.score_thresholds import measured_thresholds, thresholds_for, told_thresholds
from visdet.engine.config.checks import section_of, several_of
from visdet.engine.config.load import dataset_config
from visdet.engine.inference.detector import Detector, init_detector, takes_images
from visdet.engine.inference.given_images import GivenImage
from visdet.engine.inference.image_files import find_images, is_video
from visdet.engine.prepare import build_runner
from visdet.engine.process.console import say
from visdet.engine.process.default_device import cpu_by_default
from visdet.engine.process.places import check_work_dir
from visdet.errors import MissingFileError

from .check import Differences, Run, arrays
from .errors import ExportError
from .families.family import Family, Tensors
from .families.pictures import Steps
from .precision import LIMITS, Tolerance
from .run import export, format_module

_CALIBRATION = 32  # batches
_ABOUT_PICTURES = {
    "interpolation": "bilinear without antialiasing, rounded to integers; the first pixel has its centre at 0.5",
    "orientation": "pictures are turned as their EXIF data say",
}


def export_config(
    config: str | os.PathLike | Config,
    checkpoint: str | os.PathLike,
    out: str | Path,
    options: Mapping[str, Any] | None = None,
    *,
    format: Literal["pt2", "aoti", "onnx", "openvino"] = "pt2",
    precision: Literal["float32", "float16", "bfloat16", "int8"] = "float32",
    shape: Sequence[int] | None = None,
    batch: int | None = None,
    data: str | None = None,
    device: str = "cpu",
    embed: bool | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    """Export the model of a config with the weights of a checkpoint. This is the command ``visdet export``.

    Args:
        config, checkpoint, options: as in :func:`visdet.evaluate`.
        out: the folder to write.
        format, precision, shape, batch: see :func:`visdet.export.run.export`.
        data: an annotation file of the kind of the config's test data, or a folder that replaces its ``data_root``, on
            which the metrics of the exported model and of the model are compared; or a folder of images, on which their
            outputs are compared.
        device: the device of the model.
        embed: whether the steps before a detector become part of the graph, which then takes a picture of any size.
            The default is True for a detector of images whose ``batch`` is not given, if the steps or ``shape`` limit
            the size of pictures.
        arguments: the others of :func:`visdet.export.run.export`.
    """
    format_module(format)  # What is missing is said before anything is read.
    cfg, _ = load_config(config, dict(options or {}))
    path = os.path.expanduser(checkpoint)
    dataset = dataset_config(cfg, "test")  # That of driving has both of these.
    augmentation = section_of(dataset, "data_aug_conf")
    pipeline = dataset.get("pipeline")
    shape = shape or augmentation.get("final_dim")
    steps = _embedded_steps(cfg, pipeline, shape, batch, embed)
    if steps is not None:
        batch = batch or 1
    images = _pictures(data, dataset.get("ann_file"))
    if data is not None and not images:
        # Scenes are played one at a time, in batches that are filled.
        _use_data(cfg, data, None if augmentation else batch)
    with tempfile.TemporaryDirectory() as logs, cpu_by_default():
        runner = _runner_of(cfg, path, logs)
        arguments |= _about_classes(cfg, runner, runner.load_checkpoint(path))

        def evaluate(family: Family, run: Run) -> dict[str, Any]:
            limit = LIMITS[precision]
            if images:
                return _on_images(init_detector(cfg, path), images, limit, family, run)
            return _metrics(runner, limit.loss, family, run)

        check_work_dir(out, "--out")
        return export(
            runner.model.to(device),
            out,
            format=format,
            precision=precision,
            shape=shape,
            batch=batch,
            preprocessing={
                "pipeline": pipeline,
                "data_preprocessor": cfg.model.get("data_preprocessor"),
                "place": "before the graph" if steps is None else "in the graph",
                **_ABOUT_PICTURES,
            },
            steps=steps,
            evaluate=evaluate if data else None,
            calibration=partial(_calibration, runner) if data and not images else None,
            **arguments,
        )


def _calibration(runner: Any, family: Family) -> Iterator[Tensors]:
    """Return the inputs of a few batches, from whose values the ranges of int8 come."""
    return _inputs(copy.copy(family), itertools.islice(runner.test_dataloader, _CALIBRATION))


def _embedded_steps(
    cfg: Config, pipeline: Any, shape: Sequence[int] | None, batch: int | None, embed: bool | None
) -> Steps | None:
    """Return the steps that become part of the graph, or None."""
    is_wanted = takes_images(cfg) and batch is None if embed is None else embed
    if not is_wanted:
        return None
    steps = Steps.of(pipeline or ())
    if embed or shape or steps.limits_sizes():
        return steps
    say(
        "the pipeline does not limit the size of pictures: the graph takes images that are normalised before, as with "
        "--no-embed; with --shape H W it takes pictures"
    )
    return None


def _runner_of(cfg: Config, checkpoint: str, logs: str) -> Any:
    """Return the runner of a test, whose report is left out, because it would name files that are not kept."""
    cfg.load_from = checkpoint
    cfg.launcher = "none"
    cfg.resume = False
    cfg.graph = False
    cfg.work_dir = logs
    cfg.default_hooks = {**section_of(cfg, "default_hooks"), "report": None}
    return build_runner(cfg)


def _about_classes(cfg: Config, runner: Any, content: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of an export that name the classes, and the lowest score of each if they are of images."""
    classes = runner.class_lists.get("classes")
    if not classes:
        return {}
    check_heads(runner.model, classes, "test_dataloader.dataset, or else the checkpoint, names")
    if not takes_images(cfg):
        return {"classes": classes}
    measured, origin = measured_thresholds(content)
    thresholds = thresholds_for(classes, measured)
    say(told_thresholds(classes, thresholds, origin))
    return {"classes": classes, "thresholds": thresholds, "origin_of_thresholds": origin}


def _use_data(cfg: Config, data: str, batch: int | None) -> None:
    """Let the test data and the metrics of a config read an annotation file or another folder."""
    if not os.path.exists(data):
        raise MissingFileError(f"--check {data} does not exist")
    dataset: Any = dataset_config(cfg, "test")
    cfg.test_dataloader.dataset = dataset
    if os.path.isdir(data):
        dataset.data_root = os.path.join(data, "")
        annotations = os.path.join(data, dataset.get("ann_file") or "")
    else:
        annotations = dataset.ann_file = os.path.abspath(data)
    for metric in several_of(cfg, "test_evaluator"):
        if "ann_file" in metric:
            metric.ann_file = annotations
    cfg.test_dataloader.pop("batch_sampler", None)  # An exported model sees the padding of planned batches.
    cfg.test_dataloader.batch_size = batch or cfg.test_dataloader.batch_size


def _pictures(data: str | None, annotations: str | None) -> list[str]:
    """Return the pictures of a folder, or nothing if the data are an annotation file or the folder of a data set.

    Args:
        data: the file or the folder. annotations: the path of the annotation file in the folder of a data set.
    """
    if data is None or not os.path.isdir(data) or not annotations:
        return []
    if not os.path.isabs(annotations) and os.path.exists(os.path.join(data, annotations)):
        return []
    found, _ = find_images(data)
    pictures = [path for path in found if not is_video(path)]
    if not pictures:
        raise ExportError(
            f"--check {data} must hold pictures, or the annotation file {annotations}; it holds videos"
        )
    return pictures


class _Exported(nn.Module):
    """What was exported, as a model that the test loop of a runner can run."""

    def __init__(self, family: Family, run: Run) -> None:
        super().__init__()
        self.family = family
        self.run_exported = run

    def test_step(self, data: Any) -> list[Any]:
        family = self.family
        batch = _prepared(family, data)
        found = self.run_exported(family.inputs_of(batch["inputs"], batch["data_samples"]))
        return family.samples_of(found, batch["data_samples"])[: len(data["data_samples"])]


def _prepared(family: Family, data: dict[str, Any]) -> Any:
    """Return a batch as the model wants it, in which the last sample is repeated if the model takes a fixed number."""
    missing = (family.batch or 0) - len(data["data_samples"])
    filled = {name: [*values, *[values[-1]] * missing] for name, values in data.items()}
    return family.model.data_preprocessor(filled, False)


def _inputs(family: Family, batches: Iterable[Any]) -> Iterator[Tensors]:
    """Yield the inputs for batches of data, those of frames without the state that frames before them left."""
    for data in batches:
        batch = _prepared(family, data)
        yield family.inputs_of(batch["inputs"], batch["data_samples"])


def _on_images(
    detector: Detector, images: Sequence[str], limit: Tolerance, family: Family, run: Run
) -> dict[str, Any]:
    """Return the differences of the outputs on images, and raise an ExportError if they are too large."""
    differences = Differences()
    batches = (pseudo_collate([detector.item_of(GivenImage(image))]) for image in images)
    for given in _inputs(family, batches):
        differences.add(arrays(family.run(given)), arrays(run(given)), family.rows, limit)
    differences.check(limit)
    return {"differences": differences.table()}


def _metrics(runner: Any, max_loss: float, family: Family, run: Run) -> dict[str, Any]:
    """Return the metrics of the model and of what was exported, on the test data of a runner."""
    metrics = {"model": runner.test()}
    runner.model = _Exported(family, run)
    metrics["exported"] = runner.test()
    for name, value in metrics["model"].items():
        found = metrics["exported"][name]
        loss = value - found
        is_lost = np.isnan(loss) != np.isnan(value) or loss > max_loss
        if is_lost and ("mAP" in name or "NDS" in name):
            raise ExportError(
                f"{name} of the exported model is {found:.4f}, that of the model is {value:.4f}, "
                f"which is more than {max_loss} apart"
            )
    return {"metrics": metrics}
