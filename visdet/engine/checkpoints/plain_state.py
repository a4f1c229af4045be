"""Conversion of checkpoints to tensors and plain types, which ``torch.load(weights_only=True)`` can read."""

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from mmengine.logging import HistoryBuffer

from visdet.errors import InvalidTypeError

_KINDS: tuple[Any, ...] = (bool, int, float, str, bytes)
_PLAIN = (*_KINDS, type(None), torch.Size, torch.dtype)
# The values of a history that a checkpoint keeps, which suffice for every smoothing window in use. The full histories
# of twenty scalars grow to 100 MB in a long run.
_HISTORY_LENGTH = 10_000


def to_plain(value: Any, name: str = "") -> Any:
    """Return ``value`` converted to tensors, numbers, strings, bytes, None, and dicts, lists and tuples of them.

    Tensors are detached and moved to the CPU. numpy scalars become numbers, numpy arrays and sets become lists, and
    paths become strings. mmengine's ``HistoryBuffer`` becomes a dict of its latest values and counts. ``torch.Size``
    and ``torch.dtype`` stay as they are. A module's state dict keeps its ``_metadata``, by which modules migrate old
    weights.

    Args:
        value: a value, which may be nested.
        name: the name of the value, for the error message.

    Raises:
        InvalidTypeError: there is a value of another type, which could not be read back. The message gives its place.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    match value:
        case torch.Tensor():
            return value.detach().cpu()
        case HistoryBuffer():
            values, counts = (
                torch.from_numpy(np.array(part[-_HISTORY_LENGTH:], dtype=np.float64)) for part in value.data
            )
            return {"history_values": values, "history_counts": counts}
        case np.generic() | np.ndarray():
            return to_plain(value.tolist(), name)
        case Mapping():
            plain = {to_plain(key, name): to_plain(item, f"{name}[{key!r}]") for key, item in value.items()}
            if isinstance(value, OrderedDict) and hasattr(value, "_metadata"):
                ordered: Any = OrderedDict(plain)
                ordered._metadata = value._metadata
                return ordered
            return plain
        case tuple() | list() | set() | frozenset():
            items = [to_plain(item, f"{name}[{place}]") for place, item in enumerate(value)]
            return tuple(items) if isinstance(value, tuple) else items
        case PurePath():
            return str(value)
    for plain_kind in _KINDS:
        if isinstance(value, plain_kind):  # a subclass: a str enum
            return plain_kind(value)
    raise InvalidTypeError(
        f"{name or 'the value'} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold. It can "
        "hold tensors, numbers, strings, None, and dicts, lists and tuples of them"
    )


def restore_message_hub(message_hub: dict) -> dict:
    """Return the state of a message hub in the form that mmengine loads.

    Args:
        message_hub: a state that :func:`to_plain` has converted, or one that mmengine has written.
    """
    scalars = {}
    for name, history in message_hub["log_scalars"].items():
        match history:
            case {"history_values": values, "history_counts": counts}:
                history = HistoryBuffer(values.numpy(), counts.numpy())
        scalars[name] = history
    known = {*scalars, *message_hub["runtime_info"]}
    resumed = {name: flag for name, flag in message_hub["resumed_keys"].items() if name in known and flag}
    return {**message_hub, "log_scalars": scalars, "resumed_keys": resumed}
