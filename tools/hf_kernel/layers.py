"""Layers by which ``kernels.kernelize`` replaces a model's own. They have a ``forward`` but no parameters."""

from collections.abc import Sequence

from torch import Tensor, nn

from . import ops

__all__ = ["MultiScaleDeformableAttention"]


class MultiScaleDeformableAttention(nn.Module):
    """A replacement for the class of this name in transformers' detectors."""

    has_backward = True
    can_torch_compile = True

    def forward(
        self,
        value: Tensor,  # [B, S, G, C]
        value_spatial_shapes: Tensor,  # [L, 2] (height, width)
        value_spatial_shapes_list: Sequence[tuple[int, int]],
        level_start_index: Tensor,  # [L]
        sampling_locations: Tensor,  # [B, Q, G, L, P, 2] (x, y) in 0..1
        attention_weights: Tensor,  # [B, Q, G, L, P]
        im2col_step: int,
    ) -> Tensor:  # [B, Q, G * C]
        return ops.ms_deform_attn(
            value, value_spatial_shapes_list, None, sampling_locations, attention_weights
        )
