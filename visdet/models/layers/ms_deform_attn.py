"""Multi-scale deformable attention as a module."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from mmengine.model import BaseModule, constant_init, xavier_init
from torch import Tensor, nn

from visdet.errors import InvalidInputError
from visdet.ops import ms_deform_attn_fused
from visdet.ops.fused import sum_in_autocast_type
from visdet.registry import MODELS
from visdet.structures.rotated_boxes import turned

from ..boxes import diagonals
from .linear import Linear
from .normalization import add_and_norm
from .precision import as_autocast_input
from .root_registration import register_in_root
from .zero_rows import with_zero_rows


@register_in_root
@MODELS.register_module()
class MultiScaleDeformableAttention(BaseModule):
    """Attention of each query, in every head, to ``num_points`` learned positions in every level of a feature pyramid.

    For reference points (x, y), location = reference + offset / (W, H) of the level.
    For reference boxes (cx, cy, w, h), location = (cx, cy) + offset / num_points · (w, h) / 2, with the num_points of
    the level. For rotated ones (cx, cy, w, h, angle), whose sides are in units of the level's diagonal, the shift from
    (cx, cy) is turned by the angle.
    output = identity + dropout(output_proj(Σ softmax(weights) · value_proj(value) sampled at the locations)).

    ``ms_deform_attn_fused`` computes locations and weights in float32 whatever the dtype of the queries, and never
    writes them to memory.

    Args:
        embed_dims: channels. num_heads: number of heads, a divisor of ``embed_dims``.
        num_levels: number L of levels of the pyramid.
        num_points: number of positions per query, head and level. It is one number for all levels, or one for each
            level (D-FINE has [3, 6, 3]).
        im2col_step: accepted for compatibility, without effect.
        dropout: dropout of the output before ``identity`` is added.
        batch_first: whether tensors are [B, Q, C] rather than [Q, B, C].
        norm_cfg: accepted for compatibility, without effect.
        value_proj_ratio: channels of the sampled values divided by ``embed_dims``.

    Raises:
        ValueError: the channels of the queries or values are not divisible by ``num_heads``.

    Source: Zhu et al., Deformable DETR, ICLR 2021; constructor, parameter names and initialisation are mmcv's.
    """

    def __init__(
        self,
        embed_dims: int = 256,
        num_heads: int = 8,
        num_levels: int = 4,
        num_points: int | Sequence[int] = 4,
        im2col_step: int = 64,
        dropout: float = 0.1,
        batch_first: bool = False,
        norm_cfg: dict[str, Any] | None = None,
        init_cfg: dict[str, Any] | None = None,
        value_proj_ratio: float = 1.0,
    ) -> None:
        super().__init__(init_cfg)
        value_dims = int(embed_dims * value_proj_ratio)
        if embed_dims % num_heads or value_dims % num_heads:
            raise InvalidInputError(
                "MultiScaleDeformableAttention: embed_dims and embed_dims * value_proj_ratio must be divisible by "
                f"num_heads, got {embed_dims}, {value_dims} and {num_heads}"
            )
        points = [num_points] * num_levels if isinstance(num_points, int) else list(num_points)
        self.embed_dims = embed_dims
        self.num_heads = num_heads
        self.num_levels = num_levels
        self.batch_first = batch_first
        self.points_per_level = points
        samples = num_heads * sum(points)
        self.sampling_offsets = Linear(embed_dims, samples * 2)
        self.attention_weights = Linear(embed_dims, samples)
        self.value_proj = Linear(embed_dims, value_dims)
        self.output_proj = Linear(value_dims, embed_dims)
        self.dropout = nn.Dropout(dropout)
        self.init_weights()

    def init_weights(self) -> None:
        """Start from uniform attention weights and a pattern of positions that does not depend on the query.

        Head h looks in the direction 2π·h / num_heads. Its point p is p + 1 pixels away, in the maximum norm.
        """
        angle = torch.arange(self.num_heads, dtype=torch.float32) * (2.0 * math.pi / self.num_heads)
        direction = torch.stack((angle.cos(), angle.sin()), dim=-1)
        direction = F.normalize(direction, p=math.inf, dim=-1)  # onto the square of half-width 1
        distance = torch.cat([torch.arange(1.0, points + 1) for points in self.points_per_level])  # [K]
        ring = direction.view(-1, 1, 2) * distance.view(1, -1, 1)  # [G, K, 2]
        nn.init.zeros_(self.sampling_offsets.weight)
        with torch.no_grad():
            self.sampling_offsets.bias.copy_(ring.flatten())
        constant_init(self.attention_weights, 0.0)
        xavier_init(self.value_proj, distribution="uniform")
        xavier_init(self.output_proj, distribution="uniform")
        self.is_init = True

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        identity: Tensor | None = None,
        query_pos: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        reference_points: Any = None,
        spatial_shapes: Any = None,
        level_start_index: Tensor | None = None,
        norm: nn.Module | None = None,
    ) -> Tensor:
        """Return the attended queries plus ``identity``, shaped like ``query``.

        Args:
            query: [B, Q, C]. Without ``batch_first``, the first two axes of query, value, identity and query_pos are
                swapped.
            key: accepted for compatibility, without effect, because deformable attention has no keys.
            value: [B, S, C], the flattened pyramid. The default is ``query``.
            identity: [B, Q, C]. The default is ``query`` without ``query_pos``.
            query_pos: [B or 1, Q, C], added to the query before offsets and weights are predicted from it.
            key_padding_mask: [B, S] bool, True where a value is padding. The projected value is zero there.
            reference_points: [B or 1, Q, L or 1, 2] (x, y) or [B or 1, Q, L or 1, 4] (cx, cy, w, h), in 0..1, or
                [B or 1, Q, L, 5] (cx, cy, w, h, angle) with the angle in radians, clockwise in an image.
            spatial_shapes: [L, 2] int64 (height, width), on the CPU or the device of ``query``.
            level_start_index: [L] int64, the first row of each level in ``value``. By default, the levels follow each
                other without gaps.
            norm: a normalisation of the result, or None.
        """
        value = query if value is None else value
        identity = query if identity is None else identity
        if query_pos is not None:
            query = sum_in_autocast_type(query, query_pos)
        if not self.batch_first:
            query = query.transpose(0, 1)
            value = value.transpose(0, 1)

        query = as_autocast_input(query)
        value = self.value_proj(value)
        if key_padding_mask is not None:
            value = with_zero_rows(value, key_padding_mask)
        rows = (*query.shape[:2], self.num_heads, sum(self.points_per_level))
        offsets = self.sampling_offsets(query).view(*rows, 2)
        if reference_points.shape[-1] == 5:
            offsets = self.turned_offsets(offsets, reference_points, spatial_shapes)
            reference_points = reference_points[..., :2]
        out = ms_deform_attn_fused(
            value.unflatten(-1, (self.num_heads, -1)),
            spatial_shapes,
            level_start_index,
            reference_points,
            offsets,
            self.attention_weights(query).view(rows),
            self.points_per_level,
        )
        out = self.output_proj(out)
        if not self.batch_first:
            out = out.transpose(0, 1)
        return add_and_norm(norm, out, identity, self.dropout)

    def turned_offsets(self, offsets: Tensor, boxes: Tensor, spatial_shapes: Any) -> Tensor:
        """Return offsets [B, Q, G, K, 2] from the centres of rotated boxes in pixels of each level.

        Args:
            offsets: [B, Q, G, K, 2], the predicted ones. boxes, spatial_shapes: as in ``forward``.
        """
        shapes = torch.as_tensor(spatial_shapes, device=boxes.device).to(boxes.dtype)
        halves = boxes[..., 2:4] * (0.5 * diagonals(shapes)).unsqueeze(-1)  # [B or 1, Q, L, 2]
        counts = self.points_per_level
        of_levels = zip(
            offsets.split(counts, dim=3), halves.unsqueeze(2).split(1, dim=3), counts, strict=True
        )
        shifts = torch.cat([part * half / count for part, half, count in of_levels], dim=3)
        return turned(shifts, boxes[:, :, :1, None, 4:])  # by the same angle on all levels
