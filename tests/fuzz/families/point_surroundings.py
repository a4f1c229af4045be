"""Problems of the operators in plain torch for what lies around points: Gaussians, boxes, and sparse convolution."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.fuzz.problem import Draw, Operator, Problem, largest
from visdet.ops import (
    get_indice_pairs,
    indice_conv,
    local_aggregate,
    local_aggregate_prob,
    points_in_boxes_all,
    points_in_boxes_part,
    roipoint_pool3d,
)

from .point_features import linear_problem
from .point_neighbours import nothing

__all__ = ["OPERATORS"]


def _draw_gaussians(draw: Draw) -> Problem:
    N, G, C, dtype = draw.size(40), draw.size(30), draw.size(5), draw.dtype(torch.float32, torch.float64)
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


def _aggregated(
    pts: Tensor,
    points_int: Tensor,
    means3D: Tensor,
    means3D_int: Tensor,
    opacities: Tensor,
    semantics: Tensor,
    radii: Tensor,
    cov3D: Tensor,
    **sizes: int,
) -> Tensor:
    ends = points_int.new_tensor([sizes["H"], sizes["W"], sizes["D"]])
    is_inside = ((points_int >= 0) & (points_int < ends)).all(1)
    reach = radii.view(len(means3D), 3 if radii.dim() == 2 else 1)
    is_near = ((points_int[:, None] - means3D_int).abs() <= reach).all(2) & is_inside[:, None]
    precision = cov3D[:, [0, 3, 5, 3, 1, 4, 5, 4, 2]].view(-1, 3, 3)
    apart = pts[:, None] - means3D
    density = (-0.5 * torch.einsum("ngi,gij,ngj->ng", apart, precision, apart)).exp()
    return (density * opacities * is_near) @ semantics


def _expected(
    pts: Tensor, points_int: Tensor, means3D: Tensor, semantics: Tensor, cov3D: Tensor, **others: Any
) -> tuple[Tensor, ...]:
    """Return the results by way of the plain sums."""

    def summed(opacities: Tensor, values: Tensor) -> Tensor:
        return _aggregated(
            pts, points_int, means3D, semantics=values, cov3D=cov3D, **others | {"opacities": opacities}
        )

    precision = cov3D[:, [0, 3, 5, 3, 1, 4, 5, 4, 2]].view(-1, 3, 3)
    weights = others["opacities"] * torch.linalg.det(precision).sqrt() / (2 * math.pi) ** 1.5
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


def _boxes(draw: Draw, *shape: int) -> Tensor:
    parts = draw.uniform(-2, 2, *shape, 3), draw.uniform(0.2, 3, *shape, 3), draw.uniform(-4, 4, *shape, 1)
    return torch.cat(parts, -1)


def _draw_boxes(draw: Draw) -> Problem:
    B, N, M, dtype = draw.size(3), draw.size(60), draw.size(8), draw.dtype()
    points = draw.with_bad_numbers(draw.uniform(-3, 3, B, N, 3))
    return Problem(
        {
            "points": draw.place(points, dtype),
            "boxes": draw.place(draw.with_bad_numbers(_boxes(draw, B, M)), dtype),
        }
    )


def _margins(points: Tensor, boxes: Tensor) -> Tensor:  # [B, N, 3], [B, M, 7] -> [B, N, M]
    """Return how far each point is inside each box; negative outside, NaN where a number is not finite."""
    apart, (cos, sin) = (
        points.double()[:, :, None] - boxes.double()[:, None, :, :3],
        (
            boxes[..., 6].double().cos()[:, None],
            boxes[..., 6].double().sin()[:, None],
        ),
    )
    half = boxes.double()[:, None, :, 3:6] / 2
    x, y = apart[..., 0] * cos + apart[..., 1] * sin, apart[..., 1] * cos - apart[..., 0] * sin
    along = torch.stack([x, y, apart[..., 2] - half[..., 2]], 3)
    margin = (half - along.abs()).amin(3)
    is_sound = points.isfinite().all(2)[:, :, None] & boxes.isfinite().all(2)[:, None]
    return torch.where(is_sound, margin, torch.nan)


def _same_insides(problem: Problem, got: tuple[Tensor], expected: Any) -> str:
    margin = _margins(**problem.arguments)
    # A number of 1e30 leaves no digits for the distance from a side.
    is_clear = (margin.abs() > 1e-4) & (margin.abs() < 1e4)
    found = got[0]
    if found.dim() == 3:
        is_wrong = is_clear & ((found == 1) != (margin > 0))
        return f"point and box {is_wrong.nonzero().tolist()}" if bool(is_wrong.any()) else ""
    if margin.shape[2] == 0:
        return "" if bool((found == -1).all()) else "a point is in a box, and there are none"
    is_inside = margin > 0
    wanted = torch.where(is_inside.any(2), is_inside.int().argmax(2), -1)
    is_wrong = is_clear.all(2) & (found != wanted)
    return f"points {is_wrong.nonzero().tolist()}" if bool(is_wrong.any()) else ""


def _draw_pooled(draw: Draw) -> Problem:
    B, N, M, dtype = draw.size(3), draw.size(60), draw.size(8), draw.dtype()
    given = {
        "points": draw.place(draw.uniform(-3, 3, B, N, 3), dtype, can_expand=False),
        "point_features": draw.place(draw.with_bad_numbers(draw.numbers(B, N, draw.size(4))), dtype),
        "boxes3d": draw.place(_boxes(draw, B, M), dtype, can_expand=False),
        "num_sampled_points": draw.size(20, 0),
    }
    return Problem(given)


def _same_pooled(problem: Problem, got: tuple[Tensor, Tensor], expected: Any) -> str:
    given = problem.arguments
    margin = _margins(given["points"], given["boxes3d"])
    values = torch.cat([given["points"], given["point_features"]], 2)
    for b, m in torch.cartesian_prod(torch.arange(margin.shape[0]), torch.arange(margin.shape[2])).tolist():
        if bool((margin[b, :, m].abs() < 1e-4).any()):
            continue
        inside = (margin[b, :, m] > 0).nonzero()[:, 0]
        if bool(got[1][b, m]) != (len(inside) == 0):
            return f"box {b}, {m} with {len(inside)} points: empty {bool(got[1][b, m])}"
        slots = torch.arange(given["num_sampled_points"], device=inside.device)
        wanted = values[b][inside[slots % len(inside)]] if len(inside) else torch.zeros_like(got[0][b, m])
        if not torch.equal(got[0][b, m].nan_to_num(7), wanted.nan_to_num(7)):
            return f"points of box {b}, {m}"
    return ""


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


OPERATORS = (
    Operator(
        "local_aggregate",
        local_aggregate,
        _draw_gaussians,
        _aggregated,
        _bounds_of_gaussians,
        spoiled={"pts": ("rank", 1), "semantics": ("rank", 0), "cov3D": ("rank", 0, 1)},
    ),
    Operator(
        "local_aggregate_prob",
        local_aggregate_prob,
        _draw_gaussians,
        _expected,
        _bounds_of_gaussians,
        spoiled={"pts": ("rank", 1), "semantics": ("rank", 0), "cov3D": ("rank", 0, 1)},
    ),
    *(
        Operator(
            call.__name__,
            call,
            _draw_boxes,
            nothing,
            compare=_same_insides,
            spoiled={"points": ("rank", 0, 2), "boxes": ("rank", 0, 2)},
        )
        for call in (points_in_boxes_part, points_in_boxes_all)
    ),
    Operator(
        "roipoint_pool3d",
        roipoint_pool3d,
        _draw_pooled,
        nothing,
        compare=_same_pooled,
        spoiled={"points": ("rank", 0, 1, 2), "boxes3d": ("rank", 0, 2)},
    ),
    Operator(
        "indice_conv",
        _sparse,
        _draw_sparse,
        _dense,
        spoiled={"features": ("rank", 1), "indices": ("rank", 1)},
        aliases=("get_indice_pairs",),
    ),
)
