"""The functions of Deformable DETR's extension, under their names. DINO, Mask2Former and others compile the same one.

``visdet.compat.extensions`` makes this module importable as ``MultiScaleDeformableAttention``, ``groundingdino._C``
and ``detrex._C``. Tensors may be float16, bfloat16, float32 or float64.
"""

import torch
from torch import Tensor

from visdet import ops

from ._entries import functions_of

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


# It returns the gradients of the value, the locations and the weights.
ms_deform_attn_backward = functions_of(
    "MultiScaleDeformableAttention",
    {
        "ms_deform_attn_backward": (
            ms_deform_attn_forward,
            "value spatial_shapes level_start_index sampling_loc attn_weight <grad_output im2col_step? -> value "
            "sampling_loc attn_weight",
        )
    },
)["ms_deform_attn_backward"]


def get_compiler_version() -> str:
    return "none: operators by visdet"


def get_cuda_version() -> str:
    return torch.version.cuda or "not available"
