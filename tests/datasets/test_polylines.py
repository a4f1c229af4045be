"""Map lines and outlines that touch the sides of the region, within which they are kept."""

import numpy as np
import pytest
from numpy.testing import assert_allclose

from visdet.structures.polylines import clip_line, clip_polygon

REGION = (30.0, 60.0)


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ([(-15, -15), (-15, 15), (-30, -30)], [[(-15, -15), (-15, 15)]]),  # along a side, and then away
        ([(0, 0), (15, 0), (20, 5), (15, 10), (0, 10)], [[(0, 0), (15, 0)], [(15, 10), (0, 10)]]),
        ([(-20, 0), (20, 0)], [[(-15, 0), (15, 0)]]),
        ([(14.8, 29.8), (20, 35)], []),  # less than half a metre is inside
    ],
)
def test_lines_that_touch_a_side_have_no_point_twice(line, parts):
    found = clip_line(np.array(line, dtype=float), REGION)
    assert [part.tolist() for part in found] == [
        [list(map(float, point)) for point in part] for part in parts
    ]


def test_an_outline_that_begins_on_a_side_has_no_point_twice():
    outline = clip_polygon(np.array([(15, 0), (25, 5), (0, 5), (0, -5)], dtype=float), REGION)
    assert_allclose(outline, [(15, 0), (15, 5), (0, 5), (0, -5), (15, 0)])
