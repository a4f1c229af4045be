"""The base class of heads that work on instances, with layers in a configured order and decoupled attention."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from mmengine.model import BaseModule
from torch import Tensor, nn

from visdet.registry import MODELS, built

from ..layers.feed_forward import FFN
from ..layers.precision import as_autocast_input
from .ffn import AsymmetricFFN


class InstanceOperations(BaseModule):
    """Base class of heads whose ``layers`` are operations on instances, one for each name in ``operation_order``.

    Source: the parameter names are Sparse4D's.
    """

    def build_operations(
        self,
        configs: Mapping[str, dict[str, Any] | None],
        operation_order: Sequence[str],
        embed_dims: int,
        decouple_attn: bool,
    ) -> None:
        """Build the layers and, with ``decouple_attn``, the projections around attention of twice the width.

        Args:
            configs: the config of each operation, or None to leave it out.
            operation_order: names of operations, of those in ``configs``.
            embed_dims: width C of the instances.
            decouple_attn: whether feature and embedding are concatenated for the attention instead of being added.
        """
        self.embed_dims = embed_dims
        self.operation_order = list(operation_order)
        self.decouple_attn = decouple_attn
        self.layers = nn.ModuleList([built(configs[op], MODELS) for op in operation_order])
        width = 2 * embed_dims
        self.fc_before = nn.Linear(embed_dims, width, bias=False) if decouple_attn else nn.Identity()
        self.fc_after = nn.Linear(width, embed_dims, bias=False) if decouple_attn else nn.Identity()

    def init_operations(self, *others: nn.Module) -> None:
        """Initialise the matrices of all operations but 'refine' by Xavier, and then each part by its own rule.

        Args:
            others: the parts that are initialised by their own rules beside the layers.
        """
        for op, layer in zip(self.operation_order, self.layers, strict=True):
            if layer is not None and op != "refine":
                for parameter in layer.parameters():
                    if parameter.dim() > 1 and parameter.requires_grad:
                        nn.init.xavier_uniform_(parameter)
        for part in (*others, *self.layers):
            if isinstance(part, BaseModule):
                part.init_weights()

    def steps(self) -> Iterator[tuple[str, Any]]:
        """Yield the name and the layer of each operation.

        A feed-forward block and the normalisation after it are one step, because one kernel sums and normalises.
        Operations without a layer are left out.
        """
        given = zip(self.operation_order, self.layers, strict=True)
        steps: list[Any] = [(op, layer) for op, layer in given if layer is not None]
        joins = False
        for (op, layer), (following, norm) in pairwise([*steps, ("", None)]):
            if joins:  # The step before has applied this normalisation.
                joins = False
                continue
            joins = op == "ffn" and following == "norm" and isinstance(layer, AsymmetricFFN | FFN)
            yield op, partial(layer, norm=norm) if joins else layer

    def attend(
        self,
        layer: nn.Module,
        query: Tensor,
        query_pos: Tensor,
        key: Tensor | None = None,
        key_pos: Any = None,
        value: Tensor | None = None,
        **masks: Tensor | None,
    ) -> Tensor:
        """Return instances [B, Q, C] after attention to keys [B, K, C], which are the queries by default.

        Args:
            layer: a ``MultiheadAttention``, which has the width 2C with ``decouple_attn``.
            query, query_pos: [B, Q, C], features and embeddings. key, key_pos: [B, K, C], both or neither.
            value: the result of ``fc_before`` for [B, K, C], by default the keys as they enter the attention.
            masks: ``attn_mask`` and ``key_padding_mask`` of the layer.
        """
        positions: dict[str, Any] = {"query_pos": query_pos, "key_pos": key_pos}
        if self.decouple_attn:
            positions = {}
            query = _side_by_side(query, query_pos)
            key = None if key is None else _side_by_side(key, key_pos)
        return self.fc_after(layer(query, key, value, **positions, **masks))


def _side_by_side(feature: Tensor, embed: Tensor) -> Tensor:
    """Return features and embeddings concatenated, in the dtype in which linear layers read them."""
    return torch.cat([as_autocast_input(feature), as_autocast_input(embed)], dim=-1)
