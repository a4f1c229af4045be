"""Turned boxes: their corners, the smallest box around corners, and the ranges of their angles."""

import math

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from visdet.ops import box_iou_quadri, box_iou_rotated
from visdet.structures.rotated_boxes import ANGLE_VERSIONS, boxes_to_polygons, polygons_to_boxes, regularized

QUARTER = math.pi / 2


def drawn_boxes(number):
    rng = np.random.default_rng(0)
    parts = [
        rng.uniform(0, 2000, (number, 2)),
        rng.uniform(1, 300, (number, 2)),
        rng.uniform(-9, 9, (number, 1)),
    ]
    return torch.from_numpy(np.concatenate(parts, 1).astype(np.float32))


def test_corners_begin_at_the_top_left_and_turn_clockwise_on_the_screen():
    polygons = boxes_to_polygons(torch.tensor([[10, 20, 6, 2, 0], [10, 20, 6, 2, QUARTER]]))
    expected = [[[7, 19], [13, 19], [13, 21], [7, 21]], [[11, 17], [11, 23], [9, 23], [9, 17]]]
    assert_close(polygons, torch.tensor(expected, dtype=torch.float32), rtol=0, atol=1e-5)
    boxes = drawn_boxes(50)
    quadri = box_iou_quadri(boxes_to_polygons(boxes).flatten(1), boxes_to_polygons(boxes.flip(0)).flatten(1))
    assert_close(quadri, box_iou_rotated(boxes, boxes.flip(0)), rtol=0, atol=2e-4)


@pytest.mark.parametrize("version", ANGLE_VERSIONS)
def test_each_version_is_the_same_box_in_its_range(version):
    boxes = drawn_boxes(500)
    boxes[:9, 4] = torch.tensor(
        [0, -1e-9, 1e-9, QUARTER, -QUARTER, QUARTER / 2, -QUARTER / 2, 3 * QUARTER, -math.pi]
    )
    for found in (regularized(boxes, version), polygons_to_boxes(boxes_to_polygons(boxes), version)):
        least, period = ANGLE_VERSIONS[version]
        angle = found[:, 4]
        if version == "oc":
            assert ((angle > 0) & (angle <= torch.tensor(QUARTER))).all()
        else:
            assert ((angle >= torch.tensor(least)) & (angle < torch.tensor(least + period))).all()
            assert (found[:, 2] >= found[:, 3]).all()
        assert (box_iou_rotated(boxes, found, aligned=True) > 0.998).all()


def _axes(angles):
    return torch.stack([angles.cos(), angles.sin(), -angles.sin(), angles.cos()], 1).reshape(-1, 2, 2)


def test_the_box_around_a_polygon_is_the_smallest():
    polygons = torch.from_numpy(np.random.default_rng(1).uniform(0, 100, (300, 4, 2)).astype(np.float32))
    found = polygons_to_boxes(polygons)
    angles = torch.linspace(0, QUARTER, 2000)
    along = torch.einsum("nkc,dac->ndak", polygons, _axes(angles))
    smallest = (along.amax(3) - along.amin(3)).prod(2).amin(1)
    assert_close(found[:, 2] * found[:, 3], smallest, rtol=5e-3, atol=0.5)
    local = torch.einsum("nkc,nac->nka", polygons - found[:, None, :2], _axes(found[:, 4]))
    assert (local.abs() <= found[:, None, 2:4] / 2 + 0.01).all(), "all points are in the box"
    assert polygons_to_boxes(torch.zeros(0, 4, 2)).shape == (0, 5)
    assert polygons_to_boxes(torch.ones(1, 4, 2))[0, :4].tolist() == [1, 1, 0, 0]


def test_an_unknown_version_is_refused():
    with pytest.raises(ValueError, match=r"angle_version must be .*'le90'.*got 'le80'"):
        regularized(torch.zeros(1, 5), "le80")
