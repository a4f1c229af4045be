"""The entries of ``mmcv._ext``, which write into the tensors that mmcv's wrappers allocate, like the compiled ones.

Entries of backward passes run visdet's operator again on the inputs that the wrappers have saved, and differentiate it.
"""

from collections.abc import Callable
from typing import Any

import torch

from . import _ext_losses, _ext_maps, _ext_regions

_PARTS = (_ext_losses, _ext_maps, _ext_regions)


def __getattr__(name: str) -> Callable:
    """Return an entry. For other operators of mmcv, return a function that raises an error when it is called."""
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
