"""Multi-scale deformable attention, a weighted sum of bilinear samples from a flattened feature pyramid."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _registration
from ._arguments import widened
from ._declared import declared
from ._level_tables import level_starts_of, level_tables, rows_of_tables

__all__ = ["level_starts_of", "ms_deform_attn", "ms_deform_attn_reference"]


@declared(value="floating", locations="real", weights="real")
def ms_deform_attn(
    value: Tensor,  # [B, S, G, C]
    level_shapes: Tensor | Sequence[Sequence[int]],  # [L, 2] (height, width)
    level_starts: Tensor | Sequence[int] | None,  # [L]
    locations: Tensor,  # [B, Q, G, L, P, 2] (x, y) in 0..1
    weights: Tensor,  # [B, Q, G, L, P]
    im2col_step: int | None = None,
) -> Tensor:  # [B, Q, G * C]
    """Return each query's and head's weighted sum of L * P bilinear samples of ``value``.

    ``out[b, q, g] = sum_{l, p} weights[b, q, g, l, p] * bilinear(value[b, l, g], locations[b, q, g, l, p])``

    Pixel coordinates are ``x = loc_x * W - 0.5``, ``y = loc_y * H - 0.5``. A sample counts iff ``-1 < x < W`` and
    ``-1 < y < H``, and a corner outside the map counts as zero: this is ``grid_sample`` of ``2 * loc - 1``, bilinear,
    with zeros and align_corners=False. A sample with a NaN or infinite coordinate contributes nothing, whatever its
    weight, and has zero gradients.

    A NaN or an infinite number in ``value``, in a weight or in the output's gradient reaches every result that
    depends on it. On the CPU, no other result changes. On CUDA, other results may become NaN, too, because the kernels
    read a texel inside the map with weight zero where a corner lies outside. These are samples near the border of the
    map, gradients of texels next to a sample, and, if the first texel of a level is NaN, all results.

    Args:
        value: [B, S, G, C]. The maps, float64, float32, float16 or bfloat16, channels last. The levels stand one after
            another, and S is the sum of H_l * W_l.
        level_shapes: [L, 2]. The (height, width) of each level, as a sequence or as a tensor on the CPU or on
            ``value``'s device.
        level_starts: [L]. The first row of each level, likewise, on the same device as ``level_shapes`` or not; None
            stands for levels without gaps. A table on the CPU is checked against S and travels with the launch. A table
            on a GPU is read there without a synchronisation, and a level that does not lie within S yields NaN.
        locations: [B, Q, G, L, P, 2] (x, y) in 0..1. The samples' positions, float32 (float64 for float64 values).
            Other types are converted.
        weights: [B, Q, G, L, P]. Any numbers, usually a softmax over L * P, of the type of ``locations``. Other types
            are converted.
        im2col_step: It is ignored. mmcv's function has it as its last argument. Here B need not be a multiple of it.

    Returns:
        [B, Q, G * C]. The sums, in the type of ``value``, accumulated in float32 (float64 for float64). If B, Q, P or C
        is 0, the result is empty or zero.

    It is differentiable once with respect to ``value``, ``locations`` and ``weights``. It is deterministic on the CPU,
    for any number of threads. On CUDA the forward is deterministic; the gradient of ``value`` is so under
    ``torch.use_deterministic_algorithms(True)``. Under autocast every tensor keeps its type: coordinates and weights
    are never rounded to 16 bits here.

    On CUDA an image's Q * G * L * P must be under 2^31, G * C under 2^28, S and B * G under 2^31, and in the backward
    Q times P rounded up to a power of two under 2^31. The scratch memory of the backward depends on its path, which
    ``explain`` tells: ``sorted`` takes 32 bytes a sample (64 in float64) and 4 a texel, or 8 L a texel if a level table
    is on the GPU; ``direct`` and ``encoder`` take a float32 copy of a 16-bit gradient of ``value``, the latter also 4
    bytes a query; ``strips`` takes none.

    Raises:
        RuntimeError: A shape, size or device does not fit. The message names the argument.
        ValueError: A type does not fit. The message names the argument.
        TypeError: ``level_shapes`` or ``level_starts`` is neither a tensor nor a sequence of integers.
        NotBuiltError: The library for ``value``'s device is not built.

    Source: Deformable DETR, arXiv 2010.04159, eq. 3; the signature is mmcv's.
    """
    shapes, starts = level_tables(value, level_shapes, level_starts)
    locations = widened(locations, value)
    weights = widened(weights, value)
    return _ms_deform_attn(value, shapes, starts, locations, weights)


def ms_deform_attn_reference(
    value: Tensor,  # [B, S, G, C]
    level_shapes: Tensor,  # [L, 2] (height, width)
    level_starts: Tensor,  # [L]
    locations: Tensor,  # [B, Q, G, L, P, 2] (x, y) in 0..1
    weights: Tensor,  # [B, Q, G, L, P]
) -> Tensor:  # [B, Q, G * C]
    """Return what ``ms_deform_attn`` returns, in plain torch: the definition kernels are tested against."""
    B, _, G, C = value.shape
    _, Q, _, _, P, _ = locations.shape
    num_maps = B * G
    out = locations.new_zeros(B, G, C, Q)
    for level, ((H, W), start) in enumerate(rows_of_tables(level_shapes, level_starts)):
        location = locations[:, :, :, level]  # [B, Q, G, P, 2]
        x, y = location[..., 0] * W - 0.5, location[..., 1] * H - 0.5
        counts = (x > -1) & (x < W) & (y > -1) & (y < H)
        grid = (
            torch.where(counts[..., None], 2 * location - 1, -3.0).transpose(1, 2).reshape(num_maps, Q, P, 2)
        )
        weight = torch.where(counts, weights[:, :, :, level], 0.0).transpose(1, 2).reshape(num_maps, 1, Q, P)
        maps = value[:, start : start + H * W].to(out).permute(0, 2, 3, 1).reshape(num_maps, C, H, W)
        samples = F.grid_sample(maps, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
        out = out + (samples * weight).sum(-1).view(B, G, C, Q)
    return out.permute(0, 3, 1, 2).reshape(B, Q, G * C).to(value)


_ms_deform_attn = _registration.differentiable(
    "ms_deform_attn",
    "value [B, Q, G * C]",
    layouts={"value": "[B, S, G, C]", "locations": "[B, Q, G, L, P, 2]"},
    elsewhere=ms_deform_attn_reference,
)
