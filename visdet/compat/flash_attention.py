"""The functions of the package ``flash_attn``, computed by torch's ``scaled_dot_product_attention``.

``visdet.compat.extensions`` makes them importable as ``flash_attn`` and ``flash_attn.flash_attn_interface`` where that
package is not installed. The functions whose names contain ``unpadded`` are those of flash_attn 0.2 to 1.0, and the
others those of flash_attn 2. Tensors may be on any device and of any floating type.

``causal`` hides the keys behind a query. In flash_attn 2, the last query sees the last key. In the earlier versions,
the first query sees the first key. A query that sees no key gives 0.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .flash_padding import pad_input

__all__ = [
    "__version__",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_unpadded_func",
    "flash_attn_unpadded_kvpacked_func",
    "flash_attn_unpadded_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
]

__version__ = "0"  # Packages that need the kernels of a certain version look it up.

# What follows ``causal``, in an order that differs between versions, and the defaults of these options.
_OPTIONS = ("window_size", "softcap", "alibi_slopes", "deterministic", "return_attn_probs", "block_table")
_DEFAULTS = ((-1, -1), 0.0, None, False)


def flash_attn_func(
    q: Tensor,  # [B, Sq, H, D]
    k: Tensor,  # [B, Sk, H or a divisor of H, D]
    v: Tensor,  # like k
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    *options: Any,
    **named: Any,
) -> Tensor:  # [B, Sq, H, D]
    """Return the attention of sequences of equal lengths.

    Args:
        q: the queries.
        k: the keys. With fewer heads, each one serves several consecutive heads of the queries.
        v: the values.
        dropout_p: the probability with which a weight is set to 0. It also holds outside of training.
        softmax_scale: the factor of the logits. The default is ``D ** -0.5``.
        causal: whether a query sees no later key.
        options: ``window_size``, ``softcap``, ``alibi_slopes``, ``deterministic``, ``return_attn_probs`` with their
            defaults, in the order of any version.
        named: the same by their names. Only ``deterministic`` may differ from its default. It has no effect.

    Raises:
        NotImplementedError: another option is not its default.
    """
    _check("flash_attn_func", options, named)
    return _attend(q, k, v, None, dropout_p, softmax_scale, causal, is_causal_to_end=True)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *arguments: Any, **named: Any) -> Tensor:
    """Return :func:`flash_attn_func` for keys and values [B, Sk, 2, H, D] in one tensor."""
    k, v = kv.unbind(2)
    return flash_attn_func(q, k, v, *arguments, **named)


def flash_attn_qkvpacked_func(qkv: Tensor, *arguments: Any, **named: Any) -> Tensor:
    """Return :func:`flash_attn_func` for queries, keys and values [B, S, 3, H, D] in one tensor."""
    q, k, v = qkv.unbind(2)
    return flash_attn_func(q, k, v, *arguments, **named)


def flash_attn_varlen_func(
    q: Tensor,  # [sum of Sq, H, D]
    k: Tensor,  # [sum of Sk, H or a divisor of H, D]
    v: Tensor,  # like k
    cu_seqlens_q: Tensor,  # [B + 1]
    cu_seqlens_k: Tensor,  # [B + 1]
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    *options: Any,
    **named: Any,
) -> Tensor:  # [sum of Sq, H, D]
    """Return the attention of sequences that follow each other in their tensors.

    Args:
        q: the queries.
        k: the keys.
        v: the values.
        cu_seqlens_q: where each sequence of queries begins, and the end of the last one.
        cu_seqlens_k: the same for the keys.
        max_seqlen_q: the length of the longest sequence of queries, or more.
        max_seqlen_k: the same for the keys.
        dropout_p, softmax_scale, causal, options, named: as in :func:`flash_attn_func`. ``block_table`` must be None.

    Raises:
        NotImplementedError: an option is not its default.
    """
    _check("flash_attn_varlen_func", options, named)
    return _attend_packed(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        is_causal_to_end=True,
    )


def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *arguments: Any, **named: Any) -> Tensor:
    """Return :func:`flash_attn_varlen_func` for keys and values [sum of Sk, 2, H, D] in one tensor."""
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(q, k, v, *arguments, **named)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *arguments: Any, **named: Any
) -> Tensor:
    """Return :func:`flash_attn_varlen_func` for queries, keys and values [sum of S, 3, H, D] in one tensor."""
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *arguments, **named
    )


def flash_attn_unpadded_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None = None,
    causal: bool = False,
    return_attn_probs: bool = False,
    deterministic: bool = False,
) -> Tensor:
    """Return the attention of :func:`flash_attn_varlen_func`, with the causal mask of flash_attn 1."""
    _check("flash_attn_unpadded_func", (), {"return_attn_probs": return_attn_probs})
    return _attend_packed(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        is_causal_to_end=False,
    )


def flash_attn_unpadded_kvpacked_func(q: Tensor, kv: Tensor, *arguments: Any, **named: Any) -> Tensor:
    """Return :func:`flash_attn_unpadded_func` for keys and values [sum of Sk, 2, H, D] in one tensor."""
    k, v = kv.unbind(1)
    return flash_attn_unpadded_func(q, k, v, *arguments, **named)


def flash_attn_unpadded_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *arguments: Any, **named: Any
) -> Tensor:
    """Return :func:`flash_attn_unpadded_func` for queries, keys and values [sum of S, 3, H, D] in one tensor."""
    q, k, v = qkv.unbind(1)
    return flash_attn_unpadded_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *arguments, **named
    )


def _check(function: str, options: tuple, named: dict[str, Any]) -> None:
    """Raise an error if an option is unknown, or has a value that visdet does not accept."""
    for name, value in (*(("an option behind causal", value) for value in options), *named.items()):
        if name in named and name not in _OPTIONS:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
        if name != "deterministic" and (isinstance(value, Tensor) or value not in _DEFAULTS):
            raise NotImplementedError(
                f"{function}: {name} must have its default, because visdet computes this function by torch's "
                "scaled_dot_product_attention, but it is given another value. It needs the package flash_attn"
            )


def _attend_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    longest_q: Any,
    longest_k: Any,
    dropout_p: float,
    scale: float | None,
    causal: bool,
    is_causal_to_end: bool,
) -> Tensor:
    longest_q = int(longest_q)  # It may be a tensor.
    longest_k = int(longest_k)
    rows_q = _rows("q", starts_q, longest_q, len(q))
    rows_k = _rows("k", starts_k, longest_k, len(k))
    B = len(starts_q) - 1
    q = _padded(q, rows_q, B, longest_q)
    k = _padded(k, rows_k, B, longest_k)
    v = _padded(v, rows_k, B, longest_k)
    lengths = None if rows_q is None and rows_k is None else (starts_q.diff(), starts_k.diff())
    out = _attend(q, k, v, lengths, dropout_p, scale, causal, is_causal_to_end).flatten(0, 1)
    return out if rows_q is None else out.index_select(0, rows_q)


def _rows(name: str, starts: Tensor, longest: int, total: int) -> Tensor | None:
    """Return the row of each token in a batch of padded sequences, or None if no sequence has padding.

    Raises:
        ValueError: the tables do not fit the tokens. This is only checked on the CPU, as the GPU would have to wait.
    """
    if not starts.is_cuda:
        lengths = starts.diff()
        if starts[-1] != total or (len(lengths) and (lengths.min() < 0 or lengths.max() > longest)):
            raise ValueError(
                f"flash_attn: cu_seqlens_{name} must rise from 0 to the {total} rows of {name} by max_seqlen_{name} = "
                f"{longest} at most, got {starts.tolist()}"
            )
    if total == (len(starts) - 1) * longest:
        return None
    token = torch.arange(total, device=starts.device, dtype=starts.dtype)
    sequence = torch.searchsorted(starts[1:].contiguous(), token, right=True)
    return sequence * longest + (token - starts[sequence])


def _padded(tokens: Tensor, rows: Tensor | None, B: int, longest: int) -> Tensor:
    if rows is None:
        return tokens.unflatten(0, (B, longest))
    return pad_input(tokens, rows, B, longest)


def _attend(
    q: Tensor,  # [B, Sq, H, D]
    k: Tensor,
    v: Tensor,
    lengths: tuple[Tensor, Tensor] | None,
    dropout_p: float,
    scale: float | None,
    causal: bool,
    is_causal_to_end: bool,
) -> Tensor:
    shape = k.shape
    if shape[1] == 0:
        return q * 0
    is_square = causal and lengths is None and q.shape[1] == shape[1]
    visible = None if is_square else _visible(q, k, lengths, causal, is_causal_to_end)
    has_key = None
    if visible is not None:  # The softmax of a query that sees no key is not defined.
        has_key = visible.any(-1, keepdim=True)
        visible = visible | ~has_key
    out = scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        visible,
        dropout_p,
        is_causal=is_square,
        scale=scale,
        enable_gqa=q.shape[2] != shape[2],
    )
    return (out if has_key is None else torch.where(has_key, out, 0)).transpose(1, 2)


def _visible(
    q: Tensor,
    k: Tensor,
    lengths: tuple[Tensor, Tensor] | None,
    causal: bool,
    is_causal_to_end: bool,
) -> Tensor | None:
    """Return which keys each query sees, [B or 1, 1, Sq, Sk], or None if it sees all of them."""
    if lengths is None and not causal:
        return None
    Sq = q.shape[1]
    Sk = k.shape[1]
    device = q.device
    key = torch.arange(Sk, device=device)
    num_q, num_k = lengths or (torch.tensor([Sq], device=device), torch.tensor([Sk], device=device))
    # The key at the place of each query.
    place = torch.arange(Sq, device=device)[:, None]
    if is_causal_to_end:
        place = place + (num_k - num_q)[:, None, None]
    visible = (key < num_k[:, None, None]).expand(-1, Sq, -1)
    if causal:
        visible = visible & (key <= place)
    return visible[:, None]
