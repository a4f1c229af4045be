"""What the report of a COCO file counts as a box that stands twice."""

import pytest
from coco_files import annotation

from visdet.datasets.coco_report import coco_report

FIRST = annotation(1, 1, [40, 30, 20, 20])


@pytest.mark.parametrize(
    ("second", "is_same"),
    [
        (annotation(2, 1, [40, 30, 20, 20]), True),
        (annotation(2, 1, [40.0000001, 30.0, 20, 19.9999999]), True),
        (annotation(2, 1, [40, 30, 20, 20], iscrowd=1, area=3), True),
        (annotation(2, 1, [40, 30, 20, 20.5]), False),
        (annotation(2, 1, [40, 30, 20, 20], category_id=20), False),
        (annotation(2, 2, [40, 30, 20, 20]), False),
    ],
    ids=["exact", "rounded", "other entries", "larger", "class", "image"],
)
def test_a_box_that_stands_twice_is_said(tmp_path, second, is_same):
    images = [dict(id=k, file_name=f"{k}.png", width=100, height=80) for k in (1, 2)]
    categories = [dict(id=10, name="bolt"), dict(id=20, name="nut")]
    content = dict(images=images, categories=categories, annotations=[FIRST, second])
    said = [line for line in coco_report(content, str(tmp_path)) if "twice" in line]
    assert [": 1 (id 2 in 1.png)" in line for line in said] == [True] * is_same
