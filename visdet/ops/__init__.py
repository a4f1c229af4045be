"""Operators: tensors in, tensors out, on CPU and CUDA. Needs torch alone."""

from ._library import NotBuiltError, build_info
from .ms_deform_attn import ms_deform_attn, ms_deform_attn_reference

__all__ = ["NotBuiltError", "build_info", "ms_deform_attn", "ms_deform_attn_reference"]
