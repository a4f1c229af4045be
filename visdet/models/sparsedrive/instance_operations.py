"""The base class of heads that work on instances, with layers in a configured order and decoupled attention."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from visdet.errors import InvalidInputError
from visdet.registry import MODELS

from ..layers.precision import as_autocast_input

__all__ = ["InstanceOperations"]


class InstanceOperations(nn.Module):
    """Base class of heads whose ``layers`` are operations on instances, one for each name in ``operation_order``.

    Source: the parameter names are Sparse4D's.
    """

    OPERATIONS: tuple[str, ...]

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
            operation_order: names of operations, of ``OPERATIONS``.
            embed_dims: width C of the instances.
            decouple_attn: whether feature and embedding are concatenated for the attention instead of being added.

        Raises:
            InvalidInputError: ``operation_order`` has a name that is not in ``OPERATIONS``.
        """
        unknown = set(operation_order) - set(self.OPERATIONS)
        if unknown:
            raise InvalidInputError(
                f"{type(self).__name__}: operation_order must be of {self.OPERATIONS}, got {sorted(unknown)}"
            )
        self.operation_order = list(operation_order)
        self.decouple_attn = decouple_attn
        built: list[Any] = [
            None if configs[op] is None else MODELS.build(configs[op]) for op in operation_order
        ]
        self.layers = nn.ModuleList(built)
        C = embed_dims
        self.fc_before = nn.Linear(C, 2 * C, bias=False) if decouple_attn else nn.Identity()
        self.fc_after = nn.Linear(2 * C, C, bias=False) if decouple_attn else nn.Identity()

    def init_operations(self) -> None:
        """Initialise the matrices of all operations but 'refine' by Xavier."""
        for op, layer in zip(self.operation_order, self.layers, strict=True):
            if layer is not None and op != "refine":
                for parameter in layer.parameters():
                    if parameter.dim() > 1 and parameter.requires_grad:
                        nn.init.xavier_uniform_(parameter)

    def attend(
        self,
        layer: nn.Module,
        query: Tensor,
        query_pos: Tensor | None,
        key: Tensor | None = None,
        key_pos: Tensor | None = None,
        value: Tensor | None = None,
        **masks: Tensor | None,
    ) -> Tensor:
        """Return instances [B, Q, C] after attention to keys [B, K, C], which are the queries by default.

        Args:
            layer: a ``MultiheadAttention``, which has the width 2C with ``decouple_attn``.
            query, query_pos: [B, Q, C], features and embeddings. key, key_pos: [B, K, C].
            value: [B, K, C], by default the keys as they enter the attention.
            masks: ``attn_mask`` and ``key_padding_mask`` of the layer.
        """
        if self.decouple_attn and query_pos is not None:
            query, query_pos = as_autocast_input(torch.cat([query, query_pos], dim=-1)), None
            if key is not None and key_pos is not None:
                key, key_pos = as_autocast_input(torch.cat([key, key_pos], dim=-1)), None
        if value is not None:
            value = self.fc_before(value)
        return self.fc_after(layer(query, key, value, query_pos=query_pos, key_pos=key_pos, **masks))
