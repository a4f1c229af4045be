"""The functions of ``DCNv3``, the extension of InternImage, computed by ``visdet.ops.ms_deform_attn``.

``visdet.compat.extensions`` makes this module importable under that name. The kernel's points are those of an attention
with one level: each group is a head, and the mask holds the weights.
"""

from typing import Any

import torch
from torch import Tensor

from visdet import ops

from ._mmcv_functions import wide_type
from ._served import GradOutput, serves

__all__ = ["dcnv3_backward", "dcnv3_forward"]


def dcnv3_forward(
    input: Tensor,  # [B, H, W, G * C]
    offset: Tensor,  # [B, Hout, Wout, G * P * 2] (x, y), with P = kernel_h * kernel_w
    mask: Tensor,  # [B, Hout, Wout, G * P]
    kernel_h: int,
    kernel_w: int,
    stride_h: int,
    stride_w: int,
    pad_h: int,
    pad_w: int,
    dilation_h: int,
    dilation_w: int,
    group: int,
    group_channels: int,
    offset_scale: float,
    im2col_step: int = 256,
    remove_center: bool = False,
) -> Tensor:  # [B, Hout, Wout, G * C]
    """Return the weighted sum of the bilinear samples of each group at the points of the kernel, moved by the offsets.

    The points run down each column of the kernel, from its left to its right one. Pixels outside the image count as 0.

    Args:
        input, offset, mask: as above. Any floating type.
        kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w: as of a convolution.
        group, group_channels: G and C.
        offset_scale: the factor of the distances from the kernel's centre, offsets included.
        im2col_step: has no effect.
        remove_center: whether the kernel lacks its central point.
    """
    B, H, W, _ = input.shape
    _, Hout, Wout, _ = offset.shape
    num_outputs = Hout * Wout
    wide = wide_type(input)
    device = input.device

    def steps(count: int) -> Tensor:
        return torch.arange(count, device=device, dtype=wide)

    # The centres of the kernel at the pixels of the output, and the points around each.
    half_w = dilation_w * (kernel_w - 1) // 2
    half_h = dilation_h * (kernel_h - 1) // 2
    x = half_w - pad_w + steps(Wout) * stride_w
    y = half_h - pad_h + steps(Hout) * stride_h
    centers = torch.stack(torch.meshgrid(x, y, indexing="xy"), -1).view(1, num_outputs, 1, 1, 2)
    across = steps(kernel_w) * dilation_w - half_w
    down = steps(kernel_h) * dilation_h - half_h
    points = torch.cartesian_prod(across, down)
    if remove_center:
        points = points[torch.arange(len(points), device=device) != len(points) // 2]
    moved = points + offset.to(wide).view(B, num_outputs, group, -1, 2)
    locations = (centers + moved * offset_scale + 0.5) / moved.new_tensor([W, H])
    out = ops.ms_deform_attn(
        input.reshape(B, H * W, group, group_channels),
        torch.tensor([[H, W]], device=device),
        torch.zeros(1, dtype=torch.int64, device=device),
        locations[:, :, :, None],
        mask.to(wide).view(B, num_outputs, group, 1, -1),
    )
    return out.view(B, Hout, Wout, -1)


@serves(dcnv3_forward, "DCNv3.dcnv3_backward", returns=("input", "offset", "mask"))
def dcnv3_backward(
    input: Tensor,
    offset: Tensor,
    mask: Tensor,
    kernel_h: int,
    kernel_w: int,
    stride_h: int,
    stride_w: int,
    pad_h: int,
    pad_w: int,
    dilation_h: int,
    dilation_w: int,
    group: int,
    group_channels: int,
    offset_scale: float,
    grad_output: GradOutput,
    im2col_step: object = None,
    remove_center: bool = False,
) -> Any: ...
