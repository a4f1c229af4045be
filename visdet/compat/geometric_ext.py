"""The functions of ``GeometricKernelAttention``, the extension of MapTR, whose locations are whole pixels.

``visdet.compat.extensions`` makes this module importable under that name.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from ._served import GradOutput, serves

__all__ = ["geometric_kernel_attn_cuda_backward", "geometric_kernel_attn_cuda_forward"]


def geometric_kernel_attn_cuda_forward(
    value: Tensor,  # [B, S, G, C]
    spatial_shapes: Tensor,  # [L, 2] (height, width)
    level_start_index: Tensor,  # [L]
    sampling_loc: Tensor,  # [B, Q, G, L, P, 2] (x, y) in pixels, integers
    attn_weight: Tensor,  # [B, Q, G, L, P]
    im2col_step: int = 64,
) -> Tensor:  # [B, Q, G * C]
    """Return the weighted sum of the pixels at the locations, which are moved to the nearest pixel of their level.

    Locations have no gradient. ``im2col_step`` has no effect.
    """
    B, S, G, C = value.shape
    Q = sampling_loc.shape[1]
    sizes = spatial_shapes.flip(1).view(1, 1, 1, -1, 1, 2)
    x, y = torch.minimum(sampling_loc.long().clamp(min=0), sizes - 1).unbind(-1)
    batch, head = (torch.arange(n, device=value.device) for n in (B, G))
    pixel = batch.view(-1, 1, 1, 1, 1) * S + level_start_index.view(-1, 1) + y * sizes[..., 0] + x
    rows = pixel * G + head.view(-1, 1, 1)
    count = B * Q * G
    out = embedding_bag(
        rows.view(count, -1),
        value.reshape(B * S * G, C),
        mode="sum",
        per_sample_weights=attn_weight.to(value.dtype).reshape(count, -1),
    )
    return out.view(B, Q, G * C)


@serves(
    geometric_kernel_attn_cuda_forward,
    "GeometricKernelAttention.geometric_kernel_attn_cuda_backward",
    returns=("value", "attn_weight"),
)
def geometric_kernel_attn_cuda_backward(
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    sampling_loc: Tensor,
    attn_weight: Tensor,
    grad_output: GradOutput,
    im2col_step: object = None,
) -> Any: ...
