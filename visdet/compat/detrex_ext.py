"""The module ``detrex._C``: the functions of Deformable DETR's extension and those of ``DCNv3``."""

from .dcnv3_ext import dcnv3_backward, dcnv3_forward
from .msda_ext import get_compiler_version, get_cuda_version, ms_deform_attn_backward, ms_deform_attn_forward

__all__ = [
    "dcnv3_backward",
    "dcnv3_forward",
    "get_compiler_version",
    "get_cuda_version",
    "ms_deform_attn_backward",
    "ms_deform_attn_forward",
]
