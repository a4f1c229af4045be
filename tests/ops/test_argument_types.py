"""Types in which a result would be cut, or lose a part, are refused by name."""

import pytest
import torch

from tests.fuzz.operators import OPERATORS
from tests.fuzz.problem import Draw
from visdet.ops import (
    assign_score_withk,
    bbox_overlaps,
    bev_pool_v2,
    box_iou_rotated,
    boxes_iou3d,
    carafe,
    convex_iou,
    corner_pool,
    deform_conv2d,
    dynamic_scatter,
    dynamic_voxelize,
    furthest_point_sample,
    gather_points,
    gaussian_field,
    group_points,
    indice_conv,
    knn,
    local_aggregate,
    masked_conv2d,
    ms_deform_attn,
    nms,
    nms3d,
    nms_match,
    roi_align,
    roipoint_pool3d,
    sigmoid_focal_loss,
    stack_group_points,
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


@pytest.mark.parametrize("wrong", [None, 1.0, [1.0], "x"], ids=lambda value: type(value).__name__)
def test_what_is_no_tensor_is_refused_by_name(wrong):
    image, boxes = ones(1, 4, 5, 5), ones(2, 4)
    for call, name in (
        (lambda: bbox_overlaps(boxes, wrong), "bbox_overlaps: bboxes2"),
        (lambda: box_iou_rotated(wrong, ones(2, 5)), "box_iou_rotated: bboxes1"),
        (lambda: roi_align(image, wrong, (2, 2)), "roi_align: rois"),
        (lambda: carafe(image, wrong, 3, 1, 2), "carafe: masks"),
        (lambda: convex_iou(wrong, ones(2, 8)), "convex_iou: pointsets"),
        (lambda: corner_pool(wrong, "top"), "corner_pool: x"),
        (lambda: deform_conv2d(image, wrong, ones(4, 4, 3, 3), 1, 1), "deform_conv2d: offset"),
        (lambda: sigmoid_focal_loss(ones(2, 3), wrong), "sigmoid_focal_loss: target"),
        (lambda: furthest_point_sample(wrong, 2), "furthest_point_sample: points_xyz"),
        (lambda: gaussian_field(wrong, ones(1, 3), ones(1, 3, 3), ones(1)), "gaussian_field: points"),
        (lambda: ms_deform_attn(wrong, [(1, 1)], None, image, image), "ms_deform_attn: value"),
        (lambda: knn(1, ones(1, 2, 3), ones(1, 2, 3) if wrong is None else wrong), "knn: center_xyz"),
        (lambda: dynamic_voxelize(wrong, [1, 1, 1], [0, 0, 0, 8, 8, 8]), "dynamic_voxelize: points"),
    ):
        if name.startswith("knn") and wrong is None:
            continue  # Without centers, the points themselves are meant.
        with pytest.raises(TypeError, match=f"{name} must be a tensor, got {type(wrong).__name__}"):
            call()


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.bool])
def test_indices_must_be_integers(dtype):
    """A conversion would take another point than the one that is meant."""
    features = ones(1, 2, 4)
    one = torch.tensor([1], dtype=torch.int64)
    for call, name in (
        (lambda: group_points(features, ones(1, 2, 3).to(dtype)), "group_points: indices"),
        (lambda: gather_points(features, ones(1, 2).to(dtype)), "gather_points: indices"),
        (lambda: three_interpolate(features, ones(1, 2, 3).to(dtype), ones(1, 2, 3)), "indices"),
        (lambda: stack_group_points(ones(1, 2), one, ones(1, 2).to(dtype), one), "indices"),
        (lambda: stack_group_points(ones(1, 2), one.to(dtype), one[None], one), "features_batch_cnt"),
        (lambda: dynamic_scatter(ones(2, 3), ones(2, 3).to(dtype), "max"), "dynamic_scatter: coors"),
    ):
        with pytest.raises(ValueError, match=f"{name} must hold integers, got {dtype}"):
            call()


def test_gathered_integers_and_complex_numbers_are_exact():
    large = torch.tensor([[[2**24 + 1, 3]]])
    assert gather_points(large, torch.tensor([[0]])).item() == 2**24 + 1
    assert gather_points(torch.tensor([[[1 + 2j]]]), torch.tensor([[0]])).item() == 1 + 2j
