"""The functions of mmcv._ext for rotated boxes: they write into given tensors, as mmcv's wrappers expect."""

import math

import pytest
import torch
from entries import device  # noqa: F401
from torch.testing import assert_close

from visdet import ops
from visdet.compat import mmcv_ext
from visdet.compat._served import SERVED
from visdet.ops.box_iou_rotated import corners_of

pytestmark = pytest.mark.usefixtures("device")


def uniform(*shape, seed=0, scale=1.0):
    generator = torch.Generator("cpu").manual_seed(seed)
    values = torch.rand(*shape, generator=generator, dtype=torch.float64, device="cpu") * scale
    return values.to(torch.get_default_device())


def test_boxes_of_all_pixels_may_stand_in_one_row():
    features, boxes = uniform(2, 3, 4, 5), uniform(2, 4, 5, 5, scale=9)
    output = torch.zeros_like(features)
    mmcv_ext.rotated_feature_align_forward(features, boxes.view(40, 5), output, spatial_scale=0.5, points=1)
    assert_close(output, ops.rotated_feature_align(features, boxes, 0.5, 1))


def test_point_sets():
    points, polygons = uniform(3, 18, scale=9), torch.tensor([[0, 0, 5, 0, 5, 5, 0, 5.0]] * 3).double()
    giou, gradient = ops.convex_giou(points, polygons)
    output, ious, boxes, inside = torch.zeros(3, 19), torch.zeros(3, 3), torch.zeros(3, 8), torch.zeros(3, 3)
    mmcv_ext.convex_giou(points, polygons, output)
    mmcv_ext.convex_iou(points, polygons, ious)
    mmcv_ext.min_area_polygons(points, boxes)
    mmcv_ext.points_in_polygons_forward(points[:, :2], polygons, inside)
    assert_close(output.double(), torch.cat([gradient, giou[:, None]], 1), rtol=1e-5, atol=1e-6)
    assert_close(ious, ops.convex_iou(points, polygons).float())
    assert_close(boxes, ops.min_area_polygons(points).float())
    assert torch.equal(inside, ops.points_in_polygons(points[:, :2], polygons))


def test_chamfer_distance():
    one, other = uniform(2, 4, 2).requires_grad_(), uniform(2, 5, 2, seed=1).requires_grad_()
    expected = ops.chamfer_distance(one, other)
    grads = uniform(2, 4, seed=2), uniform(2, 5, seed=3)
    wanted = list(torch.autograd.grad(expected[:2], (one, other), grads))
    outputs = [torch.zeros_like(t) for t in expected]
    points = one.detach(), other.detach()
    mmcv_ext.chamfer_distance_forward(*points, *outputs)
    found = [torch.zeros_like(t) for t in points]
    mmcv_ext.chamfer_distance_backward(*points, *outputs[2:], *grads, *found)
    assert_close(outputs, [t.detach() for t in expected])
    assert_close(found, wanted)
    found = [torch.zeros_like(t) for t in points]
    SERVED["chamfer_2d.chamfer_2d"]["backward"](*points, *found, *grads, *outputs[2:])
    assert_close(found, wanted)


def test_vertices_are_sorted():
    square = torch.tensor([[1.0, 1], [-1, -1], [-1, 1], [1, -1]])
    vertices, mask = torch.zeros(1, 1, 24, 2), torch.zeros(1, 1, 24, dtype=torch.bool)
    vertices[0, 0, :4], mask[0, 0, :4] = square, True
    found = mmcv_ext.diff_iou_rotated_sort_vertices_forward(vertices, mask, mask.sum(2).int())
    assert found.dtype == torch.int32 and found.tolist() == [[[0, 2, 1, 3, 0, 8, 8, 8, 8]]]


def test_suppression_has_mmcvs_arguments_and_ignores_labels():
    boxes = torch.tensor([[5.0, 5, 4, 2, 0.1, 0], [5, 5, 4, 2, 0.2, 1], [50, 5, 4, 2, 0, 1]])
    scores = torch.tensor([0.5, 0.6, 0.4])
    order = scores.argsort(descending=True)
    kept = mmcv_ext.nms_rotated(boxes, scores, order, boxes[order], boxes[:, 5], 0.3, True)
    assert kept.tolist() == [1, 2]
    quads = torch.tensor(
        [[0.0, 0, 2, 0, 2, 2, 0, 2, 0], [0, 0, 2, 0, 2, 2, 0, 2, 1], [9, 9, 10, 9, 10, 10, 9, 10, 0]]
    )
    assert mmcv_ext.nms_quadri(quads, scores, order, quads[order], 0.3, True).tolist() == [1, 2]


def test_overlaps_and_suppression():
    boxes = (uniform(40, 5) * torch.tensor([6, 6, 4, 2, 2 * math.pi])).float()
    quads, overlap = corners_of(boxes).flatten(1), torch.zeros(40, 40)
    for name, given in (("box_iou_rotated", boxes), ("box_iou_quadri", quads)):
        getattr(mmcv_ext, name)(given, given, overlap.view(-1), mode_flag=1, aligned=False)
        assert torch.equal(overlap, getattr(ops, name)(given, given, "iof"))
    boxes = boxes[:, [0, 1, 0, 2, 3, 0, 4]]
    mmcv_ext.iou3d_boxes_overlap_bev_forward(boxes, boxes, overlap)
    assert torch.equal(overlap, ops.boxes_overlap_bev(boxes, boxes))
    for name in ("nms3d", "nms3d_normal"):
        keep, count = torch.zeros(40).long(), torch.zeros(()).long()
        getattr(mmcv_ext, f"iou3d_{name}_forward")(boxes, keep, count, nms_overlap_thresh=0.2)
        kept = getattr(ops, name)(boxes, torch.zeros(40), 0.2)
        assert torch.equal(keep[:count], kept) and 3 < count < 40


@pytest.mark.parametrize(
    ("name", "columns", "rest", "message"),
    [
        ("box_iou_rotated", 5, (0, False), r"ious must be \[9\], got \[3\]"),
        ("box_iou_quadri", 8, (2, True), "mode_flag must be one of .* got 2"),
    ],
)
def test_other_overlaps_are_refused(name, columns, rest, message):
    boxes = torch.zeros(3, columns)
    with pytest.raises(ValueError, match=f"{name}: {message}"):
        getattr(mmcv_ext, name)(boxes, boxes, torch.zeros(3), *rest)


def test_a_list_of_what_is_kept_has_room_for_all_boxes():
    keep = torch.zeros(3).long()
    with pytest.raises(ValueError, match=r"mmcv\._ext\.iou3d_nms3d_forward: keep must be"):
        mmcv_ext.iou3d_nms3d_forward(torch.zeros(3, 7), keep[:2], keep[:1], 0.2)
