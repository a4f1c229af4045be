"""The module ``detectron2._C``, whose operators Mask2Former and others import and do not call.

The functions on the version are answered. Any other one raises a NotImplementedError when it is called.
"""

from ._deferred import deferred
from .msda_ext import get_compiler_version, get_cuda_version

__all__ = ["get_compiler_version", "get_cuda_version", "has_cuda"]

__getattr__ = deferred("detectron2._C")


def has_cuda() -> bool:
    """Return False: there is no file whose architectures detectron2's report could list."""
    return False
