"""The modules of ``flash_attn.flash_attention``, up to flash_attn 1, computed by ``scaled_dot_product_attention``."""

from typing import Any

import torch
from torch import Tensor, nn

from .flash_attention import flash_attn_unpadded_qkvpacked_func
from .flash_padding import pad_input, unpad_input

__all__ = ["FlashAttention", "FlashMHA"]


class FlashAttention(nn.Module):
    """The attention of packed queries, keys and values, without parameters.

    Args:
        softmax_scale: the factor of the scores. The default is D ** -0.5.
        attention_dropout: the probability with which a weight is set to 0 in training.
    """

    def __init__(self, softmax_scale: float | None = None, attention_dropout: float = 0.0) -> None:
        super().__init__()
        self.softmax_scale, self.dropout_p = softmax_scale, attention_dropout

    def forward(
        self,
        qkv: Tensor,  # [B, S, 3, H, D], or [sum of S, 3, H, D] with cu_seqlens
        key_padding_mask: Tensor | None = None,  # [B, S], true for a token
        causal: bool = False,
        cu_seqlens: Tensor | None = None,  # [B + 1]
        max_s: int | None = None,
        need_weights: bool = False,
    ) -> tuple[Tensor, None]:
        """Return the attention, in which padding is 0, and None.

        Raises:
            NotImplementedError: weights are asked for.
        """
        if need_weights:
            raise NotImplementedError("flash_attn.flash_attention.FlashAttention: need_weights must be False")
        options = self.dropout_p if self.training else 0.0, self.softmax_scale, causal
        if cu_seqlens is not None:
            longest = len(qkv) if max_s is None else max_s
            return flash_attn_unpadded_qkvpacked_func(qkv, cu_seqlens, longest, *options), None
        B, S = qkv.shape[:2]
        mask = qkv.new_ones(B, S, dtype=torch.bool) if key_padding_mask is None else key_padding_mask
        tokens, indices, starts, longest = unpad_input(qkv, mask)
        return pad_input(
            flash_attn_unpadded_qkvpacked_func(tokens, starts, longest, *options), indices, B, S
        ), None


class FlashMHA(nn.Module):
    """Self-attention with the projections ``Wqkv`` and ``out_proj``. The arguments are those of flash_attn 1."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        bias: bool = True,
        batch_first: bool = True,
        attention_dropout: float = 0.0,
        causal: bool = False,
        **factory: Any,
    ) -> None:
        if not batch_first or embed_dim % num_heads:
            raise ValueError(
                "flash_attn.flash_attention.FlashMHA: batch_first must be True, and embed_dim a multiple of "
                f"num_heads, got {batch_first}, {embed_dim} and {num_heads}"
            )
        super().__init__()
        self.num_heads, self.causal = num_heads, causal
        self.Wqkv = nn.Linear(embed_dim, 3 * embed_dim, bias=bias, **factory)
        self.inner_attn = FlashAttention(attention_dropout=attention_dropout)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **factory)

    def forward(
        self,
        x: Tensor,  # [B, S, C]
        key_padding_mask: Tensor | None = None,  # [B, S], true for a token
        need_weights: bool = False,
    ) -> tuple[Tensor, None]:
        qkv = self.Wqkv(x).unflatten(-1, (3, self.num_heads, -1))
        out, weights = self.inner_attn(qkv, key_padding_mask, self.causal, need_weights=need_weights)
        return self.out_proj(out.flatten(-2)), weights
