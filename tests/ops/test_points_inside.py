"""The kernels of points in boxes, in polygons and in voxels, and of nearest points, against their definitions to the
bit."""

from functools import partial

import pytest
import torch

from tests.fuzz.problem import WIDE_TYPES, generator_of
from visdet.ops import _library
from visdet.ops.mmcv.point_sets import nearest_points_reference, points_in_polygons_reference
from visdet.ops.mmcv.points_in_boxes import points_in_boxes_all_reference, points_in_boxes_part_reference
from visdet.ops.mmcv.voxels import dynamic_voxelize_reference

REFERENCES = {
    "points_in_boxes_part": points_in_boxes_part_reference,
    "points_in_boxes_all": points_in_boxes_all_reference,
    "points_in_polygons": points_in_polygons_reference,
    "dynamic_voxelize": dynamic_voxelize_reference,
    "nearest_points": nearest_points_reference,
}
SHAPES = {
    "points_in_boxes_part": ((2, 300, 3), (2, 9, 7)),
    "points_in_boxes_all": ((2, 300, 3), (2, 9, 7)),
    "points_in_polygons": ((400, 2), (17, 8)),
    "dynamic_voxelize": ((500, 3), (3,), (6,)),
    "nearest_points": ((2, 300, 2), (2, 30, 2)),
}


def numbers(generator, kind, dtype, device, *shape):
    """Return numbers of any kind: on a grid, so that borders are hit, or any; with bad ones; of other strides."""
    drawn = torch.randn(*shape, generator=generator, dtype=torch.float64) * 2
    if kind % 2:
        drawn = (drawn * 2).round() / 2
    if kind % 3 == 2:
        bad = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30, -0.0, 1e-42], dtype=torch.float64)
        chosen = bad[torch.randint(0, 6, shape, generator=generator)]
        drawn = torch.where(torch.rand(shape, generator=generator) < 0.03, chosen, drawn)
    drawn = drawn.to(device, dtype)
    return drawn.mT.contiguous().mT if kind % 5 == 4 and drawn.dim() > 1 else drawn


@pytest.mark.parametrize("dtype", WIDE_TYPES, ids=str)
@pytest.mark.parametrize("name", list(REFERENCES))
def test_kernels_are_the_definitions_to_the_bit(name, dtype, device):
    if not _library.is_loaded(device):
        pytest.skip("the library is not built")
    for kind in range(30):
        generator = generator_of(kind)
        given = [numbers(generator, kind, dtype, device, *shape) for shape in SHAPES[name]]
        if name == "dynamic_voxelize":
            given[1], given[2] = given[1].abs() / 4 + 0.1, given[2].sort().values
        elif name.startswith("points_in_boxes") and kind % 4 == 3:
            given[1][..., 6] = 0  # sides along the axes
        got = getattr(torch.ops.visdet, name)(*given)
        expected = REFERENCES[name](*given)
        assert got.dtype == expected.dtype and torch.equal(got, expected), kind


REFUSED = [
    (partial(call, torch.ops.visdet, torch.zeros(2, 4, 3)), message)
    for call, message in [
        (lambda op, x: op.points_in_boxes_part(x[0], x), r"points_in_boxes_part: points must be \[B, N, 3\]"),
        (lambda op, x: op.points_in_boxes_all(x, x), r"points_in_boxes_all: boxes must be \[2, M, 7\]"),
        (
            lambda op, x: op.points_in_polygons(x[0, :, :2], x[0]),
            r"points_in_polygons: polygons must be \[M, 8\]",
        ),
        (
            lambda op, x: op.dynamic_voxelize(x[0], x[0, 0], x[0, 0]),
            r"dynamic_voxelize: coors_range must be \[6\]",
        ),
    ]
]
