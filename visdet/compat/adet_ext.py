"""The module ``adet._C`` (AdelaiDet, TESTR, DPText-DETR), of which visdet has the deformable attention.

Any other function raises a NotImplementedError when it is called.
"""

from ._deferred import deferred
from .msda_ext import get_compiler_version, get_cuda_version, ms_deform_attn_backward, ms_deform_attn_forward

__all__ = ["get_compiler_version", "get_cuda_version", "ms_deform_attn_backward", "ms_deform_attn_forward"]

__getattr__ = deferred("adet._C")
