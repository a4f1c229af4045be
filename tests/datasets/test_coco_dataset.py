"""CocoDataset: records by hand, and every mistake in a file or a config."""

import json

import pytest
from coco_files import NAMES, annotation, build, write_coco, write_content

from visdet.datasets import CocoDataset, ShapesDataset, coco
from visdet.datasets.coco import COCO_CLASSES
from visdet.errors import UserError, hints_of

BOX = [5, 6, 10, 12]


@pytest.fixture
def warnings_logged(logged):
    """The warnings that CocoDataset logs."""
    return logged(coco)


def test_records_by_hand(tmp_path, warnings_logged):
    write_coco(
        tmp_path,
        [
            annotation(7, 1, BOX, 20),
            annotation(0, 1, [0, 0, 40, 30], 10, iscrowd=1),
            annotation(3, 1, [1.5, 2.25, 3, 4], 30, ignore=True),
        ],
    )
    dataset = build(tmp_path)
    assert len(dataset) == 2
    assert dataset.get_data_info(0) == dict(
        img_path=f"{tmp_path}/images/1.png",
        img_id=1,
        height=30,
        width=40,
        instances=[
            dict(bbox=[5.0, 6.0, 15.0, 18.0], bbox_label=1, ignore_flag=0),
            dict(bbox=[0.0, 0.0, 40.0, 30.0], bbox_label=0, ignore_flag=1),
        ],
        sample_idx=0,
    )
    assert dataset.get_data_info(1)["instances"] == []
    assert dataset.get_cat_ids(0) == [1, 0]
    assert not warnings_logged


NO_BOX = "none of its 2 images has a box"


@pytest.mark.parametrize(
    ("annotations", "arguments", "message"),
    [
        *(
            ([annotation(1, 1, BOX)], arguments, message)
            for arguments, message in (
                ({"filter_cfg": {"min_size": "3"}}, "filter_cfg: min_size must be"),
                (
                    {"filter_cfg": {"filter_empty": True}},
                    "filter_cfg.*filter_empty.; it accepts filter_empty_gt",
                ),
                ({"filter_cfg": {"min_size": 99}}, r"no image is left of the 2 in .*ann\.json"),
                ({"data_prefix": {"img": None}}, r"data_prefix must be dict\[str, str\]"),
                ({"data_prefix": {"img_path": "images/"}}, "data_prefix must be dict"),
                ({"ann_file": "images"}, "annotation file .*images cannot be read: Is a directory"),
                ({"ann_file": "ann.json/a.json"}, "annotation file .* cannot be read: Not a directory"),
                ({"ann_file": "absent.json"}, "absent.json does not exist"),
                ({"metainfo": dict(classes="cat")}, r"got 'cat'; for one class write \('cat',\)"),
                ({"metainfo": dict(classes=("cat", "dog", "cat"))}, "must be a tuple of distinct names"),
                ({"metainfo": dict(classes=())}, "is among the 0 classes"),
                (
                    {"metainfo": dict(classes=("cat",), palette=[])},
                    "palette.* colour for each of 1 classes, got 0",
                ),
                ({"metainfo": dict(classes=("lion", "ant"))}, r"none of its 3 categories \(cat, dog, bird\)"),
            )
        ),
        ([annotation(1, 1, BOX, 20)], {"metainfo": None}, "not among the default classes .*forklift"),
        ([], {}, NO_BOX + ".*allow_no_boxes=True"),
        ([annotation(1, 1, BOX, iscrowd=1)], {}, "no crowd, so there is nothing to learn from it"),
        ([annotation(1, 1, BOX, ignore=1)], {}, NO_BOX),
        ([annotation(1, 1, [0.1, 0.2, 0.3, 0.4])], {}, "No box is left"),
    ],
)
def test_what_does_not_fit_is_one_message(tmp_path, annotations, arguments, message):
    write_coco(tmp_path, annotations, names=NAMES if arguments != {"metainfo": None} else ("cat", "forklift"))
    with pytest.raises(UserError, match=message):
        build(tmp_path, **arguments)


@pytest.mark.parametrize("text", ['{"images": [', "[]"])
def test_a_file_that_is_no_json_object(tmp_path, text):
    (tmp_path / "ann.json").write_text(text)
    with pytest.raises(ValueError, match=r"ann\.json .* JSON"):
        build(tmp_path)
    with pytest.raises(FileNotFoundError) as caught:
        CocoDataset("absent.json", "data/coco")
    assert "train2017.zip" in hints_of(caught.value)[0] and "in data/coco;" in hints_of(caught.value)[0]


def test_files_that_lack_something(tmp_path):
    """A file of test images has no annotations, fields may be null, and programs of Windows write a mark of bytes."""
    content = write_coco(tmp_path, [annotation(1, 1, BOX, area=None, iscrowd=None, ignore=None)])
    (tmp_path / "ann.json").write_text(json.dumps(content), encoding="utf-8-sig")
    dataset = build(tmp_path, metainfo=dict(classes=("bird", "dog", "cat")))
    assert dataset.get_data_info(0)["instances"] == [
        dict(bbox=[5.0, 6.0, 15.0, 18.0], bbox_label=2, ignore_flag=0)
    ]
    del content["annotations"]
    write_content(tmp_path, content)
    assert len(build(tmp_path, test_mode=True)) == 2
    write_content(tmp_path, content | {"annotations": []})
    assert len(build(tmp_path, allow_no_boxes=True)) == 2


def test_metainfo(tmp_path):
    assert len(COCO_CLASSES) == len(set(COCO_CLASSES)) == 80
    assert (COCO_CLASSES[0], COCO_CLASSES[9], COCO_CLASSES[79]) == ("person", "traffic light", "toothbrush")
    lazy = CocoDataset(ann_file="none.json", lazy_init=True)
    assert lazy.metainfo["classes"] == COCO_CLASSES
    assert len(set(lazy.metainfo["palette"])) == 80
    chosen = ShapesDataset(lazy_init=True, metainfo=dict(classes=tuple("abcdefgh")))
    assert len(chosen.metainfo["palette"]) == 8
    own = CocoDataset(lazy_init=True, metainfo=dict(classes=["a", "b"], palette=[[1, 2, 3], [4, 5, 6]]))
    assert own.metainfo["classes"] == ("a", "b")
    assert own.metainfo["palette"] == [(1, 2, 3), (4, 5, 6)]


def test_boxes_of_other_categories_are_left_out_with_a_warning(tmp_path, warnings_logged):
    write_coco(tmp_path, [annotation(1, 1, BOX, 10), annotation(2, 1, BOX, 30)])
    assert build(tmp_path, metainfo=dict(classes=("cat", "dog"))).get_cat_ids(0) == [0]
    (message,) = warnings_logged
    assert "ann.json" in message and "1 of its boxes" in message and "bird (1)" in message


def test_classes_that_the_file_lacks(tmp_path, warnings_logged):
    write_coco(tmp_path, [annotation(1, 1, BOX)], names=("cat",))
    with pytest.raises(
        ValueError, match=r"no category for 2 of the 3 classes: dog, bird; its categories: cat"
    ):
        build(tmp_path)
    build(tmp_path, allow_absent_classes=True)
    assert len(warnings_logged) == 1
    assert "no category for 2 of the 3 classes: dog, bird" in warnings_logged[0]


@pytest.mark.parametrize(
    ("table", "row", "change", "message"),
    [
        (
            "images",
            None,
            "images",
            r"needs a list under the key 'images'.*annotations, categories",
        ),
        ("annotations", None, "annotations", "needs a list under the key 'annotations'"),
        ("categories", None, {"categories": {}}, "needs a list under the key 'categories'"),
        ("images", 1, "width", r"images\[1\] has no key 'width'"),
        ("annotations", 0, "bbox", r"annotations\[0\] has no key 'bbox'"),
        ("categories", 2, "name", r"categories\[2\] has no key 'name'"),
        ("annotations", 1, {"bbox": [1, 2, 3]}, "bbox must be four finite numbers.*: .*'id': 2"),
        (
            "annotations",
            1,
            {"bbox": [1, 2, 3, float("nan")]},
            "bbox must be four finite numbers",
        ),
        (
            "images",
            0,
            {"height": None},
            "width and height must be positive numbers: .*'id': 1",
        ),
        ("images", 0, {"file_name": None}, "file_name must be a text"),
        ("categories", 1, {"name": 7}, "the name of a category must be a text"),
        ("annotations", 1, {"area": "900"}, "area must be a number"),
        ("annotations", 1, {"iscrowd": "0"}, "iscrowd must be 0 or 1"),
        ("annotations", 1, {"ignore": "0"}, "ignore must be 0 or 1"),
        ("annotations", 1, {"id": 1}, "id 1 occurs twice in 'annotations'"),
        ("images", 1, {"id": 1}, "id 1 occurs twice in 'images'"),
        ("images", 1, {"id": 1.0}, "id 1 occurs twice in 'images'"),
        ("images", 0, {"id": [1]}, r"id of images\[0\] must be .* text, got \[1\] \(list\)"),
        ("images", 0, {"id": True}, r"id of images\[0\] must be .*, got True \(bool\)"),
        (
            "images",
            0,
            {"id": float("nan")},
            r"id of images\[0\] must be .*, got nan \(float\)",
        ),
        ("images", 0, {"id": 2.0**60}, r"id of images\[0\] must be a whole number"),
        ("annotations", 1, {"id": {}}, r"id of annotations\[1\] must be .*, got {} \(dict\)"),
        (
            "annotations",
            1,
            {"image_id": None},
            r"image_id of annotations\[1\] must .* got None",
        ),
        ("annotations", 1, {"category_id": [10]}, r"category_id of annotations\[1\] must be"),
        ("categories", 1, {"id": 0.5}, r"id of categories\[1\] must be .* got 0.5"),
        (
            "annotations",
            1,
            {"image_id": "1"},
            r"image_id of annotations\[1\] is '1' \(a text\), but the id is 1 \(a number\)",
        ),
        (
            "annotations",
            1,
            {"category_id": "10.0"},
            r"category_id of annotations\[1\] is '10.0' \(a text\), but the id is 10 \(a number\)",
        ),
        (
            "images",
            0,
            {"id": "1"},
            r"image_id of annotations\[1\] is 1 \(a number\), but the id is '1' \(a text\)",
        ),
        ("images", 0, {"width": 40.5}, "width and height must be whole numbers"),
        ("images", 0, {"width": "40"}, "width and height must be positive numbers"),
        ("annotations", 1, {"bbox": [1, 2, 3, 10**400]}, "bbox must be four finite numbers"),
        ("annotations", 1, {"bbox": [True, 2, 3, 4]}, "bbox must be four finite numbers"),
        ("annotations", 1, {"bbox": dict(x=1)}, "bbox must be four finite numbers"),
        ("categories", 1, {"name": "cat"}, "several categories are named cat: ids 10, 20"),
    ],
)
def test_a_file_with_a_mistake_is_named(tmp_path, table, row, change, message):
    """A row of a table has other values, or lacks a key. Without a row, so does the whole content."""
    content = write_coco(tmp_path, [annotation(1, 1, BOX), annotation(2, 1, BOX)])
    changed = content if row is None else content[table][row]
    if isinstance(change, str):
        del changed[change]
    else:
        changed.update(change)
    write_content(tmp_path, content)
    with pytest.raises(ValueError, match=rf"annotation file {tmp_path}/ann\.json.*{message}"):
        build(tmp_path)


def test_a_category_that_groups_others_and_repeats_a_class(tmp_path):
    """Roboflow's files begin with such a category, which has no boxes."""
    content = write_coco(tmp_path, [annotation(1, 1, BOX, 10)])
    content["categories"][0]["supercategory"] = content["categories"][1]["supercategory"] = "cat"
    for group in (dict(id=0, name="cat", supercategory="none"), dict(id=0, name="cat")):
        file = content | dict(categories=[group, *content["categories"]])
        write_content(tmp_path, file)
        assert build(tmp_path).get_cat_ids(0) == [0]
    file["annotations"].append(annotation(2, 1, BOX, 0))
    write_content(tmp_path, file)
    with pytest.raises(ValueError, match=r"several categories are named cat: ids 0, 10.*category_id"):
        build(tmp_path)


def test_ids_of_any_type(tmp_path):
    """Numbers beyond 64 bits, texts, and whole numbers that a table of floats has written."""
    content = write_coco(tmp_path, [annotation(1.0, 2.0**40, BOX, 10.0), annotation("1", "b7", [1, 1, 9, 9])])
    content["images"][0]["id"], content["images"][1]["id"] = 2**40, "b7"
    content["annotations"].append(annotation(2**70, "b7", [1, 1, 9, 9]))
    write_content(tmp_path, content)
    dataset = build(tmp_path)
    found = [
        (dataset.get_data_info(i)["img_id"], len(dataset.get_data_info(i)["instances"])) for i in range(2)
    ]
    assert found == [(2**40, 1), ("b7", 2)]


@pytest.mark.parametrize(
    "name, other, message",
    [
        ("Cat", "cat", "category 'Cat' differs from 'cat' only in case"),
        (
            "cafe\u0301",
            "caf\u00e9",
            r"or Unicode form: 'cafe\\u0301', 'caf\\xe9'",
        ),
        ("STRASSE", "stra\u00dfe", "only in case, spaces, hyphens or Unicode form"),
        ("traffic_light ", "\u200btraffic light", "only in case, spaces, hyphens or Unicode form"),
    ],
)
def test_categories_that_look_like_a_class(tmp_path, name, other, message):
    write_coco(tmp_path, [annotation(1, 1, BOX)], names=(name, "dog"))
    for arguments in ({}, {"allow_absent_classes": True}, {"test_mode": True}):
        with pytest.raises(ValueError, match=message):
            build(tmp_path, metainfo=dict(classes=(other, "dog")), **arguments)


def test_categories_that_differ_by_case_alone(tmp_path, warnings_logged):
    write_coco(
        tmp_path,
        [annotation(1, 1, BOX), annotation(2, 1, [5, 6, 9, 12], 20)],
        names=("cat", "Cat"),
    )
    assert build(tmp_path, metainfo=dict(classes=("cat", "Cat"))).get_cat_ids(0) == [0, 1]
    build(tmp_path, metainfo=dict(classes=("cat",)))
    assert "Cat (1). Class 'cat' differs from 'Cat' only in case" in warnings_logged[0]


@pytest.mark.parametrize(
    "named, stored, message",
    [
        ("caf\u00e9.png", "cafe\u0301.png", "On the disk, .* differs from .* only in .* Unicode form"),
        ("cafe\u0301.png", "caf\u00e9.png", "On the disk, .* differs from .* only in .* Unicode form"),
        ("a.JPG", "a.jpg", "On the disk, 'a.jpg' differs from 'a.JPG' only in case"),
        ("Part/1.png", "part/1.png", "On the disk, 'part' differs from 'Part' only in case"),
    ],
)
def test_files_that_look_like_a_missing_one(tmp_path, named, stored, message):
    content = write_coco(tmp_path, [annotation(1, 1, BOX)])
    (tmp_path / "images/part").mkdir()
    (tmp_path / "images/1.png").rename(tmp_path / "images" / stored)
    content["images"][0]["file_name"] = named
    write_content(tmp_path, content)
    with pytest.raises(FileNotFoundError, match=f"1 of the 2 images .*{message}"):
        build(tmp_path)


def test_missing_images_are_found_before_training(tmp_path):
    write_coco(tmp_path, [annotation(1, 1, BOX)], sizes=((40, 30),) * 4)
    (tmp_path / "images/2.png").unlink()
    (tmp_path / "images/4.png").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"2 of the 4 images of .*ann\.json are missing: .*2\.png, .*4\.png"
    ):
        build(tmp_path)
    with pytest.raises(FileNotFoundError, match="4 of the 4 images"):
        build(tmp_path, data_prefix=dict(img="nowhere/"))
    assert len(build(tmp_path, indices=1)) == 1  # only the images in use are needed


def test_bad_boxes_are_clipped_or_dropped_with_one_warning(tmp_path, warnings_logged):
    good = BOX
    boxes = [good, [-5, 3, 15, 10], [50, 0, 10, 10], [3, 3, 0, 5], [3, 3, 5, 0.5]]
    boxes += [[38, 28, 2.9, 2.9]]  # sticks out by less than a pixel, as COCO's rounding does
    annotations = [annotation(i, 1, box) for i, box in enumerate(boxes, start=1)]
    annotations += [annotation(20, 99, good), annotation(21, 1, good, area=0)]
    write_coco(tmp_path, annotations)
    dataset = build(tmp_path)
    kept = [instance["bbox"] for instance in dataset.get_data_info(0)["instances"]]
    assert kept == [[5, 6, 15, 18], [0, 3, 10, 13], [38, 28, 40, 30]]
    (message,) = warnings_logged
    assert "ann.json" in message
    assert "of 8 boxes 5 are dropped" in message and "1 are clipped" in message
    for reason in (
        "1 outside their image",
        "2 under 1 pixel wide or high",
        "1 of an image that is not in the file",
        "1 of zero area",
    ):
        assert reason in message


def test_filtering(tmp_path, monkeypatch):
    annotations = [annotation(1, 1, BOX), annotation(2, 2, [1, 1, 9, 9], iscrowd=1)]
    write_coco(tmp_path, annotations, sizes=((40, 30), (40, 30), (40, 30), (40, 15)))

    def ids(**arguments):
        dataset = build(tmp_path, **arguments)
        return [dataset.get_data_info(i)["img_id"] for i in range(len(dataset))]

    assert ids() == [1, 2, 3, 4]
    assert ids(filter_cfg=dict(filter_empty_gt=True)) == [1]
    assert ids(filter_cfg=dict(filter_empty_gt=False, min_size=16)) == [1, 2, 3]
    assert ids(filter_cfg=dict(filter_empty_gt=True, min_size=16), test_mode=True) == [1, 2, 3, 4]
    assert ids(filter_cfg=dict(min_size=16), indices=[2, 0]) == [3, 1]
    monkeypatch.setattr(
        CocoDataset, "filter_data", lambda dataset: dataset.data_list[4:]
    )  # as a subclass may
    with pytest.raises(ValueError, match="no image is left of the 4"):
        ids()


@pytest.mark.parametrize("serialize_data", [True, False])
def test_lazy_and_serialized(tmp_path, serialize_data):
    write_coco(tmp_path, [annotation(1, 2, BOX)])
    dataset = build(tmp_path, lazy_init=True, serialize_data=serialize_data, indices=-1)
    assert not dataset._fully_initialized
    dataset.full_init()
    assert len(dataset) == 1
    assert dataset.get_data_info(0)["img_id"] == 2


def test_a_pipeline_that_gives_up(tmp_path):
    write_coco(tmp_path, [annotation(1, 2, BOX)])
    takes_the_second = [lambda record: record if record["img_id"] == 2 else None]
    assert build(tmp_path, pipeline=takes_the_second)[0]["img_id"] == 2
    with pytest.raises(Exception, match="None"):
        build(tmp_path, pipeline=takes_the_second, test_mode=True)[0]
