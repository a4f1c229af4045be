"""The module ``detrex._C``: the functions of Deformable DETR's extension and those of ``DCNv3``."""

from .dcnv3_ext import dcnv3_backward, dcnv3_forward
from .msda_ext import ms_deform_attn_backward, ms_deform_attn_forward

__all__ = ["dcnv3_backward", "dcnv3_forward", "ms_deform_attn_backward", "ms_deform_attn_forward"]
