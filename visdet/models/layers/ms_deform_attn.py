"""Multi-scale deformable attention as a module."""

import math
from typing import Any

import torch
from mmengine.model import BaseModule, constant_init, xavier_init
from torch import Tensor, nn

from visdet.ops import ms_deform_attn
from visdet.registry import MODELS

from .precision import at_least_float32
from .root_registration import register_in_root

__all__ = ["MultiScaleDeformableAttention"]


@register_in_root
@MODELS.register_module()
class MultiScaleDeformableAttention(BaseModule):
    """Each query attends to ``num_points`` learned positions in every level of a feature pyramid.

    location = reference + offset / (W, H) of the level for reference points (x, y), or
    reference + offset / num_points · (w, h) / 2 for reference boxes (cx, cy, w, h);
    output = identity + dropout(output_proj(Σ softmax(weights) · value_proj(value) sampled at the locations)).
    Locations are computed in float32 whatever the type of the queries.

    Args:
        embed_dims: channels. num_heads: heads, a divisor of ``embed_dims``.
        num_levels: levels L of the pyramid. num_points: positions P per query, head and level.
        im2col_step: accepted for compatibility, without effect.
        dropout: dropout of the output before the sum.
        batch_first: tensors are [B, Q, C]; otherwise [Q, B, C].
        norm_cfg: accepted for compatibility, without effect.
        value_proj_ratio: channels of the sampled values relative to ``embed_dims``.

    Source: Zhu et al., Deformable DETR, ICLR 2021; constructor, parameter names and initialisation are mmcv's.
    """

    def __init__(
        self,
        embed_dims: int = 256,
        num_heads: int = 8,
        num_levels: int = 4,
        num_points: int = 4,
        im2col_step: int = 64,
        dropout: float = 0.1,
        batch_first: bool = False,
        norm_cfg: dict[str, Any] | None = None,
        init_cfg: dict[str, Any] | None = None,
        value_proj_ratio: float = 1.0,
    ) -> None:
        super().__init__(init_cfg)
        value_dims = int(embed_dims * value_proj_ratio)
        for name, channels in (("embed_dims", embed_dims), ("embed_dims * value_proj_ratio", value_dims)):
            if channels % num_heads:
                raise ValueError(
                    f"MultiScaleDeformableAttention: {name} must be divisible by num_heads, "
                    f"got {channels} and {num_heads}"
                )
        self.embed_dims = embed_dims
        self.num_heads = num_heads
        self.num_levels = num_levels
        self.num_points = num_points
        self.batch_first = batch_first
        self.sampling_offsets = nn.Linear(embed_dims, num_heads * num_levels * num_points * 2)
        self.attention_weights = nn.Linear(embed_dims, num_heads * num_levels * num_points)
        self.value_proj = nn.Linear(embed_dims, value_dims)
        self.output_proj = nn.Linear(value_dims, embed_dims)
        self.dropout = nn.Dropout(dropout)
        self.init_weights()

    def init_weights(self) -> None:
        """Start as uniform attention: head h looks along direction 2π·h / num_heads, point p at distance p + 1."""
        angle = torch.arange(self.num_heads, dtype=torch.float32) * (2.0 * math.pi / self.num_heads)
        direction = torch.stack((angle.cos(), angle.sin()), dim=-1)
        direction = direction / direction.abs().amax(dim=-1, keepdim=True)  # onto the square of half-width 1
        distance = torch.arange(1, self.num_points + 1, dtype=torch.float32)
        ring = direction.view(-1, 1, 1, 2) * distance.view(1, 1, -1, 1)
        ring = ring.expand(self.num_heads, self.num_levels, self.num_points, 2)
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
        reference_points: Tensor | None = None,
        spatial_shapes: Tensor | None = None,
        level_start_index: Tensor | None = None,
    ) -> Tensor:
        """Return the attended queries plus ``identity``, shaped like ``query``.

        Args:
            query: [B, Q, C] ([Q, B, C] unless ``batch_first``), and so are value, identity and query_pos.
            key: accepted for compatibility, without effect: deformable attention has no keys.
            value: [B, S, C], the flattened pyramid; default ``query``.
            identity: [B, Q, C], default ``query``.
            query_pos: [B or 1, Q, C], added to the query that predicts offsets and weights.
            key_padding_mask: [B, S] bool, True where a value is padding: it counts as zero.
            reference_points: [B or 1, Q, L or 1, 2] (x, y) or [B or 1, Q, L or 1, 4] (cx, cy, w, h), in 0..1.
            spatial_shapes: [L, 2] int64 (height, width), best on the device of ``query``.
            level_start_index: [L] int64, the first row of each level in ``value``; default: levels without gaps.
        """
        if reference_points is None or spatial_shapes is None:
            raise ValueError(
                "MultiScaleDeformableAttention: reference_points and spatial_shapes must be given"
            )
        value = query if value is None else value
        identity = query if identity is None else identity
        if query_pos is not None:
            query = query + query_pos
        if not self.batch_first:
            query, value = query.transpose(0, 1), value.transpose(0, 1)

        value = self.value_proj(value)
        if key_padding_mask is not None:
            value = value.masked_fill(key_padding_mask.unsqueeze(-1), 0.0)
        batch_size, num_queries, _ = query.shape
        samples = (self.num_heads, self.num_levels, self.num_points)
        weights = self.attention_weights(query).view(batch_size, num_queries, self.num_heads, -1)
        weights = at_least_float32(weights).softmax(dim=-1).view(batch_size, num_queries, *samples)
        offsets = at_least_float32(self.sampling_offsets(query))
        locations = self._locations(offsets, reference_points, spatial_shapes)
        out = ms_deform_attn(
            value.unflatten(-1, (self.num_heads, -1)), spatial_shapes, level_start_index, locations, weights
        )
        out = self.output_proj(out)
        if not self.batch_first:
            out = out.transpose(0, 1)
        return self.dropout(out) + identity

    def _locations(self, offsets: Tensor, reference_points: Tensor, spatial_shapes: Tensor) -> Tensor:
        """Return sampling locations [B, Q, G, L, P, 2] (x, y) in 0..1 from offsets [B, Q, G * L * P * 2] in pixels.

        References and scales are spread over the points first, so that the arithmetic runs along L * P * 2 numbers.
        """
        batch_size, num_queries, _ = offsets.shape
        offsets = offsets.view(batch_size, num_queries, self.num_heads, -1)  # [B, Q, G, L * P * 2]
        if reference_points.shape[-1] == 2:
            centers = reference_points
            scale = spatial_shapes.flip(-1).to(offsets).reciprocal()  # [L, 2]
        elif reference_points.shape[-1] == 4:
            centers, sizes = reference_points.split(2, dim=-1)
            scale = sizes * (0.5 / self.num_points)  # [B, Q, L, 2]
        else:
            raise ValueError(
                "MultiScaleDeformableAttention: reference_points must be [B, Q, L, 2] or [B, Q, L, 4], "
                f"got {tuple(reference_points.shape)}"
            )
        centers, scale = self._over_points(centers).unsqueeze(2), self._over_points(scale).unsqueeze(-2)
        locations = torch.addcmul(centers, offsets, scale)
        return locations.view(batch_size, num_queries, self.num_heads, self.num_levels, self.num_points, 2)

    def _over_points(self, per_level: Tensor) -> Tensor:
        """Return numbers [..., L or 1, 2] repeated for every point, [..., L * P * 2]."""
        shape = (*per_level.shape[:-2], self.num_levels, self.num_points, 2)
        return per_level.unsqueeze(-2).expand(shape).flatten(-3)
