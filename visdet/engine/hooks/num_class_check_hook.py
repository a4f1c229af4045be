"""A hook that checks that the model and the data sets have the same classes."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from mmengine.hooks import Hook

from visdet.checks.heads import check_heads
from visdet.registry import HOOKS

from ..errors import ConfigError
from ..optim.wrappers import unwrapped
from .driving_data_check import check_driving_data

_ADVICE = ". Set model.{head}.num_classes={count}, or name the classes to train on in the data set's metainfo"


@HOOKS.register_module()
class NumClassCheckHook(Hook):
    """Compares the ``num_classes`` of the model's heads with the classes of every data set before a run starts.

    The data sets of one run must also have the same classes, map classes and cameras in the same order, and one order
    of the images' channels.
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
        channel_orders = {}
        for loader_name in ("train", "val", "test"):
            loop = getattr(runner, f"_{loader_name}_loop")
            if hasattr(loop, "dataloader"):
                section = f"{loader_name}_dataloader"
                dataset = loop.dataloader.dataset
                check_driving_data(model, section, dataset)
                steps = getattr(getattr(dataset, "pipeline", None), "transforms", ())
                for step in steps:
                    if hasattr(step, "channel_order"):
                        channel_orders[step.channel_order] = f"{section}.dataset"
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
