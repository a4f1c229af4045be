"""The functions of ``mmcv._ext``, under mmcv's names and with mmcv's arguments.

Like mmcv's compiled functions, they write into the tensors that mmcv's wrappers allocate. A backward function runs
visdet's operator again on the inputs that the wrapper has saved, and differentiates it.
"""

from collections.abc import Callable
from typing import Any

import torch

from . import _ext_losses, _ext_maps, _ext_regions

_PARTS = (_ext_losses, _ext_maps, _ext_regions)


def __getattr__(name: str) -> Callable:
    """Return a function of ``mmcv._ext`` by its name.

    If visdet does not provide it, the result is a function that raises a NotImplementedError when it is called, because
    ``mmcv.ops`` looks up all its functions at its import.
    """
    if name.startswith("__"):
        raise AttributeError(name)
    for part in _PARTS:
        if name in part.__all__:
            return getattr(part, name)

    def not_provided(*_: Any, **__: Any) -> None:
        raise NotImplementedError(
            f"mmcv._ext.{name}: visdet provides the operators of mmdet, and this is not one of them. Install "
            "mmcv with its compiled operators instead of mmcv-lite: pip uninstall mmcv-lite; pip install mmcv"
        )

    not_provided.__name__ = name
    return not_provided


def get_compiler_version() -> str:
    return "none: operators by visdet"


def get_compiling_cuda_version() -> str:
    return torch.version.cuda or "not available"
