"""The decoder of DINO."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from visdet.registry import MODELS

from ..boxes import inverse_sigmoid
from ..deformable_detr.transformer import DeformableDetrTransformerDecoder
from ..layers.normalization import LayerNorm
from ..layers.positional_encoding import sine_embedding
from ..layers.precision import in_full_precision


class BoxPositions(nn.Module):
    """Two linear layers that make the position of a query from the sine embedding of its box."""

    def __init__(self, embed_dims: int) -> None:
        super().__init__()
        self.num_feats = embed_dims // 2
        self.layers = nn.ModuleList(
            [nn.Linear(4 * self.num_feats, embed_dims), nn.Linear(embed_dims, embed_dims)]
        )

    def forward(self, boxes: Tensor) -> Tensor:
        """Return [B, Q, C] from boxes [B, Q, 4] (cx, cy, w, h). The channels of cy come before those of cx."""
        cx, cy, w, h = boxes.unbind(-1)
        embedding = sine_embedding(torch.stack((cy, cx, w, h), dim=-1) * (2 * math.pi), self.num_feats)
        first, second = self.layers
        return second(first(embedding.flatten(-2).to(next(first.parameters()).dtype)).relu())


@MODELS.register_module()
class DinoTransformerDecoder(DeformableDetrTransformerDecoder):
    """Deformable DETR's decoder, in which positions follow from the boxes, and gradients look forward twice.

    The position of a query is made of its box before each layer. The box after a layer gets the gradients of the
    predictions of two layers: it is detached as the reference of the next layer, but not in the prediction of that
    layer. The head reads normalised hidden states.

    Args:
        **decoder: see ``DeformableDetrTransformerDecoder``.

    Source: Zhang et al., DINO, ICLR 2023; names are mmdet's.
    """

    def __init__(self, **decoder: Any) -> None:
        super().__init__(**decoder)
        self.ref_point_head = BoxPositions(self.embed_dims)
        self.norm = LayerNorm(self.embed_dims)

    def positions(self, on_levels: Tensor) -> Tensor:
        return self.ref_point_head(on_levels[:, :, 0])

    def refined(self, references: Tensor, branch: nn.Module, query: Tensor) -> Tensor:
        return (in_full_precision(branch, query) + inverse_sigmoid(references, eps=1e-3)).sigmoid()

    def outputs(self, hidden_states: Tensor) -> Tensor:
        return self.norm(hidden_states)
