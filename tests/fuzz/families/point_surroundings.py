"""Problems of the operators in plain torch for what lies around points: Gaussians and sparse convolution."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.fuzz.problem import Draw, Operator, Problem, largest
from visdet.ops import (
    get_indice_pairs,
    indice_conv,
    indice_maxpool,
    local_aggregate,
    local_aggregate_prob,
)
from visdet.ops.mmcv.sparse_conv import indice_maxpool_gradient

from .point_features import linear_problem

__all__ = ["OPERATORS"]


def _draw_gaussians(draw: Draw) -> Problem:
    N, G, C, dtype = draw.size(40), draw.size(30), draw.size(5), draw.dtype()
    H, W, D = (draw.size(6, 0) for _ in range(3))
    points, means = draw.uniform(0, 6, N, 3), draw.uniform(0, 6, G, 3)
    precision = torch.cat([draw.uniform(1, 2, G, 3), draw.uniform(-0.3, 0.3, G, 3)], 1)
    given = {
        "pts": draw.place(points, dtype, can_expand=False),
        "points_int": draw.place(points.floor().int() - 1, can_expand=False),
        "means3D": draw.place(means, dtype, can_expand=False),
        "means3D_int": draw.place(means.floor().int() - 1, can_expand=False),
        "opacities": draw.place(draw.uniform(0, 1, G), dtype),
        "semantics": draw.place(draw.numbers(G, C), dtype),
        "radii": draw.place(draw.whole(0, 4, *draw.pick((G,), (G, 3))).int(), can_expand=False),
        "cov3D": draw.place(precision, dtype, can_expand=False),  # not singular
        "H": H,
        "W": W,
        "D": D,
    }
    return linear_problem("semantics", given, "means3D", "opacities", "cov3D")


def _aggregated(pts: Tensor, points_int: Tensor, **given: Any) -> Tensor:
    means, cells, opacities, semantics, radii, cov3D = (
        given[name] for name in ("means3D", "means3D_int", "opacities", "semantics", "radii", "cov3D")
    )
    ends = points_int.new_tensor([given[name] for name in "HWD"])
    is_inside = ((points_int >= 0) & (points_int < ends)).all(1)
    reach = radii.view(len(means), 3 if radii.dim() == 2 else 1)
    is_near = ((points_int[:, None] - cells).abs() <= reach).all(2) & is_inside[:, None]
    apart, precision = pts[:, None] - means, _matrices(cov3D)
    density = (-0.5 * torch.einsum("ngi,gij,ngj->ng", apart, precision, apart)).exp()
    return (density * opacities * is_near) @ semantics


def _matrices(cov3D: Tensor) -> Tensor:  # [G, 6] -> [G, 3, 3]
    return cov3D[:, [0, 3, 5, 3, 1, 4, 5, 4, 2]].view(-1, 3, 3)


def _expected(opacities: Tensor, semantics: Tensor, cov3D: Tensor, **given: Any) -> tuple[Tensor, ...]:
    """Return the results by way of the plain sums."""

    def summed(weights: Tensor, values: Tensor) -> Tensor:
        return _aggregated(opacities=weights, semantics=values, cov3D=cov3D, **given)

    weights = opacities * torch.linalg.det(_matrices(cov3D)).sqrt() / (2 * math.pi) ** 1.5
    G, C = semantics.shape
    ones = semantics.new_ones(G)
    each = summed(ones, torch.eye(G).to(semantics))
    total, means = summed(weights, ones[:, None]), summed(weights, semantics)
    is_seen = total > 1e-9
    means = torch.where(is_seen, means / torch.where(is_seen, total, 1), 1 / max(C - 1, 1))
    return means, 1 - (1 - each).prod(1), each.sum(1)


def _bounds_of_gaussians(problem: Problem, bounds: dict[str, float]) -> None:
    given = problem.arguments
    terms = max(1, len(given["pts"]) * len(given["means3D"])) * 100
    most = terms * max(1.0, largest(given["semantics"], 1e30)) * max(1.0, bounds.get("grad_total", 0.0))
    for name in bounds:
        bounds[name] = most


def _draw_sparse(draw: Draw) -> Problem:
    B, shape = draw.size(2, 0), [draw.size(6, 0) for _ in range(3)]
    every = torch.cartesian_prod(*(torch.arange(size) for size in (B, *shape)))
    indices = every[torch.randperm(len(every), generator=draw.generator)[: draw.size(40)]].int()
    ksize, C = [draw.pick(1, 2, 3) for _ in range(3)], draw.size(4, 0)
    subm = draw.chance(0.4)
    features = draw.place(draw.with_bad_numbers(draw.numbers(len(indices), C)), draw.dtype())
    given = {
        "features": features,
        "filters": draw.place(draw.numbers(*ksize, C, draw.size(4, 0)), features.dtype),
        "indices": indices.to(draw.device),
        "batch_size": B,
        "shape": shape,
        "stride": [1] * 3 if subm else [draw.pick(1, 2) for _ in range(3)],
        "padding": [size // 2 for size in ksize] if subm else [draw.pick(0, 1) for _ in range(3)],
        "subm": subm and all(size % 2 for size in ksize),
    }
    problem = linear_problem("features", given, "filters")
    problem.epsilon, problem.error_factor = (
        torch.finfo(features.dtype).eps,
        64.0,
    )  # The product of a tap is rounded.
    return problem


def _out_shape(shape: list[int], ksize: list[int], stride: list[int], padding: list[int]) -> list[int]:
    return [
        max((n + 2 * p - k) // s + 1, 0) for n, k, s, p in zip(shape, ksize, stride, padding, strict=True)
    ]


def _sparse(
    features: Tensor,
    filters: Tensor,
    indices: Tensor,
    batch_size: int,
    shape: list[int],
    stride: list[int],
    padding: list[int],
    subm: bool,
) -> Tensor:
    """Return the convolution as a dense map."""
    ksize = list(filters.shape[:3])
    out = _out_shape(shape, ksize, stride, padding)
    places, pairs, counts = get_indice_pairs(
        indices, batch_size, out, shape, ksize, stride, padding, [1] * 3, subm
    )
    values = indice_conv(features, filters, pairs, counts, len(places))
    grid = values.new_zeros(batch_size, *(shape if subm else out), filters.shape[-1])
    return grid.index_put(tuple(places.long().T), values)


def _dense(
    features: Tensor, filters: Tensor, indices: Tensor, batch_size: int, shape: list[int], **settings: Any
) -> Tensor:
    grid = features.new_zeros(batch_size, *shape, features.shape[1])
    grid = grid.index_put(tuple(indices.long().T), features).movedim(-1, 1)
    out = _out_shape(shape, list(filters.shape[:3]), settings["stride"], settings["padding"])
    if 0 in out:
        empty = features.new_zeros(batch_size, *out, filters.shape[-1])
        return empty + features.sum() * 0 + filters.sum() * 0
    weight = filters.movedim((-1, -2), (0, 1))
    dense = functional.conv3d(grid, weight, stride=settings["stride"], padding=settings["padding"])
    if not settings["subm"]:
        return dense.movedim(1, -1)
    is_place = grid.new_zeros(batch_size, *shape, 1)
    is_place = is_place.index_put(tuple(indices.long().T), is_place.new_ones(1))
    return dense.movedim(1, -1) * is_place


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor, pairs: Tensor, counts: Tensor, outputs: int) -> Tensor:
        pooled = indice_maxpool(features, pairs, counts, outputs)
        ctx.save_for_backward(features, pooled, pairs, counts)
        return pooled

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        features, pooled, *pairs = ctx.saved_tensors
        return indice_maxpool_gradient(features, pooled, grad, *pairs), None, None, None


def _draw_maxima(draw: Draw) -> Problem:
    given = _draw_sparse(draw).arguments
    given["ksize"] = list(given.pop("filters").shape[:3])
    problem = linear_problem("features", given)
    problem.positions = ("features",)
    return problem


def _maxima(
    features: Tensor, indices: Tensor, batch_size: int, shape: list[int], ksize: list[int], **settings: Any
) -> Tensor:
    """Return the pooled features as a dense map."""
    stride, padding, subm = (settings[name] for name in ("stride", "padding", "subm"))
    out = shape if subm else _out_shape(shape, ksize, stride, padding)
    places, *pairs = get_indice_pairs(indices, batch_size, out, shape, ksize, stride, padding, [1] * 3, subm)
    values = _MaxPool.apply(features, *pairs, len(places))
    grid = values.new_zeros(batch_size, *out, features.shape[1])
    return grid.index_put(tuple(places.long().T), values)


def _dense_maxima(
    features: Tensor, indices: Tensor, batch_size: int, shape: list[int], ksize: list[int], **settings: Any
) -> Tensor:
    """Return the maxima of windows. Every input that equals the maximum has the whole gradient."""
    grid = features.new_zeros(batch_size, *shape, features.shape[1])
    grid = grid.index_put(tuple(indices.long().T), features).movedim(-1, 1)
    windows = functional.pad(grid, [size for size in reversed(settings["padding"]) for _ in range(2)])
    out = _out_shape(shape, ksize, settings["stride"], settings["padding"])
    if 0 in out:
        return features.new_zeros(batch_size, *out, features.shape[1]) + features.sum() * 0
    for dim, (size, stride) in enumerate(zip(ksize, settings["stride"], strict=True)):
        windows = windows.unfold(2 + dim, size, stride)
    windows = windows.flatten(5)
    largest = windows.detach().amax(5).clamp(min=0)
    is_largest = windows == largest[..., None]
    change = torch.where(is_largest, windows - windows.detach(), 0).sum(5)
    pooled = (largest + change).movedim(1, -1)
    if not settings["subm"]:
        return pooled
    is_place = grid.new_zeros(batch_size, *shape, 1, dtype=torch.bool)
    return torch.where(is_place.index_put(tuple(indices.long().T), is_place.new_ones(1)), pooled, 0)


OPERATORS = (
    Operator(
        "local_aggregate",
        local_aggregate,
        _draw_gaussians,
        _aggregated,
        _bounds_of_gaussians,
        spoiled={"pts": ("rank", 1), "semantics": ("rank", "type", 0), "cov3D": ("rank", 0, 1)},
    ),
    Operator(
        "local_aggregate_prob",
        local_aggregate_prob,
        _draw_gaussians,
        _expected,
        _bounds_of_gaussians,
        spoiled={"pts": ("rank", 1), "semantics": ("rank", "type", 0), "cov3D": ("rank", 0, 1)},
    ),
    Operator(
        "indice_maxpool",
        _maxima,
        _draw_maxima,
        _dense_maxima,
        spoiled={"features": ("rank",), "indices": ("rank", 1)},
        aliases=("get_indice_pairs",),
    ),
    Operator(
        "indice_conv",
        _sparse,
        _draw_sparse,
        _dense,
        spoiled={"features": ("rank", "type", 1), "indices": ("rank", 1)},
        aliases=("get_indice_pairs",),
    ),
)
