"""The kernels of features of chosen points against their definition, forward and backward, and their refusals."""

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.fuzz import sizes
from tests.fuzz.problem import Draw, Operator, Problem, linear_problem, rand
from visdet.ops import (
    _library,
    assign_score_withk,
    gather_points,
    group_points,
    stack_group_points,
    three_interpolate,
)


def _draw_groups(draw: Draw) -> Problem:
    B, C, N = draw.size(3), draw.size(5), draw.size(30)
    M, K = (draw.size(12), draw.size(6)) if N else (0, draw.size(6))
    given = {"features": draw.values(B, C, N), "indices": draw.index(0, N, B, M, K)}
    return linear_problem("features", given)


def _groups(features: Tensor, indices: Tensor) -> Tensor:
    image = torch.arange(len(features), device=features.device)[:, None, None]
    return features.transpose(1, 2)[image, indices.long()].permute(0, 3, 1, 2)


def _draw_gathers(draw: Draw) -> Problem:
    problem = _draw_groups(draw)
    given = problem.arguments
    indices = given["indices"]
    given["indices"] = indices = indices[..., 0] if indices.shape[2] else draw.index(0, 1, 0, 0)
    given["features"] = given["features"][: len(indices)]
    return problem


def _groups_of_size(n: int) -> Problem:
    index = torch.arange(2 * n * 3).reshape(2, n, 3) % 5
    return Problem({"features": rand(2, 3, 5), "indices": index.int()}, ("features",))


def _interpolation_of_size(n: int) -> Problem:
    arguments = _groups_of_size(n).arguments | {"weight": rand(2, n, 3)}
    return Problem(arguments, ("features", "weight"))


def _draw_interpolation(draw: Draw) -> Problem:
    B, C, M = draw.size(3), draw.size(5), draw.size(30, 0)
    N = draw.size(12)
    features = draw.values(B, C, M)
    weight = draw.values(B, N, 3, dtype=features.dtype)
    given = {"features": features, "indices": draw.index(0, M, B, N, 3), "weight": weight}
    return linear_problem("features", given, "weight")


def _interpolated(features: Tensor, indices: Tensor, weight: Tensor) -> Tensor:
    return (_groups(features, indices) * weight[:, None]).sum(3)


def _draw_stacked_groups(draw: Draw) -> Problem:
    clouds, C, K = draw.size(4), draw.size(5), draw.size(6)
    counts, groups = ([draw.size(12, 0.1) for _ in range(clouds)] for _ in range(2))
    given = {
        "features": draw.values(sum(counts), C),
        "features_batch_cnt": torch.tensor(counts, dtype=torch.int32).to(draw.device),
        "indices": draw.index(-2, 14, sum(groups), K),
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
    features = draw.values(B, N, M, C)
    given = {
        "scores": draw.values(B, P, K, M),
        "point_features": features,
        "center_features": draw.values(B, N, M, C, dtype=features.dtype),
        "knn_idx": draw.index(*draw.pick((0, N), (-1, N + 1)), B, P, K),
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


OPERATORS = (
    Operator(
        "group_points",
        group_points,
        _draw_groups,
        _groups,
        aliases=("gather_points",),
        of_size=(_groups_of_size,),
        launches=sizes.arguments(features="B C N", indices=st.sampled_from(["B M K int32", "B M K int64"])),
    ),
    Operator(
        "gather_points",
        gather_points,
        _draw_gathers,
        lambda features, indices: _groups(features, indices[..., None]).squeeze(3),
        launches=sizes.arguments(features="B C N", indices="B M int32"),
    ),
    Operator(
        "stack_group_points",
        stack_group_points,
        _draw_stacked_groups,
        _stacked_groups,
        spoiled={"features": (0,), "indices": (0,)},
    ),
    Operator(
        "three_interpolate",
        three_interpolate,
        _draw_interpolation,
        _interpolated,
        aliases=("gather_points",),
        of_size=(_interpolation_of_size,),
        launches=sizes.arguments(features="B C N", indices="B M 3 int64", weight="B M 3"),
    ),
    Operator(
        "assign_score_withk",
        lambda center_features, **given: assign_score_withk(center_features=center_features * -1, **given),
        _draw_scores,
        _assigned,
    ),
)


@pytest.mark.parametrize("call", [group_points, gather_points, three_interpolate])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("bad", [-1, 9, 2**31 - 1])
def test_an_index_of_no_point_is_an_error(call, dtype, bad):
    index = torch.zeros(2, 5, 3, dtype=dtype)
    index[1, 4, 2] = bad
    index = index[..., 2] if call is gather_points else index
    weight = (torch.rand(2, 5, 3),) if call is three_interpolate else ()
    with pytest.raises(RuntimeError, match=f"{call.__name__}: indices must be in 0..8, got {bad}"):
        call(torch.rand(2, 4, 9), index, *weight)


F, I, W = torch.zeros(2, 4, 9), torch.zeros(2, 5, 1, dtype=torch.int32), torch.zeros(0)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((F.half(), I, W), "features must be float64 or float32, got Half"),
        ((F[:1], I, W), r"features must be \[B, C, N\] = \[2, C, N\], got \[1, 4, 9\]"),
        ((F, I[0], W), r"indices must be \[B, M, K\], got \[5, 1\]"),
        ((F, I.float(), W), "indices must be int32 or int64, got Float"),
        ((F, I.expand(2, 5, 2), W), r"indices must be \[B, M, 1\] or \[B, M, 3\], got \[2, 5, 2\]"),
        ((F, I, torch.zeros(2, 5, 1)), r"weight must be \[0\], got \[2, 5, 1\]"),
        ((F, I.expand(2, 5, 3), W), r"weight must be \[B, M, 3\] = \[2, 5, 3\], got \[0\]"),
        ((F, I.expand(2, 5, 3), torch.zeros(2, 5, 3).double()), "weight must be Float, the type of features"),
    ],
)
def test_messages(arguments, message):
    _library.require("cpu")
    with pytest.raises(RuntimeError, match=f"gather_points: {message}"):
        torch.ops.visdet.gather_points(*arguments, False)
    with pytest.raises(RuntimeError, match=f"gather_points_backward: {message}"):
        torch.ops.visdet.gather_points_backward(F, *arguments, False, True, True)
