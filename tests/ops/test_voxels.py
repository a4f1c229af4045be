"""Voxels and sums over cells."""

import math
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.fuzz import sizes
from tests.fuzz.problem import (
    Draw,
    Operator,
    Problem,
    Seeded,
    draw_cloud,
    largest,
    linear_problem,
    nothing,
    rand,
)
from visdet.execution.tensor_tree import map_tensors
from visdet.ops import (
    bev_pool,
    bev_pool_v2,
    dynamic_scatter,
    dynamic_voxelize,
    hard_voxelize,
    local_aggregate,
    local_aggregate_prob,
    local_aggregate_prob_sq,
    voxel_pooling,
)

REAL = ("means3D", "opacities", "semantics", "u", "v", "scales3D", "rot3D", "cov3D")  # with gradients
FINE, EXTENT = (0.5, 0.25, 1.0), (-2.0, -1.0, -2.0, 2.0, 1.0, 2.0)


def _draw_voxels(draw: Draw) -> Problem:
    points = draw.place(draw_cloud(draw, draw.size(200), draw.pick(3, 4)), draw.dtype())
    return Problem({"points": points, "voxel_size": FINE, "coors_range": EXTENT})


def _same_voxels(problem: Problem, got: tuple[Tensor], expected: Any) -> str:
    """Compare with a loop. Rounding may move a point that is next to a border of voxels."""
    for point, voxel in zip(problem.arguments["points"].tolist(), got[0].tolist(), strict=True):
        place = [(p - low) / size for p, low, size in zip(point, EXTENT, FINE, strict=False)]
        if any(math.isfinite(p) and 0 < abs(p - round(p)) < 1e-5 * (1 + abs(p)) for p in place):
            continue
        ends = [(EXTENT[3 + i] - EXTENT[i]) / FINE[i] for i in range(3)]
        is_inside = all(0 <= p < end for p, end in zip(place, ends, strict=True))
        wanted = [int(p) for p in reversed(place)] if is_inside else [-1] * 3
        if voxel != wanted:
            return f"{point} is in {voxel}, expected {wanted}"
    return ""


def _draw_hard_voxels(draw: Draw) -> Problem:
    problem = _draw_voxels(draw)
    problem.arguments.update(max_points=draw.size(12, 0), max_voxels=draw.pick(-1, 0, 3, 1000))
    return problem


def _same_hard_voxels(problem: Problem, got: tuple[Tensor, ...], expected: Any) -> str:
    """Compare with a loop over the points, given their voxels."""
    given = problem.arguments
    members: dict[tuple[int, ...], list[Tensor]] = {}
    for point, voxel in zip(
        given["points"],
        dynamic_voxelize(given["points"], FINE, EXTENT).tolist(),
        strict=True,
    ):
        if voxel[0] >= 0 and (tuple(voxel) in members or len(members) != given["max_voxels"]):
            members.setdefault(tuple(voxel), []).append(point)
    most, voxels, counts = given["max_points"], got[1].tolist(), got[2].tolist()
    if voxels != [list(voxel) for voxel in members]:
        return f"voxels {voxels}, expected {list(members)}"
    if counts != [min(len(rows), most) for rows in members.values()]:
        return f"counts {counts}"
    for voxel, rows in zip(got[0], members.values(), strict=True):
        wanted = torch.zeros_like(voxel)
        kept = rows[:most]
        wanted[: len(kept)] = torch.stack(kept)
        if not torch.equal(voxel.nan_to_num(7), wanted.nan_to_num(7)):
            return f"points {voxel.tolist()}, expected {wanted.tolist()}"
    return ""


def _draw_scatter(draw: Draw) -> Problem:
    N = draw.size(60)
    given = {
        "feats": draw.values(N, draw.size(5)),
        "coors": draw.index(-1, 4, N, 3),
        "reduce_type": draw.pick("max", "sum", "mean"),
    }
    return linear_problem("feats", given)


def _scattered(feats: Tensor, coors: Tensor, reduce_type: str) -> Tensor:
    places = coors[(coors >= 0).all(1)].unique(dim=0) if len(coors) else coors
    reduce = {"max": lambda t: t.amax(0), "sum": lambda t: t.sum(0), "mean": lambda t: t.mean(0)}[reduce_type]
    parts = [reduce(feats[(coors == place).all(1)])[None] for place in places]
    return torch.cat([feats.new_zeros(0, feats.shape[1]) + feats.sum() * 0, *parts])


def _draw_cells(draw: Draw) -> Problem:
    N, sizes = draw.size(60), {name: draw.size(4, 0.02) for name in "BDHW"}
    given = {"feats": draw.values(N, draw.size(5)), "coords": draw.index(-1, 5, N, 4), **sizes}
    return linear_problem("feats", given)


def _cells(feats: Tensor, coords: Tensor, B: int, D: int, H: int, W: int) -> Tensor:
    sums = feats.new_zeros(B, D, H, W, feats.shape[1]) + feats.sum() * 0
    ends = torch.tensor([H, W, D, B], device=coords.device)
    inside = ((coords >= 0) & (coords < ends)).all(1)
    x, y, z, image = coords[inside].long().unbind(1)
    return sums.index_put((image, z, x, y), feats[inside], accumulate=True)


def _draw_ranks(draw: Draw) -> Problem:
    B, V, D, H, W, cells = (
        draw.size(2, 0),
        draw.size(2, 0),
        *(draw.size(4, 0) for _ in range(3)),
        draw.size(9, 0),
    )
    N, features = draw.size(60), draw.values(B, V, H, W, draw.size(5))
    given = {
        "depth": draw.place(draw.uniform(0, 1, B, V, D, H, W), features.dtype, bad=0.5),
        "feat": features,
        "ranks_depth": draw.index(0, B * V * D * H * W, N),
        "ranks_feat": draw.index(0, B * V * H * W, N),
        "ranks_bev": draw.index(0, cells, N),
        "cells": cells,
    }
    return linear_problem("feat", given, "depth")


def _ranked(
    depth: Tensor, feat: Tensor, ranks_depth: Tensor, ranks_feat: Tensor, ranks_bev: Tensor, cells: int
) -> Tensor:
    terms = depth.flatten()[ranks_depth.long(), None] * feat.flatten(0, 3)[ranks_feat.long()]
    sums = feat.new_zeros(cells, feat.shape[4])
    return sums.index_put((ranks_bev.long(),), terms, accumulate=True)


def _draw_columns(draw: Draw) -> Problem:
    B, N = draw.size(3), draw.size(40)
    sizes = [draw.size(4, 0) for _ in range(3)]
    given = {
        "geom_xyz": draw.index(-1, 5, B, N, 3),
        "input_features": draw.values(B, N, draw.size(5)),
        "voxel_num": sizes,
    }
    return linear_problem("input_features", given)


def _columns(geom_xyz: Tensor, input_features: Tensor, voxel_num: list[int]) -> Tensor:
    B, N = input_features.shape[:2]
    image = torch.arange(B, device=geom_xyz.device).repeat_interleave(N)
    places = torch.cat([geom_xyz.flatten(0, 1).long(), image[:, None]], 1)[:, [1, 0, 2, 3]]
    W, H, D = voxel_num
    return _cells(input_features.flatten(0, 1), places, B, D, H, W).sum(1)


def _draw_gaussians(draw: Draw) -> Problem:
    N, G, C, dtype = draw.size(90), draw.size(70), draw.size(25), draw.dtype()
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


def _small_gaussians(N: int, G: int, C: int) -> dict[str, Any]:
    draw = Seeded(3)
    points, means, factors = (draw.uniform(*shape) * 4 for shape in ((N, 3), (G, 3), (G, 3, 3)))
    inverse = (factors @ factors.mT / 30 + torch.eye(3) / 4).flatten(1)[:, [0, 4, 8, 1, 5, 2]]
    real = {"pts": points, "means3D": means, "opacities": draw.uniform(G), "semantics": draw.uniform(G, C)}
    voxels = {"points_int": points.int(), "means3D_int": means.int(), "radii": means[:, 0].int() + 1}
    return real | voxels | {"cov3D": inverse, "H": 4, "W": 4, "D": 3}


def _small_superquadrics(N: int, G: int, C: int) -> dict[str, Any]:
    given, draw = _small_gaussians(N, G, C), Seeded(4)
    del given["cov3D"]
    exponents = {"u": draw.uniform(G) + 0.5, "v": draw.uniform(G) + 0.5}
    return given | exponents | {"scales3D": draw.uniform(G, 3) + 1, "rot3D": draw.uniform(G, 9) - 0.5}


def _draw_superquadrics(draw: Draw) -> Problem:
    problem = _draw_gaussians(draw)
    dtype, G = problem.arguments.pop("cov3D").dtype, len(problem.arguments["means3D"])
    form = {
        "u": draw.place(draw.uniform(0.4, 2, G), dtype),
        "v": draw.place(draw.uniform(0.4, 2, G), dtype),
        "scales3D": draw.place(draw.uniform(0.5, 2, G, 3), dtype, can_expand=False),
        "rot3D": draw.place(draw.uniform(-1, 1, G, 9), dtype, can_expand=False),
    }
    others = "means3D", "opacities", *form
    return linear_problem("semantics", problem.arguments | form, *others)


def _densities(pts: Tensor, points_int: Tensor, **given: Any) -> Tensor:  # [N, G]
    """Return the densities of all pairs, which are 0 where a point is out of reach."""
    means, cells, radii = (given[name] for name in ("means3D", "means3D_int", "radii"))
    ends = points_int.new_tensor([given[name] for name in "HWD"])
    is_inside = ((points_int >= 0) & (points_int < ends)).all(1)
    reach = radii.view(len(means), 3 if radii.dim() == 2 else 1)
    is_near = ((points_int[:, None] - cells).abs() <= reach).all(2) & is_inside[:, None]
    apart = pts[:, None] - means
    if "cov3D" in given:
        power = torch.einsum("ngi,gij,ngj->ng", apart, _matrices(given["cov3D"]), apart)
    else:
        u, v, rotation = given["u"], given["v"], given["rot3D"].view(-1, 3, 3)
        turned = torch.einsum("gij,ngj->ngi", rotation, apart) / given["scales3D"]
        x, y, z = turned.abs().unbind(2)
        power = (x ** (2 / u) + y ** (2 / u)) ** (u / v) + z ** (2 / v)
    return torch.where(is_near, (-0.5 * power).exp(), 0)


def _aggregated(opacities: Tensor, semantics: Tensor, **given: Any) -> Tensor:
    return (_densities(**given) * opacities) @ semantics


def _matrices(cov3D: Tensor) -> Tensor:  # [G, 6] -> [G, 3, 3]
    return cov3D[:, [0, 3, 5, 3, 1, 4, 5, 4, 2]].view(-1, 3, 3)


def _expected(opacities: Tensor, semantics: Tensor, **given: Any) -> tuple[Tensor, ...]:
    """Return the results by way of the matrix of densities."""
    each, weights, C = _densities(**given), opacities, semantics.shape[1]
    if "cov3D" in given:
        weights = weights * torch.linalg.det(_matrices(given["cov3D"])).sqrt() / (2 * math.pi) ** 1.5
    total = (each @ weights)[:, None]
    is_seen, unknown = total > 1e-9, semantics.new_full((C,), 1 / max(C - 1, 1))
    unknown[-1:] = 0
    means = torch.where(is_seen, (each * weights) @ semantics / torch.where(is_seen, total, 1), unknown)
    return means, 1 - (1 - each).prod(1), each.sum(1)


def _bounds_of_gaussians(problem: Problem, bounds: dict[str, float]) -> None:
    given = problem.arguments
    terms = max(1, len(given["pts"]) * len(given["means3D"])) * 100
    most = terms * max(1.0, largest(given["semantics"], 1e30)) * max(1.0, bounds.get("grad_total", 0.0))
    for name in bounds:
        bounds[name] = most


OPERATORS = (
    Operator(
        "dynamic_voxelize",
        dynamic_voxelize,
        _draw_voxels,
        nothing,
        compare=_same_voxels,
        spoiled={"points": ("rank",)},
        of_size=(
            lambda n: Problem(
                {
                    "points": rand(n, 4),
                    "voxel_size": FINE,
                    "coors_range": EXTENT,
                }
            ),
        ),
        launches=sizes.arguments(points=st.sampled_from(["N 3", "N 5"]), voxel_size=FINE, coors_range=EXTENT),
    ),
    Operator(
        "hard_voxelize",
        hard_voxelize,
        _draw_hard_voxels,
        nothing,
        compare=_same_hard_voxels,
        spoiled={"points": ("rank",)},
        aliases=("dynamic_voxelize",),
    ),
    Operator(
        "dynamic_scatter",
        lambda **given: dynamic_scatter(**given)[0],
        _draw_scatter,
        _scattered,
    ),
    Operator(
        "bev_pool",
        bev_pool,
        _draw_cells,
        _cells,
    ),
    Operator(
        "bev_pool_v2",
        bev_pool_v2,
        _draw_ranks,
        _ranked,
    ),
    Operator(
        "voxel_pooling",
        voxel_pooling,
        _draw_columns,
        _columns,
    ),
    Operator(
        "local_aggregate",
        local_aggregate,
        _draw_gaussians,
        _aggregated,
        _bounds_of_gaussians,
        of_size=(
            lambda n: Problem(_small_gaussians(n, n, 5), ("means3D", "opacities", "semantics", "cov3D")),
        ),
        launches=sizes.arguments(
            pts="N 3",
            points_int="N 3",
            means3D="M 3",
            means3D_int="M 3",
            opacities="M",
            semantics="M C",
            radii="M",
            cov3D="M 6",
            H=200,
            W=200,
            D=16,
        ),
    ),
    Operator(
        "local_aggregate_prob",
        local_aggregate_prob,
        _draw_gaussians,
        _expected,
        _bounds_of_gaussians,
    ),
    Operator(
        "local_aggregate_prob_sq",
        local_aggregate_prob_sq,
        _draw_superquadrics,
        _expected,
        _bounds_of_gaussians,
    ),
)


def test_a_grid_of_more_than_2_to_the_31_voxels(device):
    points = torch.tensor([[1.0, 1, 1], [9999, 9999, 999], [1, 1, 1.0]], device=device)
    voxels, places, counts = hard_voxelize(points, (1, 1, 1), (0, 0, 0, 10000, 10000, 1000))
    assert places.tolist() == [[1, 1, 1], [999, 9999, 9999]] and counts.tolist() == [2, 1]
    first, last = [0] * 4, [2**31 - 1] * 4
    coordinates = torch.tensor([last, first, last], dtype=torch.int32, device=device)
    features, voxels = dynamic_scatter(points, coordinates, "sum")
    assert voxels.tolist() == [first, last]
    assert features.tolist() == [[9999, 9999, 999], [2, 2, 2]]


@pytest.mark.parametrize("aggregate", [local_aggregate, local_aggregate_prob, local_aggregate_prob_sq])
@pytest.mark.parametrize("N, G, C", [(70, 40, 5), (5, 3, 41)])
def test_gradients_around_points(aggregate, N, G, C, device):
    """Groups of 32 points and Gaussians, and of 20 columns, are filled more than once, and in part."""
    is_superquadric = aggregate is local_aggregate_prob_sq
    given = _small_superquadrics(N, G, C) if is_superquadric else _small_gaussians(N, G, C)
    given = map_tensors(lambda one: one.to(device), given)
    names = [name for name in REAL if name in given]
    leaves = [given[name].requires_grad_() for name in names]

    def call(*leaves: Tensor) -> Any:
        return aggregate(**given | dict(zip(names, leaves, strict=True)))

    assert torch.autograd.gradcheck(call, leaves, fast_mode=True, nondet_tol=0)


REFUSED = [
    (
        lambda: dynamic_voxelize(torch.zeros(5, 3), (1, 1), EXTENT[:4]),
        r"voxel_size must be \[3\], got \[2\]",
    ),
]


def test_a_largest_feature_of_0_has_its_whole_gradient(device):
    features = torch.tensor([[0.0], [-1.0], [0.0], [0.0]], device=device, requires_grad=True)
    voxels = torch.tensor([[0], [0], [1], [1]], dtype=torch.int32, device=device)
    dynamic_scatter(features, voxels, "max")[0].sum().backward()
    assert features.grad.flatten().tolist() == [1.0, 0.0, 0.5, 0.5]
