"""Operators of torch whose form in ONNX some runtimes lack, or compute in another way, in plainer operators.

:func:`in_plain_operators` replaces them in a traced program, wherever the model calls them. Equal of booleans,
IsInf, IsNaN, sums of integers by CumSum and GatherElements are missing in several runtimes, or wrong there, as are a
third operand of Where that is repeated, ScatterElements of booleans, and EyeLike. TopK puts the first of equal numbers
first in onnxruntime, and another one in OpenVINO, so that stable sorting is by the rank of each number, which the graph
counts.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

_ATEN = torch.ops.aten


def in_plain_operators(program: ExportedProgram) -> ExportedProgram:
    """Return the program, in whose decomposition the operators of this module are replaced, too.

    Each decomposition goes through the whole graph twice, and ``torch.onnx.export`` needs one.
    """
    decompose = program.run_decompositions

    def with_formulas(decomp_table: dict[Any, Any]) -> ExportedProgram:
        return decompose({**decomp_table, **_FORMULAS})

    program.run_decompositions = with_formulas  # type: ignore[method-assign, assignment]
    return program


def _is_inf(x: Tensor) -> Tensor:
    return x.abs() == math.inf


def _is_nan(x: Tensor) -> Tensor:
    return ~(x.abs() <= math.inf)


def _is_finite(x: Tensor) -> Tensor:
    return x.abs() < math.inf


def _without_nan(
    x: Tensor, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Any:
    if not x.is_floating_point():
        return x.clone()
    limits = torch.finfo(x.dtype)
    x = torch.where(_is_nan(x), 0.0 if nan is None else nan, x)
    x = torch.where(x == math.inf, limits.max if posinf is None else posinf, x)
    return torch.where(x == -math.inf, limits.min if neginf is None else neginf, x)


def _angle(y: Tensor, x: Tensor) -> Tensor:
    """Return the angle of (x, y) by the one within its eighth of the circle."""
    rise = y.abs()
    run = x.abs()
    greater = torch.maximum(rise, run)
    angle = torch.atan(torch.minimum(rise, run) / torch.where(greater > 0, greater, 1.0))
    angle = torch.where(rise > run, math.pi / 2 - angle, angle)
    angle = torch.where(x < 0, math.pi - angle, angle)
    return torch.where(y < 0, -angle, angle)


def _masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Return zeros for queries that may attend to nothing, as torch does."""
    if attn_mask is None or is_causal or enable_gqa:
        return NotImplemented
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (query * factor) @ key.transpose(-2, -1)
    attends = attn_mask
    if attn_mask.dtype != torch.bool:
        attends = attn_mask > -math.inf
        scores = scores + attn_mask
    weights = torch.where(attends, scores, torch.finfo(scores.dtype).min).softmax(-1)
    return torch.where(attends, weights, 0.0) @ value


def _equal(a: Tensor, b: Tensor) -> Any:
    return ~(a ^ b) if a.dtype == b.dtype == torch.bool else NotImplemented


def _not_equal(a: Tensor, b: Tensor) -> Any:
    return a ^ b if a.dtype == b.dtype == torch.bool else NotImplemented


def _where(condition: Tensor, a: Tensor, b: Tensor) -> Any:
    shape = torch.broadcast_shapes(condition.shape, a.shape, b.shape)
    return NotImplemented if not b.dim() or b.shape == shape else torch.where(condition, a, b.expand(shape))


def _scatter(x: Tensor, dim: int, index: Tensor, src: Tensor) -> Any:
    return x.int().scatter(dim, index, src.int()) != 0 if x.dtype == torch.bool else NotImplemented


def _diagonal(x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    x = x.movedim((dim1, dim2), (-2, -1))
    size = x.shape[-1]
    if offset or size != x.shape[-2]:
        return NotImplemented
    return x.flatten(-2).index_select(-1, torch.arange(size, device=x.device) * (size + 1))


def _floor_divide(a: Tensor, b: Any) -> Any:
    """Return the quotient rounded down. ONNX rounds that of integers towards zero, and none needs rounding here."""
    if not isinstance(a, Tensor) or a.is_floating_point():
        return NotImplemented
    divisor = b if isinstance(b, Tensor) else torch.full((), b, dtype=a.dtype, device=a.device)
    multiple = a - a.remainder(divisor)
    return torch.onnx.ops.symbolic("Div", (multiple, divisor), dtype=a.dtype, shape=multiple.shape)


def _cumulative_sum(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    """Return the sums in float32, which holds integers below 2 ** 24 exactly. Numbers of instances are far smaller."""
    if x.is_floating_point():
        return NotImplemented
    return x.float().cumsum(dim).to(dtype or torch.int64)


def _gather(x: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Any:
    """Return the numbers at the indices, by an index into the first axis of a table.

    If the index is the same along all axes after ``dim``, whole rows are taken.
    """
    count = x.dim()
    if not count:
        return NotImplemented
    sizes = index.shape
    own_sizes = x.shape
    dim = dim % count
    rest = range(dim + 1, count)
    takes_rows = all(index.stride(axis) == 0 and sizes[axis] == own_sizes[axis] for axis in rest)
    last = dim if takes_rows else count - 1
    for axis in reversed(rest) if takes_rows else ():
        index = index.select(axis, 0)
    place: Any = 0
    for axis in range(last + 1):
        size = sizes[axis]
        own = torch.arange(size, device=x.device).view(-1, *[1] * (last - axis))
        place = place * own_sizes[axis] + (index if axis == dim else own)
    rows = x.flatten(0, last).index_select(0, place.flatten())
    return rows.view(*index.shape, *own_sizes[last + 1 :])


def _order(x: Tensor, dim: int = -1, descending: bool = False, *, stable: bool | None = None) -> Tensor:
    """Return the indices that sort numbers, the first of equal ones first."""
    numbers = x.movedim(dim, -1)
    count = numbers.shape[-1]
    ours = numbers.unsqueeze(-1)
    others = numbers.unsqueeze(-2)
    goes_before = others > ours if descending else others < ours
    place = torch.arange(count, device=x.device)
    is_earlier = place < place.unsqueeze(-1)
    rank = (goes_before | ((others == ours) & is_earlier)).sum(-1)
    return rank.float().topk(count, largest=False).indices.movedim(-1, dim)


def _sort(
    x: Tensor, dim: int = -1, descending: bool = False, *, stable: bool | None = None
) -> tuple[Tensor, Tensor]:
    order = _order(x, dim, descending)
    return x.gather(dim, order), order


_FORMULAS = {
    _ATEN.isinf.default: _is_inf,
    _ATEN.isnan.default: _is_nan,
    _ATEN.isfinite.default: _is_finite,
    _ATEN.nan_to_num.default: _without_nan,
    _ATEN.atan2.default: _angle,
    _ATEN.scaled_dot_product_attention.default: _masked_attention,
    _ATEN.eq.Tensor: _equal,
    _ATEN.ne.Tensor: _not_equal,
    _ATEN.where.self: _where,
    _ATEN.scatter.src: _scatter,
    _ATEN.diagonal.default: _diagonal,
    _ATEN.floor_divide.default: _floor_divide,
    _ATEN.cumsum.default: _cumulative_sum,
    _ATEN.gather.default: _gather,
    _ATEN.sort.default: _sort,
    _ATEN.sort.stable: _sort,
    _ATEN.argsort.default: _order,
    _ATEN.argsort.stable: _order,
}
