"""Encoder and decoder of Deformable DETR."""

import functools
from typing import Any, Literal

import torch
from mmengine.model import BaseModule
from torch import Tensor, nn

from visdet.checks.arguments import Positive
from visdet.errors import InvalidInputError
from visdet.execution.capture import recomputed
from visdet.registry import MODELS

from ..box_coders import UprightBoxCoder
from ..layers.feed_forward import FFN
from ..layers.ms_deform_attn import MultiScaleDeformableAttention
from ..layers.multihead_attention import MultiheadAttention
from ..layers.normalization import build_norm_layer
from ..layers.precision import in_full_precision
from .flat_pyramid import FlatPyramid

_LN = {"type": "LN"}
LOGIT = functools.partial(torch.logit, eps=1e-5)
_LAYOUT = {"batch_first": True}  # that of all tensors here, whatever the layout that a config names


class LayerStack(BaseModule):
    """Equal layers in a row.

    Args:
        layer_type: the class of the layers, which ``layer_cfg`` may replace. num_layers, layer_cfg: see the subclasses.
    """

    def __init__(
        self, layer_type: type, num_layers: int, layer_cfg: dict[str, Any], init_cfg: dict[str, Any] | None
    ) -> None:
        super().__init__(init_cfg)
        self.num_layers = num_layers
        layers = [MODELS.build({"type": layer_type, **layer_cfg}) for _ in range(num_layers)]
        self.layers = nn.ModuleList(layers)
        self.embed_dims = layers[0].embed_dims

    def init_weights(self) -> None:
        """Initialise all matrices by Xavier's uniform distribution, but deformable attention by its own rule."""
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
        for child in self.modules():
            if isinstance(child, MultiScaleDeformableAttention):
                child.init_weights()
        self.is_init = True


class DeformableDetrTransformerEncoderLayer(BaseModule):
    """Deformable self-attention over the pyramid and a feed-forward block, each followed by a normalisation.

    Args:
        self_attn_cfg: keywords of ``MultiScaleDeformableAttention``. ffn_cfg: keywords of ``FFN``.
        norm_cfg: config of the two normalisations.
    """

    def __init__(
        self,
        self_attn_cfg: dict[str, Any],
        ffn_cfg: dict[str, Any],
        norm_cfg: dict[str, Any] = _LN,
        init_cfg: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(init_cfg)
        self.self_attn = MODELS.build({"type": MultiScaleDeformableAttention, **self_attn_cfg, **_LAYOUT})
        self.embed_dims = self.self_attn.embed_dims
        self.ffn = MODELS.build({"type": FFN, **ffn_cfg})
        self.norms = nn.ModuleList(build_norm_layer(norm_cfg, self.embed_dims) for _ in range(2))

    def forward(
        self,
        query: Tensor,
        reference_points: Tensor,
        pyramid: FlatPyramid,
        next_pos: Tensor | None = None,
    ) -> Tensor:
        """Return the new features [B, S, C] of the pyramid's pixels.

        Args:
            query: [B, S, C], the features of the pixels.
            reference_points: [B or 1, S, L, 2].
            pyramid: the pyramid, of which all but the features is used.
            next_pos: what the next layer will add to the features, or None if this is the last layer.
        """
        first_norm, last_norm = self.norms
        query = self.self_attn(
            query,
            query_pos=pyramid.positions,
            reference_points=reference_points,
            norm=first_norm,
            **pyramid.layout,
        )
        options = {"next_pos": next_pos} if type(self.ffn) is FFN else {}
        return self.ffn(query, norm=last_norm, **options)


@MODELS.register_module()
class DeformableDetrTransformerEncoder(LayerStack):
    """A stack of encoder layers.

    Args:
        num_layers: number of layers. layer_cfg: keywords of each layer.
        num_cp: number of layers whose activations are recomputed in the backward pass instead of being kept.

    Raises:
        ValueError: there is no layer, or ``num_cp`` is greater than the number of layers.
    """

    def __init__(
        self,
        num_layers: Positive,
        layer_cfg: dict[str, Any],
        num_cp: int = -1,
        init_cfg: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(DeformableDetrTransformerEncoderLayer, num_layers, layer_cfg, init_cfg)
        self.num_cp = num_cp
        first: Any = self.layers[0]
        self.num_levels = first.self_attn.num_levels

    def forward(self, pyramid: FlatPyramid) -> Tensor:
        """Return the memory [B, S, C], the features of the last layer."""
        memory = pyramid.features
        reference_points = pyramid.on_levels(pyramid.centers)
        for index, layer in enumerate(self.layers):
            next_pos = None if index + 1 == len(self.layers) else pyramid.positions
            inputs = memory, reference_points, pyramid, next_pos
            recomputes = index < self.num_cp and torch.is_grad_enabled()
            memory = recomputed(layer, *inputs) if recomputes else layer(*inputs)
        return memory


class DeformableDetrTransformerDecoderLayer(BaseModule):
    """Self-attention of the queries, deformable attention to the memory, and a feed-forward block.

    A normalisation follows each of them.

    Args:
        self_attn_cfg: keywords of ``MultiheadAttention``.
        cross_attn_cfg: keywords of ``MultiScaleDeformableAttention``.
        ffn_cfg: keywords of ``FFN``. norm_cfg: config of the three normalisations.
    """

    def __init__(
        self,
        self_attn_cfg: dict[str, Any],
        cross_attn_cfg: dict[str, Any],
        ffn_cfg: dict[str, Any],
        norm_cfg: dict[str, Any] = _LN,
        init_cfg: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(init_cfg)
        self.self_attn = MODELS.build({"type": MultiheadAttention, **self_attn_cfg, **_LAYOUT})
        self.cross_attn = MODELS.build({"type": MultiScaleDeformableAttention, **cross_attn_cfg, **_LAYOUT})
        self.embed_dims = self.self_attn.embed_dims
        self.ffn = MODELS.build({"type": FFN, **ffn_cfg})
        self.norms = nn.ModuleList(build_norm_layer(norm_cfg, self.embed_dims) for _ in range(3))

    def forward(
        self,
        query: Tensor,
        query_pos: Tensor,
        memory: Tensor,
        reference_points: Tensor,
        pyramid: FlatPyramid,
        self_attn_mask: Tensor | None = None,
    ) -> Tensor:
        """Return the new queries [B, Q, C].

        Args:
            query, query_pos: [B, Q, C]. memory: [B, S, C].
            reference_points: [B, Q, L, 2 or box_dim], in 0..1 of each padded level.
            pyramid: the pyramid of the memory.
            self_attn_mask: [Q, Q] bool, True where a query must not attend to another.
        """
        first_norm, second_norm, last_norm = self.norms
        query = self.self_attn(query, query_pos=query_pos, attn_mask=self_attn_mask, norm=first_norm)
        query = self.cross_attn(
            query,
            value=memory,
            query_pos=query_pos,
            reference_points=reference_points,
            norm=second_norm,
            **pyramid.layout,
        )
        return self.ffn(query, norm=last_norm)


@MODELS.register_module()
class DeformableDetrTransformerDecoder(LayerStack):
    """A stack of decoder layers, each of which may refine the references for the next layer.

    Args:
        num_layers: number of layers. layer_cfg: keywords of each layer.
        post_norm_cfg: must be None, because the layers end with a normalisation.
        return_intermediate: must be True, because the head reads every layer.
        box_coder: what a box is, by default an ``UprightBoxCoder``. The detector sets it.

    Raises:
        ValueError: there is no layer, or ``post_norm_cfg`` or ``return_intermediate`` has another value.
    """

    def __init__(
        self,
        num_layers: Positive,
        layer_cfg: dict[str, Any],
        post_norm_cfg: None = None,
        return_intermediate: Literal[True] = True,
        init_cfg: dict[str, Any] | None = None,
        box_coder: UprightBoxCoder | None = None,
    ) -> None:
        super().__init__(DeformableDetrTransformerDecoderLayer, num_layers, layer_cfg, init_cfg)
        self.box_coder = box_coder or UprightBoxCoder()
        first: Any = self.layers[0]
        self.num_levels = first.cross_attn.num_levels

    def forward(
        self,
        query: Tensor,
        query_pos: Tensor | None,
        memory: Tensor,
        references: Tensor,
        pyramid: FlatPyramid,
        reg_branches: nn.ModuleList | None = None,
        self_attn_mask: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the hidden states [D, B, Q, C] of all layers, and D + 1 references.

        The first reference is ``references``, and the others are the references after each layer.

        Args:
            query: [B, Q, C]. query_pos: [B, Q, C], or None if the decoder computes it from the references.
            memory: [B, S, C].
            references: [B, Q, 2] points in 0..1 of the image, or [B, Q, box_dim] boxes of the network.
            pyramid: the pyramid of the memory.
            reg_branches: the branches that predict box deltas from the output of each layer. The deltas refine the
                references. No gradient flows through references into the layer before. With None, the references
                stay the same.
            self_attn_mask: [Q, Q] bool, True where a query must not attend to another.
        """
        hidden_states = []
        all_references = [references]
        for index, layer in enumerate(self.layers):
            on_levels = self.box_coder.on_levels(references, pyramid)
            seen = references if pyramid.is_as_if_unpadded else on_levels[:, :, 0]
            position = self.positions(seen) if query_pos is None else query_pos
            query = layer(query, position, memory, on_levels, pyramid, self_attn_mask)
            hidden_states.append(query)
            if reg_branches is None:
                all_references.append(references)
            else:
                all_references.append(self.refined(references, reg_branches[index], query))
                references = all_references[-1].detach()
        return self.outputs(torch.stack(hidden_states)), all_references

    def positions(self, references: Tensor) -> Tensor:
        """Return the positions [B, Q, C] of queries with references [B, Q, box_dim], if they are not learned."""
        raise InvalidInputError(f"{type(self).__name__}: query_pos must be given")

    def refined(self, references: Tensor, branch: nn.Module, query: Tensor) -> Tensor:
        """Return the references [B, Q, box_dim] after a layer with the output ``query`` [B, Q, C]."""
        with torch.no_grad():
            return self.box_coder.refined(in_full_precision(branch, query), references, LOGIT)

    def outputs(self, hidden_states: Tensor) -> Tensor:
        """Return what the head reads of the outputs [D, B, Q, C] of the layers."""
        return hidden_states
