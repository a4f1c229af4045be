"""Multi-head attention with a residual connection."""

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from mmengine.model import BaseModule
from torch import Tensor, nn

from visdet.registry import MODELS

from .builders import build_dropout
from .normalization import add_and_norm
from .plain import is_plain
from .precision import as_autocast_input, at_least_float32, without_autocast
from .root_registration import register_in_root


@register_in_root
@MODELS.register_module()
class MultiheadAttention(BaseModule):
    """``identity + dropout(proj_drop(attention(query + query_pos, key + key_pos, value)))``.

    Positions are added to the queries and keys, never to the values. Parameter names are those of
    ``nn.MultiheadAttention`` under ``attn.``. ``scaled_dot_product_attention`` does the computation.

    Args:
        embed_dims: channels. num_heads: number of heads, a divisor of ``embed_dims``.
        attn_drop: dropout of the attention weights. proj_drop: dropout of the projected output.
        dropout_layer: dropout before ``identity`` is added, e.g. ``dict(type='Dropout', drop_prob=0.1)``.
        dropout: sets both ``attn_drop`` and the probability of ``dropout_layer``.
        batch_first: whether tensors are [B, Q, C] rather than [Q, B, C].
        bias: whether the projections have a bias.

    Raises:
        ValueError: ``embed_dims`` is not divisible by ``num_heads``.

    Source: names and defaults are mmcv's. One thing differs: ``dropout`` has an effect on this instance alone, whereas
    in mmcv it changes the default of every later instance.
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
        norm: nn.Module | None = None,
    ) -> Tensor:
        """Return the attended queries plus ``identity``, normalised by ``norm`` if that is given.

        Args:
            query: [B, Q, C]. Without ``batch_first``, the first two axes of this and of all tensors with channels are
                swapped.
            key: [B, K, C], by default ``query``. value: [B, K, C], by default ``key``.
            identity: [B, Q, C]. The default is ``query`` without ``query_pos``.
            query_pos: [B, Q, C]. key_pos: [B, K, C], by default ``query_pos`` if it has the shape of the key.
            attn_mask: [Q, K] or [B·heads, Q, K]. It is bool, True where a query must not attend to a key, or a float
                that is added to the score.
            key_padding_mask: [B, K] bool, True where a key is padding, or a float that is added to the score.
        """
        key = query if key is None else key
        value = key if value is None else value
        identity = query if identity is None else identity
        if key_pos is None and query_pos is not None and query_pos.shape == key.shape:
            key_pos = query_pos
        # Queries and keys then have one projection for both.
        is_joint = key is query and key_pos is query_pos
        query = as_autocast_input(query if query_pos is None else query + query_pos)
        if is_joint:
            key = query
        else:
            key = as_autocast_input(key if key_pos is None else key + key_pos)
        value = as_autocast_input(value)
        attn = self.attn
        if not is_plain(attn, nn.MultiheadAttention):
            out, _ = attn(
                query,
                key,
                value,
                attn_mask=attn_mask,
                key_padding_mask=key_padding_mask,
                need_weights=False,
            )
            return add_and_norm(norm, out, identity, self.proj_drop, self.dropout_layer)
        if not self.batch_first:
            query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
        inputs: tuple[Tensor, ...] = (query, value) if is_joint else (query, key, value)
        sizes = [self.embed_dims * count for count in ((2, 1) if is_joint else (1, 1, 1))]
        weights = as_autocast_input(attn.in_proj_weight).split(sizes)
        biases = (
            [None] * 3 if attn.in_proj_bias is None else as_autocast_input(attn.in_proj_bias).split(sizes)
        )
        query, key, value = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # [B, heads, Q, C]
            for tensor, weight, bias in zip(inputs, weights, biases, strict=False)
            for part in F.linear(tensor, weight, bias).split(self.embed_dims, dim=-1)
        )
        mask = self._joint_mask(attn_mask, key_padding_mask, query)
        out = _attention(query, key, value, mask, attn.dropout if attn.training else 0.0)
        out = attn.out_proj(out.transpose(1, 2).flatten(2))
        out = out if self.batch_first else out.transpose(0, 1)
        return add_and_norm(norm, out, identity, self.proj_drop, self.dropout_layer)

    def _joint_mask(
        self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, query: Tensor
    ) -> Tensor | None:
        """Return what is added to the scores, which broadcasts to [B, heads, Q, K], or None if nothing is."""
        masks = []
        if attn_mask is not None:
            masks.append(attn_mask if attn_mask.dim() == 2 else attn_mask.unflatten(0, (-1, self.num_heads)))
        if key_padding_mask is not None:
            masks.append(key_padding_mask[:, None, None])
        added = [torch.where(mask, -math.inf, 0.0) if mask.dtype == torch.bool else mask for mask in masks]
        return functools.reduce(torch.add, added).to(query.dtype) if added else None


def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    """Return scaled dot-product attention [B, heads, Q, C / heads].

    With 16-bit tensors on a CPU, it is computed in float32 if it needs gradients: torch's 16-bit backward there takes
    1.4 to 6 times as long.
    """
    if query.device.type != "cpu" or not query.requires_grad:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)
    if mask is not None:
        mask = at_least_float32(mask)
    wide = at_least_float32(query)
    with without_autocast(query):  # It would convert the arguments back.
        out = F.scaled_dot_product_attention(
            wide, at_least_float32(key), at_least_float32(value), attn_mask=mask, dropout_p=dropout
        )
    return out.to(query.dtype)
