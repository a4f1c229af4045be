"""Weights meet the classes of a run by name, whatever the order in which the checkpoint lists them."""

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from visdet.errors import listed

from ..errors import CheckpointError
from ..process.console import warn
from .held_config import meta_of

ClassLists = dict[str, tuple[str, ...]]
_LISTS = ("classes", "map_classes")


def class_lists(metainfo: Any) -> ClassLists:
    """Return the lists of classes in the meta information of a data set: ``classes``, and ``map_classes`` of maps."""
    given = metainfo if isinstance(metainfo, Mapping) else {}
    found = {name: given.get(name) or given.get(name.upper()) for name in _LISTS}
    return {name: tuple(names) for name, names in found.items() if isinstance(names, list | tuple)}


def lists_of_checkpoint(content: Mapping[str, Any]) -> ClassLists:
    """Return the lists of classes that a checkpoint was trained with. mmdet 2 wrote them into ``meta['CLASSES']``."""
    meta = meta_of(content)
    return class_lists(meta.get("dataset_meta")) or class_lists(meta)


def rows_of_classes(model: nn.Module) -> dict[str, list[str]]:
    """Return the weights of a model whose rows belong to classes, by the list that names these.

    A module declares them by ``class_rows``: for a list, the names of its layers or parameters.
    """
    names = list(model.state_dict(keep_vars=True))
    found: dict[str, list[str]] = defaultdict(list)
    for place, module in model.named_modules():
        for kind, layers in getattr(module, "class_rows", {}).items():
            starts = tuple(f"{place}.{layer}.".lstrip(".") for layer in layers)
            found[kind] += [name for name in names if f"{name}.".startswith(starts)]
    return found


def matched_by_name(
    model: nn.Module,
    weights: dict[str, Tensor],
    trained: ClassLists,
    wanted: ClassLists,
    source: str,
    strict: bool = True,
) -> dict[str, Tensor]:
    """Return weights whose rows of classes are in the order in which a run lists the classes.

    Args:
        model: the model of the run, which has the rows of classes that the checkpoint does not know.
        weights: the weights of the checkpoint.
        trained, wanted: the classes of the checkpoint and of the run.
        source: the path or the address of the checkpoint, for messages.
        strict: whether to refuse classes that the checkpoint does not know. Otherwise, their rows begin anew, and
            weights of which all rows would are left out, so that they do not count as loaded.

    Raises:
        CheckpointError: ``strict`` is True and the checkpoint does not know a class, or the model does not declare
            which of its rows belong to classes that have another order.
    """
    rows = rows_of_classes(model)
    result = copy.copy(weights)  # The copy keeps the versions by which modules migrate old weights.
    for kind, names in wanted.items():
        known = trained.get(kind)
        if known == names:
            continue
        keys = [key for key in rows.get(kind, ()) if _has_rows(weights.get(key), known or names)]
        if known is None:
            if keys:
                warn(
                    f"checkpoint {source} names no {kind}. Its rows are taken for {listed(names)}, in this order"
                )
            continue
        new = [name for name in names if name not in known]
        unknown = listed(new)
        both = f"The checkpoint has the {kind} {listed(known)}; the run has {listed(names)}"
        if strict and new:
            raise CheckpointError(
                f"checkpoint {source} does not know {unknown}. {both}. Name those of the checkpoint in the metainfo of "
                "the data sets, in any order, or train by --from"
            )
        if strict and not keys:
            raise CheckpointError(
                f"checkpoint {source} has its {kind} in another order, and {type(model).__name__} does not declare the "
                f"rows that belong to them by class_rows. {both}"
            )
        begins = f", and those of {unknown} begin anew" if new else ""
        warn(
            f"checkpoint {source} has other {kind} or another order. Its rows are taken by name{begins}. {both}"
        )
        expected = model.state_dict()
        for key in keys:
            if len(new) == len(names):
                del result[key]
            else:
                result[key] = _rows_by_name(weights[key], known, names, expected[key])
    return result


def _has_rows(value: Any, names: Sequence[str]) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and len(value) == len(names)


def _rows_by_name(value: Tensor, known: Sequence[str], names: Sequence[str], own: Tensor) -> Tensor:
    """Return the rows of the known classes in the order of ``names``, with the model's own rows for new ones."""
    if own.shape[1:] != value.shape[1:] or len(own) != len(names):
        return value
    result = own.detach().to(value.device, value.dtype, copy=True)
    for row, name in enumerate(names):
        if name in known:
            result[row] = value[known.index(name)]
    return result


def category_ids_of(dataset: Any) -> list[Any] | None:
    """Return the number of each class in the annotation file of a data set, or None if it is not known.

    The data set may be within others. Of several, all must have the same numbers.
    """
    if hasattr(dataset, "category_ids"):
        return list(dataset.category_ids)
    within = [getattr(dataset, "dataset", None), *getattr(dataset, "datasets", ())]
    found = [category_ids_of(part) for part in within if part is not None]
    return found[0] if found and all(numbers == found[0] for numbers in found) else None
