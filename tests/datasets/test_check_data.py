"""The command check-data: all faults of a file at once, each said once, and images without width and height."""

import logging

import pytest
from coco_files import NAMES, annotation, turned, write_coco
from json_files import write_json
from PIL import Image

from visdet.commands.check_data import problems_of_split

BOXES = [annotation(number, 1 + number % 2, [5, 6, 10, 12]) for number in range(1, 7)]


def checked(folder, damage=lambda content: None, heads=None, **config):
    """Return the problems of a data set whose file is changed by ``damage``."""
    content = write_coco(folder, [dict(row) for row in BOXES])
    damage(content)
    write_json(folder / "ann.json", content)
    settings = dict(
        type="visdet.CocoDataset",
        ann_file="ann.json",
        data_root=str(folder),
        data_prefix=dict(img="images/"),
        metainfo=dict(classes=NAMES),
    )
    return problems_of_split(settings | config, "train", heads or {}, {})


def without_keys(content):
    del content["images"][0]["file_name"], content["annotations"][1]["bbox"], content["categories"][2]["name"]
    content["annotations"][2]["image_id"] = None


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (
            without_keys,
            [
                "images[0] has no key 'file_name'",
                "annotations[1] has no key 'bbox'",
                "image_id of annotations[2] must be",
                "categories[2] has no key 'name'",
            ],
        ),
        (lambda content: content.pop("images"), ["needs a list under the key 'images'"]),
    ],
)
def test_all_faults_of_a_file_are_listed(tmp_path, damage, expected):
    problems = checked(tmp_path, damage, {"model.bbox_head.num_classes": 80})
    assert all(str(tmp_path) in problem for problem in problems[:-1])
    assert "the data has 3 classes, but the model model.bbox_head.num_classes=80" in problems[-1]
    assert len(problems) == len(expected) + 1
    for part in expected:
        assert any(part in problem for problem in problems), part


def test_the_report_says_a_warning_once(tmp_path, capsys, caplog):
    def overhang(content):
        content["annotations"][0]["bbox"] = [5, 6, 90, 12]

    with caplog.at_level(logging.WARNING):
        assert checked(tmp_path, overhang) == []
    printed = capsys.readouterr()
    assert "boxes that go beyond their image: 1" in printed.out and "classes without a box: 2" in printed.out
    assert "clipped to their image" not in printed.out + printed.err + caplog.text


@pytest.mark.parametrize("sides", ["absent", "null"])
def test_images_without_width_and_height(tmp_path, stdout, sides):
    def remove(content):
        for image in content["images"]:
            image |= dict(width=None, height=None)
            if sides == "absent":
                del image["width"], image["height"]
        content["annotations"][0]["bbox"] = [5, 6, 30, 12]
        Image.new("RGB", (40, 30)).save(tmp_path / "images/1.png", exif=turned())

    assert checked(tmp_path, remove) == []
    printed = stdout()
    assert (
        "opened for their width and height: 2" in printed
        and "beyond their image: 1 (id 1 in 2.png)" in printed
    )
    (tmp_path / "images/1.png").unlink()
    assert (
        "1.png does not exist"
        in checked(tmp_path, lambda content: (remove(content), (tmp_path / "images/1.png").unlink()))[0]
    )


def test_a_data_set_that_cannot_be_built_is_one_problem(tmp_path):
    (problem,) = checked(tmp_path, filter_cfg=dict(min_size="3"))
    assert "min_size must be" in problem
