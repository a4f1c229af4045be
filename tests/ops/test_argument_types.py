"""Integers are refused by name where the result in their type would be cut."""

import pytest
import torch

from visdet.ops import (
    assign_score_withk,
    bev_pool_v2,
    dynamic_scatter,
    indice_conv,
    local_aggregate,
    masked_conv2d,
    roipoint_pool3d,
    three_interpolate,
    three_nn,
)


def ones(*shape):
    return torch.ones(shape)


def ints(*shape):
    return torch.zeros(shape, dtype=torch.int32)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (
            lambda: assign_score_withk(ones(1, 1, 1, 2), ints(1, 3, 2, 4), ints(1, 3, 2, 4), ints(1, 1, 1)),
            "assign_score_withk: point_features",
        ),
        (
            lambda: bev_pool_v2(ones(1, 1, 1, 1, 1), ints(1, 1, 1, 1, 2), ints(1), ints(1), ints(1), 1),
            "bev_pool_v2: feat",
        ),
        (lambda: dynamic_scatter(ints(2, 2), ints(2, 3), "mean"), "dynamic_scatter: feats"),
        (
            lambda: indice_conv(ints(2, 3), ones(1, 1, 3, 4), ints(1, 2, 2), ints(1), 2),
            "indice_conv: features",
        ),
        (
            lambda: local_aggregate(
                ones(1, 3),
                ints(1, 3),
                ones(1, 3),
                ints(1, 3),
                ones(1),
                ints(1, 2),
                ints(1),
                ones(1, 6),
                1,
                1,
                1,
            ),
            "local_aggregate: semantics",
        ),
        (
            lambda: roipoint_pool3d(ones(1, 2, 3), ints(1, 2, 2), ones(1, 1, 7)),
            "roipoint_pool3d: point_features",
        ),
        (
            lambda: three_interpolate(ints(1, 2, 4), ints(1, 2, 3), ones(1, 2, 3)),
            "three_interpolate: features",
        ),
        (
            lambda: masked_conv2d(ints(1, 1, 3, 3), ones(1, 3, 3), ones(1, 1, 1, 1), None),
            "masked_conv2d: features",
        ),
        (lambda: three_nn(ints(1, 2, 3), ones(1, 4, 3)), "three_nn: target"),
    ],
)
def test_integers_are_refused_by_name(call, named):
    with pytest.raises(
        ValueError, match=rf"{named} must be of a floating-point type on cpu, got torch.int32 on cpu"
    ):
        call()
