"""The functions of ``mmcv._ext``, under mmcv's names and with mmcv's arguments.

Like mmcv's compiled functions, they write into the tensors that mmcv's wrappers allocate. A backward function runs
visdet's operator again on the inputs that the wrapper has saved, and differentiates it. Any other name is that of a
function that raises a NotImplementedError when it is called, because ``mmcv.ops`` looks up all its functions at its
import.
"""

from . import (
    _ext_activations,
    _ext_losses,
    _ext_maps,
    _ext_points,
    _ext_pooling,
    _ext_regions,
    _ext_rotated,
    _ext_voxels,
)
from ._deferred import deferred
from ._ext_activations import *  # noqa: F403
from ._ext_losses import *  # noqa: F403
from ._ext_maps import *  # noqa: F403
from ._ext_points import *  # noqa: F403
from ._ext_pooling import *  # noqa: F403
from ._ext_regions import *  # noqa: F403
from ._ext_rotated import *  # noqa: F403
from ._ext_voxels import *  # noqa: F403
from .msda_ext import get_compiler_version
from .msda_ext import get_cuda_version as get_compiling_cuda_version

__all__ = [
    "get_compiler_version",
    "get_compiling_cuda_version",
    *_ext_activations.__all__,
    *_ext_losses.__all__,
    *_ext_maps.__all__,
    *_ext_points.__all__,
    *_ext_pooling.__all__,
    *_ext_regions.__all__,
    *_ext_rotated.__all__,
    *_ext_voxels.__all__,
]

__getattr__ = deferred("mmcv._ext")
