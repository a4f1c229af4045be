"""The functions of ``flash_attn.bert_padding``, which drop and restore the padding of sequences."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["index_first_axis", "index_put_first_axis", "pad_input", "unpad_input"]


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Return the rows of ``input`` with these indices."""
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Return a tensor of ``first_axis_dim`` rows with ``values`` at these indices, and 0 elsewhere."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Return [batch, seqlen, ...] with the tokens at their indices in the flattened batch, and 0 as padding."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def unpad_input(
    hidden_states: Tensor,  # [B, S, ...]
    attention_mask: Tensor,  # [B, S], true or 1 for a token, false or 0 for padding
    unused_mask: Tensor | None = None,  # [B, S]
) -> tuple[Any, ...]:
    """Return the tokens without padding, their indices, where each sequence begins, and the greatest length.

    The result has four items, as up to flash_attn 2.6. With ``unused_mask``, which flash_attn 2.7 has added, the tokens
    of either mask are returned, and the number of those of ``attention_mask`` per sequence as a fifth item.
    """
    used = attention_mask.bool()
    kept = used if unused_mask is None else used | unused_mask.bool()
    lengths = kept.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    starts = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if len(lengths) else 0
    tokens = index_first_axis(hidden_states.flatten(0, 1), indices)
    extra = () if unused_mask is None else (used.sum(-1, dtype=torch.int32),)
    return tokens, indices, starts, longest, *extra
