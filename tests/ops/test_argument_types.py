"""Types in which a result would be cut, or lose a part, are refused by name."""

import pytest
import torch

from tests.fuzz.operators import OPERATORS
from tests.fuzz.problem import Draw
from visdet.ops import (
    assign_score_withk,
    bev_pool_v2,
    box_iou_rotated,
    boxes_iou3d,
    corner_pool,
    dynamic_scatter,
    indice_conv,
    local_aggregate,
    masked_conv2d,
    nms,
    nms3d,
    nms_match,
    roi_align,
    roipoint_pool3d,
    three_interpolate,
    three_nn,
)
from visdet.ops.mmcv.aligned_pooling import bezier_align, border_align, prroi_pool


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


TAKES_COMPLEX = (
    "psa_mask",
    "tin_shift",
    "group_points",
    "gather_points",
    "stack_group_points",
    "autocast_linear",
    "linear_sum_assignment",
)


@pytest.mark.parametrize(
    "operator",
    [operator for name, operator in OPERATORS.items() if name not in TAKES_COMPLEX],
    ids=lambda operator: operator.name,
)
def test_complex_numbers_are_refused_by_name(operator):
    """A conversion to real numbers would leave the imaginary part out."""
    problems = (operator.draw(Draw(operator.name, seed, "cpu")) for seed in range(20))
    problem = next(p for p in problems if not p.must_refuse and not p.may_refuse)
    names = [
        name
        for name, value in problem.arguments.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel()
    ]
    for name in names:
        spoiled = problem.arguments | {name: problem.arguments[name].detach().to(torch.complex64)}
        with pytest.raises(
            (ValueError, RuntimeError, TypeError), match="|".join((operator.name, *operator.aliases))
        ):
            operator.call(**spoiled)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.bool])
def test_regions_and_boxes_must_be_real_numbers(dtype):
    image = torch.ones(1, 4, 5, 5)
    for call, name in (
        (lambda: bezier_align(image, torch.ones(1, 17, dtype=dtype), (2, 2)), "bezier_align: beziers"),
        (lambda: prroi_pool(image, torch.ones(1, 5, dtype=dtype), (2, 2)), "prroi_pool: rois"),
        (lambda: border_align(image, torch.ones(1, 1, 4, dtype=dtype), 2), "border_align: boxes"),
        (lambda: roi_align(image, torch.ones(1, 5, dtype=dtype), 2), "roi_align: rois"),
        (lambda: nms(torch.ones(1, 4, dtype=dtype), torch.ones(1), 0.5), "nms: boxes"),
        (lambda: nms(torch.ones(1, 4), torch.ones(1, dtype=dtype), 0.5), "nms: scores"),
        (lambda: nms_match(torch.ones(1, 5, dtype=dtype), 0.5), "nms_match: dets"),
        (lambda: nms3d(torch.ones(1, 7, dtype=dtype), torch.ones(1), 0.5), "nms3d: boxes"),
        (lambda: boxes_iou3d(torch.ones(1, 7), torch.ones(1, 7, dtype=dtype)), "boxes_iou3d: boxes_b"),
        (
            lambda: box_iou_rotated(torch.ones(1, 5), torch.ones(1, 5, dtype=dtype)),
            "box_iou_rotated: bboxes2",
        ),
        (lambda: corner_pool(image.to(dtype), "top"), "corner_pool: x"),
    ):
        with pytest.raises(ValueError, match=f"{name} must hold real numbers, got {dtype}"):
            call()
