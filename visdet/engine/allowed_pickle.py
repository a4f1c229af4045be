"""A pickle reader that accepts only the types that checkpoints of mmengine and mmdet contain."""

import collections
import pathlib
import pickle
from typing import Any

import torch
from mmengine.logging import HistoryBuffer

from visdet.structures.numpy_pickle import NUMPY_GLOBALS

__all__ = ["AllowedPickle", "DisallowedGlobalError"]


class DisallowedGlobalError(pickle.UnpicklingError):
    """A pickle contains a type or function that is not on the list; the message is its dotted name."""


def _statistic_of_history(owner: Any, name: str) -> Any:
    """Replace ``getattr`` in a pickle. The only attributes it returns are the statistics methods of history buffers."""
    if owner is HistoryBuffer and name in ("mean", "max", "min", "current"):
        return getattr(HistoryBuffer, name)
    raise DisallowedGlobalError(f"getattr({owner!r}, {name!r})")


_ALLOWED: dict[tuple[str, str], Any] = {
    **NUMPY_GLOBALS,
    ("builtins", "getattr"): _statistic_of_history,
    ("__builtin__", "getattr"): _statistic_of_history,
    ("builtins", "set"): set,
    ("__builtin__", "set"): set,
    ("builtins", "slice"): slice,
    ("builtins", "complex"): complex,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("collections", "Counter"): collections.Counter,
    ("collections", "defaultdict"): collections.defaultdict,
    ("pathlib", "PosixPath"): pathlib.PurePosixPath,
    ("mmengine.logging.history_buffer", "HistoryBuffer"): HistoryBuffer,
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("torch", "Tensor"): torch.Tensor,
    ("torch.nn.parameter", "Parameter"): torch.nn.Parameter,
    ("torch._utils", "_rebuild_tensor"): torch._utils._rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("torch._utils", "_rebuild_parameter"): torch._utils._rebuild_parameter,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, torch.dtype) or (name.endswith("Storage") and isinstance(found, type)):
            return found
        raise DisallowedGlobalError(f"{module}.{name}")


class AllowedPickle:
    """The part of a pickle module that ``torch.load`` uses."""

    __name__ = "visdet.engine.allowed_pickle"
    Unpickler = _Unpickler

    @staticmethod
    def load(file: Any, **options: Any) -> Any:
        """Return the object that ``file`` holds."""
        return _Unpickler(file, **options).load()
