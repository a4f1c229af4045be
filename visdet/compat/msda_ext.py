"""The functions of Deformable DETR's extension, under their names. DINO, Mask2Former and others compile the same one.

``visdet.compat.extensions`` makes this module importable as ``MultiScaleDeformableAttention``, ``groundingdino._C``
and ``detrex._C``. Tensors may be float16, bfloat16, float32 or float64.
"""

from typing import Any

import torch
from torch import Tensor

from visdet import ops

from ._served import GradOutput, serves

__all__ = ["get_compiler_version", "get_cuda_version", "ms_deform_attn_backward", "ms_deform_attn_forward"]


def ms_deform_attn_forward(
    value: Tensor,  # [B, S, G, C]
    spatial_shapes: Tensor,  # [L, 2] (height, width)
    level_start_index: Tensor,  # [L]
    sampling_loc: Tensor,  # [B, Q, G, L, P, 2] (x, y) in 0..1
    attn_weight: Tensor,  # [B, Q, G, L, P]
    im2col_step: int = 64,
) -> Tensor:  # [B, Q, G * C]
    """Return the result of ``visdet.ops.ms_deform_attn``. ``im2col_step`` has no effect.

    Raises:
        RuntimeError: a shape, type, size or device does not fit. The message names the argument.
    """
    return ops.ms_deform_attn(value, spatial_shapes, level_start_index, sampling_loc, attn_weight)


@serves(
    ms_deform_attn_forward,
    "MultiScaleDeformableAttention.ms_deform_attn_backward",
    returns=("value", "sampling_loc", "attn_weight"),
)
def ms_deform_attn_backward(
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    sampling_loc: Tensor,
    attn_weight: Tensor,
    grad_output: GradOutput,
    im2col_step: object = None,
) -> Any: ...


def get_compiler_version() -> str:
    return "none: operators by visdet"


def get_cuda_version() -> str:
    return torch.version.cuda or "not available"
