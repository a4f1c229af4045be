"""A hook that checks that the model and the data sets have the same classes."""

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from mmengine.hooks import Hook

from visdet.checks.heads import check_heads
from visdet.registry import HOOKS

from ..data.inner_parts import parts_of
from ..errors import ConfigError
from ..optim.wrappers import unwrapped
from ..process.console import warn
from .driving_data_check import check_driving_data

_ADVICE = ". Set model.{head}.num_classes={count}, or name the classes to train on in the data set's metainfo"


@HOOKS.register_module()
class NumClassCheckHook(Hook):
    """Compares the ``num_classes`` of the model's heads with the classes of every data set before a run starts.

    The data sets of one run must also have the same classes, map classes and cameras in the same order, and one order
    of the images' channels, and those of validation and tests must keep the pixels where the boxes of the file are.
    Driving models must also fit the cameras and the keys of the data sets; see :func:`check_driving_data`.

    Raises:
        ConfigError: the number of classes of a head and a data set differ, or the classes or the orders of channels of
            two data sets do. The message names them and what differs.

    Source: the name is that of mmdet's hook, which checks at the start of every epoch instead.
    """

    def before_run(self, runner: Any) -> None:
        """Check the data sets of the loops that have been built."""
        model = unwrapped(runner.model)
        orders: dict[str, dict[str, Sequence[str]]] = defaultdict(dict)
        # A hook may have a pipeline for later iterations.
        channel_orders = dict.fromkeys(_channel_orders(runner.hooks), "custom_hooks")
        for loader_name in ("train", "val", "test"):
            loop = getattr(runner, f"_{loader_name}_loop")
            if hasattr(loop, "dataloader"):
                section = f"{loader_name}_dataloader"
                dataset = loop.dataloader.dataset
                check_driving_data(model, section, dataset)
                channel_orders |= dict.fromkeys(_channel_orders(dataset), f"{section}.dataset")
                if loader_name == "train":
                    _compare_queries(dataset, getattr(model, "num_queries", math.inf))
                else:
                    _check_places(section, dataset)
                    _compare_files(section, dataset, loop.evaluator.metrics)
                meta = getattr(dataset, "metainfo", None) or {}
                classes = meta.get("classes")
                cameras = getattr(dataset, "camera_names", None)
                ordered = {"classes": classes, "map_classes": meta.get("map_classes"), "cameras": cameras}
                for kind, names in ordered.items():
                    if names is not None:
                        orders[kind][section] = names
                if classes is not None:
                    check_heads(model, classes, f"{section}.dataset ({type(dataset).__name__}) has", _ADVICE)
        for kind, lists in orders.items():
            _compare_lists(kind, lists)
        if len(channel_orders) > 1:
            raise ConfigError(
                f"the channels of the images differ: {channel_orders}. Give LoadImageFromFile the same channel_order "
                "in all pipelines"
            )


def _channel_orders(part: Any) -> set[str]:
    """Return the orders of the channels in which the images of data sets or hooks are read."""
    return {step.channel_order for step in parts_of(part) if hasattr(step, "channel_order")}


def _check_places(section: str, dataset: Any) -> None:
    """Check that the pixels of a data set stay where predictions are compared with the boxes of the file."""
    for step in parts_of(dataset):
        if getattr(step, "moves_pixels", False) and getattr(step, "prob", 1) != 0:
            raise ConfigError(
                f"{section}.dataset.pipeline has {type(step).__name__}, which moves pixels, so that predictions would "
                "not fit the boxes of the file. Leave it out"
            )


def _compare_queries(dataset: Any, queries: float) -> None:
    """Warn of images with more boxes than the model has queries, each of which finds one."""
    most = max(getattr(part, "most_boxes", 0) for part in parts_of(dataset))
    if most > queries:
        warn(f"an image of train_dataloader.dataset has {most} boxes, but model.num_queries is {queries}")


def _compare_files(section: str, dataset: Any, metrics: Sequence[Any]) -> None:
    """Warn of metrics that read the boxes of another file than the data set."""
    file = getattr(dataset, "ann_file", None)
    for metric in metrics:
        other = getattr(metric, "ann_file", None)
        if file and other and Path(other).resolve() != Path(file).resolve():
            warn(f"{section}.dataset reads {file}, but {type(metric).__name__} compares with {other}")


def _compare_lists(kind: str, lists: dict[str, Sequence[str]]) -> None:
    """Check that every number is that of the same class or camera in all data sets of a run."""
    (first_name, first), *others = lists.items()
    for name, classes in others:
        if kind == "cameras" and set(first) != set(classes):
            continue  # Another recording may name its cameras otherwise.
        for label, (here, there) in enumerate(zip_longest(first, classes, fillvalue="absent")):
            if here != there:
                raise ConfigError(
                    f"the {kind} of {first_name}.dataset and {name}.dataset differ: label {label} "
                    f"is {here!r} in the former and {there!r} in the latter ({len(first)} and {len(classes)} {kind}). "
                    f"Give both the same {kind} in the same order"
                )
