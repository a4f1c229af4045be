"""Multi-head attention with a residual connection."""

from typing import Any

from mmengine.model import BaseModule
from torch import Tensor, nn

from visdet.errors import InvalidInputError
from visdet.registry import MODELS

from .dropout import build_dropout
from .root_registration import register_in_root

__all__ = ["MultiheadAttention"]


@register_in_root
@MODELS.register_module()
class MultiheadAttention(BaseModule):
    """``identity + dropout(proj_drop(attention(query + query_pos, key + key_pos, value)))``.

    The positions enter queries and keys, never the values. Parameter names are those of ``nn.MultiheadAttention`` under
    ``attn.``; the product runs through ``scaled_dot_product_attention``.

    Args:
        embed_dims: channels. num_heads: heads, a divisor of ``embed_dims``.
        attn_drop: dropout of the attention weights. proj_drop: dropout of the projected output.
        dropout_layer: dropout before the sum, e.g. ``dict(type='Dropout', drop_prob=0.1)``.
        dropout: sets both ``attn_drop`` and the probability before the sum.
        batch_first: tensors are [B, Q, C]; otherwise [Q, B, C].
        bias: whether the projections have one.

    Source: names and defaults are mmcv's. Different: ``dropout`` touches this instance alone (in mmcv it changes the
    default of every later one).
    """

    def __init__(
        self,
        embed_dims: int,
        num_heads: int,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        dropout_layer: dict[str, Any] | None = None,
        batch_first: bool = False,
        dropout: float | None = None,
        bias: bool = True,
        init_cfg: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(init_cfg)
        if embed_dims % num_heads:
            raise InvalidInputError(
                f"MultiheadAttention: embed_dims must be divisible by num_heads, got {embed_dims} and {num_heads}"
            )
        if dropout is not None:
            attn_drop = dropout
            dropout_layer = {"type": "Dropout", **(dropout_layer or {}), "drop_prob": dropout}
        self.embed_dims = embed_dims
        self.num_heads = num_heads
        self.batch_first = batch_first
        self.attn = nn.MultiheadAttention(
            embed_dims, num_heads, attn_drop, bias=bias, batch_first=batch_first
        )
        self.proj_drop = nn.Dropout(proj_drop)
        self.dropout_layer = build_dropout(dropout_layer)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        identity: Tensor | None = None,
        query_pos: Tensor | None = None,
        key_pos: Tensor | None = None,
        attn_mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Return the attended queries plus ``identity``.

        Args:
            query: [B, Q, C] ([Q, B, C] unless ``batch_first``), and so are all others.
            key: [B, K, C], default ``query``. value: [B, K, C], default ``key``.
            identity: [B, Q, C], default ``query``.
            query_pos: [B, Q, C]. key_pos: [B, K, C], default ``query_pos`` where its shape fits the key.
            attn_mask: [Q, K] or [B·heads, Q, K]; bool, True where a pair must not attend, or float to add.
            key_padding_mask: [B, K] bool, True where a key is padding.
        """
        key = query if key is None else key
        value = key if value is None else value
        identity = query if identity is None else identity
        if key_pos is None and query_pos is not None and query_pos.shape == key.shape:
            key_pos = query_pos
        if query_pos is not None:
            query = query + query_pos
        if key_pos is not None:
            key = key + key_pos
        out, _ = self.attn(
            query, key, value, key_padding_mask=key_padding_mask, attn_mask=attn_mask, need_weights=False
        )
        return identity + self.dropout_layer(self.proj_drop(out))
