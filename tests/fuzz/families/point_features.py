"""Problems of the operators in plain torch for features of points: gathers, voxels, and sums over cells."""

import math
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.fuzz import sizes
from tests.fuzz.problem import Draw, Operator, Problem, rand, wide_of
from visdet.ops import (
    assign_score_withk,
    bev_pool,
    bev_pool_v2,
    dynamic_scatter,
    dynamic_voxelize,
    gather_points,
    group_points,
    hard_voxelize,
    stack_group_points,
    three_interpolate,
    voxel_pooling,
)

from .point_neighbours import draw_cloud, nothing

__all__ = ["OPERATORS", "linear_problem"]


def draw_features(draw: Draw, *shape: int) -> Tensor:
    return draw.place(draw.with_bad_numbers(draw.numbers(*shape)), draw.dtype())


def draw_index(draw: Draw, low: int, high: int, *shape: int) -> Tensor:
    kind = draw.pick(torch.int32, torch.int64)
    return draw.place(draw.whole(low, max(high, low + 1), *shape), kind, can_expand=False)


def linear_problem(features: str, arguments: dict[str, Any], *others: str) -> Problem:
    return Problem(
        arguments,
        differentiable=(features, *others),
        wide=wide_of(arguments[features].dtype),
        error_factor=2000.0,
    )


def _draw_groups(draw: Draw) -> Problem:
    B, C, N = draw.size(3), draw.size(5), draw.size(30)
    M, K = (draw.size(12), draw.size(6)) if N else (0, draw.size(6))
    given = {"features": draw_features(draw, B, C, N), "indices": draw_index(draw, 0, N, B, M, K)}
    return linear_problem("features", given)


def _groups(features: Tensor, indices: Tensor) -> Tensor:
    image = torch.arange(len(features), device=features.device)[:, None, None]
    return features.transpose(1, 2)[image, indices.long()].permute(0, 3, 1, 2)


def _draw_gathers(draw: Draw) -> Problem:
    problem = _draw_groups(draw)
    K = problem.arguments["indices"].shape[2]
    problem.arguments["indices"] = problem.arguments["indices"][..., 0] if K else draw_index(draw, 0, 1, 0, 0)
    problem.arguments["features"] = problem.arguments["features"][: len(problem.arguments["indices"])]
    return problem


def _groups_of_size(n: int) -> Problem:
    index = torch.arange(2 * n * 3).reshape(2, n, 3) % 5
    return Problem({"features": rand(2, 3, 5), "indices": index.int()}, ("features",))


def _interpolation_of_size(n: int) -> Problem:
    arguments = _groups_of_size(n).arguments | {"weight": rand(2, n, 3)}
    return Problem(arguments, ("features", "weight"))


@st.composite
def _launches_of_groups(draw: st.DrawFn, name: str) -> dict[str, Any]:
    B, C, N, M = draw(sizes.small), draw(sizes.channels), draw(sizes.count), draw(sizes.count)
    K = 3 if name == "three_interpolate" else draw(sizes.channels)
    dtype, index_dtype = draw(sizes.value_types), draw(st.sampled_from([torch.int32, torch.int64]))
    indices = sizes.empty(B, M, *([] if name == "gather_points" else [K]), dtype=index_dtype)
    given = {"features": sizes.empty(B, C, N, dtype=dtype), "indices": indices}
    return given | ({"weight": sizes.empty(B, M, K, dtype=dtype)} if name == "three_interpolate" else {})


def _draw_interpolation(draw: Draw) -> Problem:
    B, C, M = draw.size(3), draw.size(5), draw.size(30, 0)
    N = draw.size(12)
    features = draw_features(draw, B, C, M)
    weight = draw.place(draw.with_bad_numbers(draw.numbers(B, N, 3)), features.dtype)
    given = {"features": features, "indices": draw_index(draw, 0, M, B, N, 3), "weight": weight}
    return linear_problem("features", given, "weight")


def _interpolated(features: Tensor, indices: Tensor, weight: Tensor) -> Tensor:
    return (_groups(features, indices) * weight[:, None]).sum(3)


def _draw_stacked_groups(draw: Draw) -> Problem:
    clouds, C, K = draw.size(4), draw.size(5), draw.size(6)
    counts, groups = ([draw.size(12, 0.1) for _ in range(clouds)] for _ in range(2))
    given = {
        "features": draw_features(draw, sum(counts), C),
        "features_batch_cnt": torch.tensor(counts, dtype=torch.int32).to(draw.device),
        "indices": draw_index(draw, -2, 14, sum(groups), K),
        "indices_batch_cnt": torch.tensor(groups, dtype=torch.int32).to(draw.device),
    }
    return linear_problem("features", given)


def _stacked_groups(
    features: Tensor, features_batch_cnt: Tensor, indices: Tensor, indices_batch_cnt: Tensor
) -> Tensor:
    parts = [features.new_zeros(0, features.shape[1], indices.shape[1]) + features.sum() * 0]
    for cloud, index in zip(
        features.split(features_batch_cnt.tolist()), indices.split(indices_batch_cnt.tolist()), strict=True
    ):
        is_inside = (index >= 0) & (index < len(cloud))
        padded = torch.cat([cloud, cloud.new_zeros(1, cloud.shape[1])])
        parts.append(padded[torch.where(is_inside, index.long(), len(cloud))].transpose(1, 2))
    return torch.cat(parts)


def _draw_scores(draw: Draw) -> Problem:
    B, N, M, C, P, K = (draw.size(limit) for limit in (3, 20, 4, 5, 12, 6))
    features = draw_features(draw, B, N, M, C)
    given = {
        "scores": draw_features(draw, B, P, K, M),
        "point_features": features,
        "center_features": draw.place(draw.with_bad_numbers(draw.numbers(B, N, M, C)), features.dtype),
        "knn_idx": draw_index(draw, *draw.pick((0, N), (-1, N + 1)), B, P, K),
    }
    return linear_problem("point_features", given, "scores", "center_features")


def _assigned(scores: Tensor, point_features: Tensor, center_features: Tensor, knn_idx: Tensor) -> Tensor:
    """Return the sums for centers of the other sign, whose magnitudes are a bound."""
    B, N = point_features.shape[:2]
    cloud = torch.arange(B, device=knn_idx.device)[:, None, None]
    center = knn_idx[..., :1].expand(knn_idx.shape)
    is_inside = (knn_idx >= 0) & (knn_idx < N) & (center >= 0) & (center < N)

    def rows(features: Tensor, index: Tensor) -> Tensor:  # The row N is 0.
        padded = torch.cat([features, features.new_zeros(B, 1, *features.shape[2:])], 1)
        return padded[cloud, torch.where(is_inside, index.long(), N)]

    summed = rows(point_features, knn_idx) + rows(center_features, center)
    scores = torch.where(is_inside[..., None], scores, 0)
    return torch.einsum("bpkm,bpkmc->bcpk", scores, summed)


SIZE, RANGE = (0.5, 0.25, 1.0), (-2.0, -1.0, -2.0, 2.0, 1.0, 2.0)


def _draw_voxels(draw: Draw) -> Problem:
    points = draw.place(draw_cloud(draw, draw.size(200), draw.pick(3, 4)), draw.dtype())
    return Problem({"points": points, "voxel_size": SIZE, "coors_range": RANGE})


@st.composite
def _launches_of_voxels(draw: st.DrawFn) -> dict[str, Any]:
    points = sizes.empty(draw(sizes.count), draw(st.integers(3, 5)), dtype=draw(sizes.value_types))
    return {"points": points, "voxel_size": SIZE, "coors_range": RANGE}


def _same_voxels(problem: Problem, got: tuple[Tensor], expected: Any) -> str:
    """Compare with a loop. Rounding may move a point that is next to a border of voxels."""
    for point, voxel in zip(problem.arguments["points"].tolist(), got[0].tolist(), strict=True):
        place = [(p - low) / size for p, low, size in zip(point, RANGE, SIZE, strict=False)]
        if any(math.isfinite(p) and 0 < abs(p - round(p)) < 1e-5 * (1 + abs(p)) for p in place):
            continue
        ends = [(RANGE[3 + i] - RANGE[i]) / SIZE[i] for i in range(3)]
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
        given["points"], dynamic_voxelize(given["points"], SIZE, RANGE).tolist(), strict=True
    ):
        if voxel[0] >= 0 and (tuple(voxel) in members or len(members) != given["max_voxels"]):
            members.setdefault(tuple(voxel), []).append(point)
    if got[1].tolist() != [list(voxel) for voxel in members]:
        return f"voxels {got[1].tolist()}, expected {list(members)}"
    if got[2].tolist() != [min(len(rows), given["max_points"]) for rows in members.values()]:
        return f"counts {got[2].tolist()}"
    for voxel, rows in zip(got[0], members.values(), strict=True):
        wanted = torch.zeros_like(voxel)
        kept = rows[: given["max_points"]]
        wanted[: len(kept)] = torch.stack(kept)
        if not torch.equal(voxel.nan_to_num(7), wanted.nan_to_num(7)):
            return f"points {voxel.tolist()}, expected {wanted.tolist()}"
    return ""


def _draw_scatter(draw: Draw) -> Problem:
    N = draw.size(60)
    given = {
        "feats": draw_features(draw, N, draw.size(5)),
        "coors": draw_index(draw, -1, 4, N, 3),
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
    given = {"feats": draw_features(draw, N, draw.size(5)), "coords": draw_index(draw, -1, 5, N, 4), **sizes}
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
    N, features = draw.size(60), draw_features(draw, B, V, H, W, draw.size(5))
    given = {
        "depth": draw.place(draw.with_bad_numbers(draw.uniform(0, 1, B, V, D, H, W)), features.dtype),
        "feat": features,
        "ranks_depth": draw_index(draw, 0, B * V * D * H * W, N),
        "ranks_feat": draw_index(draw, 0, B * V * H * W, N),
        "ranks_bev": draw_index(draw, 0, cells, N),
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
        "geom_xyz": draw_index(draw, -1, 5, B, N, 3),
        "input_features": draw_features(draw, B, N, draw.size(5)),
        "voxel_num": sizes,
    }
    return linear_problem("input_features", given)


def _columns(geom_xyz: Tensor, input_features: Tensor, voxel_num: list[int]) -> Tensor:
    B, N = input_features.shape[:2]
    image = torch.arange(B, device=geom_xyz.device).repeat_interleave(N)
    places = torch.cat([geom_xyz.flatten(0, 1).long(), image[:, None]], 1)[:, [1, 0, 2, 3]]
    W, H, D = voxel_num
    return _cells(input_features.flatten(0, 1), places, B, D, H, W).sum(1)


OPERATORS = (
    Operator(
        "group_points",
        group_points,
        _draw_groups,
        _groups,
        spoiled={"features": ("rank",), "indices": ("rank", 0)},
        aliases=("gather_points",),
        of_size=(_groups_of_size,),
        launches=lambda: _launches_of_groups("group_points"),
    ),
    Operator(
        "gather_points",
        gather_points,
        _draw_gathers,
        lambda features, indices: _groups(features, indices[..., None]).squeeze(3),
        spoiled={"features": ("rank",), "indices": ("rank", 0)},
        launches=lambda: _launches_of_groups("gather_points"),
    ),
    Operator(
        "stack_group_points",
        stack_group_points,
        _draw_stacked_groups,
        _stacked_groups,
        spoiled={"features": ("rank", 0), "indices": ("rank", 0)},
    ),
    Operator(
        "three_interpolate",
        three_interpolate,
        _draw_interpolation,
        _interpolated,
        spoiled={
            "features": ("rank", "type"),
            "indices": ("rank", 0, 1, 2),
            "weight": ("rank", "type", 1, 2),
        },
        aliases=("gather_points",),
        of_size=(_interpolation_of_size,),
        launches=lambda: _launches_of_groups("three_interpolate"),
    ),
    Operator(
        "assign_score_withk",
        lambda center_features, **given: assign_score_withk(center_features=-center_features, **given),
        _draw_scores,
        _assigned,
        spoiled={
            "scores": ("rank", "type", 0, 3),
            "point_features": ("rank", "type", 0, 1, 2, 3),
            "center_features": ("rank", 0, 1, 2, 3),
            "knn_idx": ("rank", 0, 1, 2),
        },
    ),
    Operator(
        "dynamic_voxelize",
        dynamic_voxelize,
        _draw_voxels,
        nothing,
        compare=_same_voxels,
        spoiled={"points": ("rank",)},
        of_size=(lambda n: Problem({"points": rand(n, 4), "voxel_size": SIZE, "coors_range": RANGE}),),
        launches=_launches_of_voxels,
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
        spoiled={"feats": ("rank", 0), "coors": ("rank", 0)},
    ),
    Operator(
        "bev_pool",
        bev_pool,
        _draw_cells,
        _cells,
        spoiled={"feats": ("rank", 0), "coords": ("rank", 0, 1)},
    ),
    Operator(
        "bev_pool_v2",
        bev_pool_v2,
        _draw_ranks,
        _ranked,
        spoiled={"feat": ("type",), "depth": ("type",), "ranks_feat": ("rank", 0), "ranks_bev": ("rank", 0)},
    ),
    Operator(
        "voxel_pooling",
        voxel_pooling,
        _draw_columns,
        _columns,
        spoiled={"geom_xyz": ("rank", 0, 1, 2), "input_features": ("rank", 0, 1)},
    ),
)
