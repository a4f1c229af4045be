"""Checkpoints as tensors and plain types, so that ``torch.load(weights_only=True)`` reads them."""

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from mmengine.logging import HistoryBuffer

from visdet.errors import InvalidTypeError

__all__ = ["restore_message_hub", "to_plain"]

_PLAIN = (bool, int, float, str, bytes, type(None))
# Enough for every smoothing window in use; a whole history of twenty scalars grows to 100 MB in a long run.
_HISTORY_LENGTH = 10_000


def to_plain(value: Any, name: str = "") -> Any:
    """Return ``value`` with tensors, None, numbers, strings, dicts, lists and tuples only.

    numpy scalars and arrays become numbers and lists, paths strings, sets lists, and mmengine's
    ``HistoryBuffer`` a dict of its latest values and counts. A module's state dict keeps the ``_metadata`` by which
    modules migrate old weights.

    Args:
        value: nested in any way.
        name: of the value, for the error.

    Raises:
        InvalidTypeError: a value of any other type, which would not come back when the checkpoint is read; the message
            says where it is.
    """
    if type(value) in _PLAIN or type(value) in (torch.Size, torch.dtype):
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, HistoryBuffer):
        values, counts = (
            torch.from_numpy(np.array(part[-_HISTORY_LENGTH:], dtype=np.float64)) for part in value.data
        )
        return {"history_values": values, "history_counts": counts}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return to_plain(value.tolist(), name)
    if isinstance(value, Mapping):
        plain = {to_plain(key, name): to_plain(item, f"{name}[{key!r}]") for key, item in value.items()}
        if isinstance(value, OrderedDict) and hasattr(value, "_metadata"):
            ordered: Any = OrderedDict(plain)
            ordered._metadata = value._metadata
            return ordered
        return plain
    if isinstance(value, tuple):
        return tuple(to_plain(item, f"{name}[{place}]") for place, item in enumerate(value))
    if isinstance(value, list | set | frozenset):
        return [to_plain(item, f"{name}[{place}]") for place, item in enumerate(value)]
    if isinstance(value, _PLAIN):  # subclasses: a str enum, numpy's float64
        kinds: tuple[Any, ...] = (bool, int, float, str, bytes)
        return next(kind(value) for kind in kinds if isinstance(value, kind))
    if isinstance(value, PurePath):
        return str(value)
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise InvalidTypeError(
        f"{name or 'the value'} is a {kind}, which a checkpoint cannot hold: give tensors, numbers, strings, None, and "
        "dicts, lists and tuples of them"
    )


def restore_message_hub(message_hub: dict) -> dict:
    """Return a message hub's state as mmengine loads it, from a plain one; one of mmengine's own is left as it is."""
    scalars = {}
    for name, history in message_hub["log_scalars"].items():
        if isinstance(history, Mapping) and "history_values" in history:
            history = HistoryBuffer(history["history_values"].numpy(), history["history_counts"].numpy())
        scalars[name] = history
    known = {*scalars, *message_hub["runtime_info"]}
    resumed = {name: flag for name, flag in message_hub["resumed_keys"].items() if name in known and flag}
    return {**message_hub, "log_scalars": scalars, "resumed_keys": resumed}
