"""A check that model and data speak of the same number of classes."""

from itertools import zip_longest
from typing import Any

from mmengine.hooks import Hook
from mmengine.model import is_model_wrapper
from torch.utils.data import Dataset

from visdet.registry import HOOKS

from ..errors import ConfigError

__all__ = ["NumClassCheckHook"]


@HOOKS.register_module()
class NumClassCheckHook(Hook):
    """Compares ``num_classes`` of the model's heads with the classes of every data set of the run, before it starts.

    The data sets of one run must name the same classes in the same order.

    Raises:
        ConfigError: names the head, the data set and both numbers; or two data sets and a label that they differ in.

    Source: the name is mmdet's, whose hook looks at epoch starts.
    """

    def before_run(self, runner) -> None:
        """Compare the data sets of the loops that were built."""
        model = runner.model.module if is_model_wrapper(runner.model) else runner.model
        heads = {
            name: module
            for name, module in model.named_modules()
            if isinstance(getattr(module, "num_classes", None), int)
            and "head" in f"{name} {type(module)}".lower()
        }
        datasets = {}
        for loader_name in ("train", "val", "test"):
            loop = getattr(runner, f"_{loader_name}_loop")
            if hasattr(loop, "dataloader"):
                datasets[loader_name] = loop.dataloader.dataset
                for head_name, head in heads.items():
                    _compare(
                        head_name, head.num_classes, f"{loader_name}_dataloader", loop.dataloader.dataset
                    )
        _compare_lists(datasets)


def _compare_lists(datasets: dict[str, Any]) -> None:
    """Compare the classes of the data sets of a run: a label must mean the same in all of them."""
    lists = {
        name: tuple(dataset.metainfo["classes"])
        for name, dataset in datasets.items()
        if (getattr(dataset, "metainfo", None) or {}).get("classes") is not None
    }
    for name, classes in lists.items():
        first_name, first = next(iter(lists.items()))
        differing = [label for label, pair in enumerate(zip_longest(first, classes)) if pair[0] != pair[1]]
        if differing:
            label = differing[0]
            here, there = (names[label] if label < len(names) else "absent" for names in (first, classes))
            raise ConfigError(
                f"the classes of {first_name}_dataloader.dataset and {name}_dataloader.dataset differ: label {label} "
                f"is {here!r} in the one and {there!r} in the other ({len(first)} and {len(classes)} classes). Give "
                "both the same metainfo.classes, in the same order"
            )


def _compare(head_name: str, num_classes: int, loader_name: str, dataset: Dataset) -> None:
    classes = (getattr(dataset, "metainfo", None) or {}).get("classes")
    if classes is None or len(classes) == num_classes:
        return
    shown = ", ".join(classes[:6]) + (", ..." if len(classes) > 6 else "")
    raise ConfigError(
        f"model.{head_name}.num_classes is {num_classes}, but {loader_name}.dataset ({type(dataset).__name__}) has "
        f"{len(classes)} classes ({shown}). Set model.{head_name}.num_classes={len(classes)}, or name the classes "
        "to train on in the data set's metainfo"
    )
