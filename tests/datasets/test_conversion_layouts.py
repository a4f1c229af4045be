"""Folders as labelling tools, Windows and people leave them: the right boxes, or what is left out and counted."""

import json
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from coco_files import turned
from disk import names_in
from json_files import read_json, write_json
from PIL import Image

from visdet.datasets import CocoDataset
from visdet.datasets.coco_report import coco_report
from visdet.datasets.conversion import convert
from visdet.errors import UserError
from visdet.files import writing
from visdet.ops import box_iou_quadri
from visdet.structures.coco_json import uncrossed

BOX = [40, 30, 20, 20]
LINE = "0 0.5 0.5 0.2 0.25\n"
VOC = (
    "<annotation><filename>{}</filename><object><name>bolt</name><bndbox><xmin>40</xmin><ymin>30</ymin><xmax>60</xmax>"
    "<ymax>50</ymax></bndbox></object></annotation>"
)
CSV = "image,label,x1,y1,x2,y2,{}\n0.png,bolt,40,30,60,50,{}\n"
DOTA = "40 30 60 30 60 50 40 50 bolt 0"


def write(root, files):
    """Write files: the bytes or the text of each, a list of (image, box) as COCO's JSON, or a picture for None."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            Image.new("RGB", (100, 80)).save(path)
        elif isinstance(content, list):
            write_json(path, coco_of(content))
        else:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())


def contents_of(files):
    return [file.read_bytes() for file in files]


def coco_of(images):
    return dict(
        categories=[dict(id=1, name="bolt")],
        images=[dict(id=k, file_name=name, width=100, height=80) for k, name in enumerate(images)],
        annotations=[dict(id=k, image_id=k, category_id=1, bbox=BOX) for k in range(len(images))],
    )


def converted(root, **options):
    """Return the images of each split, all of which have the box, and what is left out."""
    files, left_out = convert(root, root, **options)
    found = {}
    for file in files:
        content = read_json(file)
        boxes = {row["image_id"]: [round(edge, 3) for edge in row["bbox"]] for row in content["annotations"]}
        assert boxes == {image["id"]: BOX for image in content["images"]}
        found[file.stem] = sorted(image["file_name"] for image in content["images"])
    return found, left_out


def yolo(*images, **files):
    """Return the files of a YOLO folder."""
    labels = {str(Path(name.replace("images", "labels")).with_suffix(".txt")): LINE for name in images}
    return dict.fromkeys(images) | labels | {"data.yaml": files.pop("data", "names: [bolt]")} | files


PAIR = ("images/train/0.png", "images/val/0.png")
PAIR_SPLITS = {"train": ["images/train/0.png"], "val": ["images/val/0.png"]}
LAYOUTS = {
    "yolo, test alone": (yolo("test/images/0.png", data="test: ../test/images\nnames: [bolt]"), "test"),
    "voc, test alone": ({"test/0.png": None, "test/0.xml": VOC.format("0.png")}, "test"),
    "coco, val alone": ({"valid/0.png": None, "valid/_annotations.coco.json": ["0.png"]}, "val"),
    "csv, test alone": (
        {"test.csv": "image,label,x1,y1,x2,y2\n0.png,bolt,40,30,60,50\n", "all/0.png": None},
        "test",
    ),
    "validation in data.yaml": (yolo("images/0.png", data="validation: images\nnames: [bolt]"), "val"),
    "one picture": (yolo("images/0.png", data="train: images\nnames: [bolt]"), "train"),
    "own name, yolo": (yolo("images/test_val.png"), "train"),
    "own name, voc": ({"val-1.png": None, "val-1.xml": VOC.format("val-1.png")}, "train"),
    "own name, coco": ({"all.json": ["test.png"], "test.png": None}, "train"),
    "folder of images": ({"all.json": ["test/0.png"], "test/0.png": None}, "test"),
    "supervision": (
        {"images/0.png": None, "annotations/0.txt": LINE, "data.yaml": "nc: 1\nnames: [bolt]"},
        "train",
    ),
    "Label Studio": (
        {"images/0.png": None, "labels/0.txt": LINE, "classes.txt": "bolt\r\nnut\r\n", "notes.json": "{}"},
        "train",
    ),
    "labelImg": (
        {"images/0.png": None, "labels/0.txt": LINE, "labels/classes.txt": "bolt".encode("utf-16")},
        "train",
    ),
    "CVAT": (
        {"obj_valid_data/0.png": None, "obj_valid_data/0.txt": LINE, "obj.names": "bolt\n", "obj.data": "x"},
        "val",
    ),
    "folders with a capital": (
        {"Images/0.PNG": None, "Labels/0.txt": LINE, "data.yaml": "train: Images\nnames: [bolt]"},
        "train",
    ),
    "outline with a score": (
        yolo("images/0.png") | {"labels/0.txt": "0 0.4 0.375 0.6 0.375 0.6 0.625 0.4 0.625 0.9"},
        "train",
    ),
    "box with a score": (yolo("images/0.png") | {"labels/0.txt": LINE.strip() + " 0.9"}, "train"),
    "hidden files, yolo": (
        yolo("images/0.png") | {"images/._0.png": b"\0\5\26\7", ".ipynb_checkpoints/0-checkpoint.png": b"x"},
        "train",
    ),
    "hidden files, voc": ({"0.png": None, "0.xml": VOC.format("0.png"), "._0.xml": b"\0\5\26\7"}, "train"),
    "hidden files, coco": ({"0.png": None, "a.json": ["0.png"], "._a.json": b"\0\5\26\7"}, "train"),
    "voc, UTF-16": ({"0.png": None, "0.xml": VOC.format("0.png").encode("utf-16")}, "train"),
    "labelImg, one folder": ({"val/0.png": None, "val/0.txt": LINE, "val/classes.txt": "bolt\n"}, "val"),
    "labels beside images": (
        {"all/0.png": None, "all/0.txt": LINE, "data.yaml": "names: {0: bolt}"},
        "train",
    ),
    "one image in data.yaml": (yolo("images/0.png", data="train: images/0.png\nnames: [bolt]"), "train"),
    "voc, trainval": (
        {
            "0.png": None,
            "0.xml": VOC.format("0.png"),
            "ImageSets/Main/trainval.txt": "0",
            "ImageSets/Main/test.txt": "1",
        },
        "train",
    ),
    "voc, no suffix": ({"JPEGImages/0.jpg": None, "Annotations/0.xml": VOC.format("0")}, "train"),
    "voc, Windows": ({"images/0.jpg": None, "Annotations/0.xml": VOC.format(r"C:\a\0.jpg")}, "train"),
    "voc, nested": ({"images/b/0.JPG": None, "Annotations/b/0.xml": VOC.format("0.jpg")}, "train"),
    "voc, equal stems": (
        {"a/images/0.jpg": None, "a/xml/0.xml": VOC.format("0"), "b/images/0.png": b""},
        "train",
    ),
    "voc, an equal name": (
        {"a/images/0.png": None, "a/xml/0.xml": VOC.format("0.png"), "images/0.png": b""},
        "train",
    ),
    "dota, equal stems": ({"a/images/0.jpg": None, "a/labelTxt/0.txt": DOTA, "b/images/0.png": b""}, "train"),
    "avif": (yolo("images/0.avif"), "train"),
    "jpeg 2000": (yolo("images/0.jp2"), "train"),
    "csv, UTF-16": (
        {"a.csv": "image;label;x1;y1;x2;y2\nö.png;bolt;40;30;60;50\n".encode("utf-16"), "ö.png": None},
        "train",
    ),
    "csv, split": ({"0.png": None, "train.csv": CSV.format("split", "test")}, "test"),
    "csv, subset": ({"train/0.png": None, "a.csv": CSV.format("Subset", "valid")}, "val"),
    "csv, set": ({"0.png": None, "a.csv": CSV.format("set", "VALIDATION")}, "val"),
    "coco, UTF-16": ({"a.json": json.dumps(coco_of(["0.png"])).encode("utf-16"), "0.png": None}, "train"),
    "coco, other computer": ({"a.json": [r"D:\me\images\0.png"], "my/images/0.png": None}, "train"),
    "captions beside instances": (
        {
            "x/instances_train.json": ["0.png"],
            "x/person_keypoints_train.json": ["0.png"],
            "train/0.png": None,
        },
        "train",
    ),
}


@pytest.mark.parametrize(("files", "split"), LAYOUTS.values(), ids=LAYOUTS)
def test_a_picture_is_found_and_has_its_split(tmp_path, files, split):
    write(tmp_path, files)
    (picture,) = [name for name, content in files.items() if content is None]
    found, left_out = converted(tmp_path)
    assert found == {split: [picture]}
    assert not left_out or left_out[-1] == "left out 0 of 1 pictures and 0 of 1 boxes, and 1 other things"


TABLES = {
    f"coco, {where}": {
        **{f"{where.format(split)}/0.png": None for split in ("train", "val")},
        **{f"annotations/instances_{split}.json": ["0.png"] for split in ("train", "val")},
    }
    for where in ("images/{}", "{}", "data/images/{}2017", r"{}/images")
}
TABLES |= {
    f"yolo, {line}": yolo(
        *PAIR,
        data="path: ./\ntrain: train.txt\nval: val.txt\nnames: [bolt]",
        **{f"{split}.txt": line.format(split).encode(code) for split in ("train", "val")},
    )
    for line, code in (
        ("./images/{}/0.png\r\n", "utf-8-sig"),
        ("data/images/{}/0.png", "utf-16"),
        (r"images\{}\0.png", "utf-8"),
        (r"D:\sets\mine\images\{}\0.png", "utf-8"),
    )
}
TABLES |= {
    f"data.yaml, {entry}": yolo(
        *PAIR, data="".join(f"{s}: {entry.format(s)}\n" for s in ("train", "val")) + "names: [bolt]"
    )
    for entry in (
        r"images\{}",
        r"..\images\{}",
        r"C:\sets\mine\images\{}",
        "/content/mine/images/{}",
        "[images/{}]",
    )
}


@pytest.mark.parametrize("files", TABLES.values(), ids=TABLES)
def test_equal_names_in_two_splits_stay_apart(tmp_path, files):
    write(tmp_path, files)
    train, val = (name for name, content in files.items() if content is None)
    assert converted(tmp_path) == ({"train": [train], "val": [val]}, [])


def test_a_value_that_is_no_split_is_said(tmp_path):
    write(tmp_path, {"0.png": None, "a.csv": CSV.format("split", "holdout")})
    found, (line,) = converted(tmp_path)
    assert "train" in found and line.endswith("neither train nor val nor test: 1 (0.png: holdout)")


@pytest.mark.parametrize("code", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("end", ["\n", "\r\n\r\n"])
def test_labels_and_data_yaml_in_any_code(tmp_path, code, end):
    write(tmp_path, yolo("images/0.png", data="names: [größe]".encode(code)))
    (tmp_path / "labels/0.txt").write_bytes(f"0 0.5 0.5 0.2 0.25{end}".encode(code))
    assert converted(tmp_path) == ({"train": ["images/0.png"]}, [])
    assert read_json(tmp_path / "train.json")["categories"] == [dict(id=1, name="größe")]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"classes.txt": "nut\n", "b/classes.txt": ""} | yolo("images/0.png"), None),
        ({"data.yaml": "names: [größe]".encode("latin-1")}, r"data\.yaml is neither in UTF-8 nor in UTF-16"),
        ({"data.yaml": "names: {a: bolt}"}, "data.yaml must have names"),
        (
            {"a/classes.txt": "bolt\nnut", "a/0.txt": LINE, "b/classes.txt": "nut\nbolt"},
            r"a/classes.txt, .*b/classes.txt differ; write data.yaml",
        ),
        ({"a.json": [BOX], "package.json": "{}"}, "a.json: file_name must be a text"),
        ({"package.json": "{}"}, "package.json is no COCO file"),
        ({"a/0.png": None, "b/0.png": None, "a.json": ["0.png"]}, "0.png is missing"),
        (
            {"a/0.png": None, "b/0.jpg": None, "labelTxt/0.txt": DOTA},
            "labelTxt/0 is missing, or several have its name",
        ),
        ({"val/0.png": None, "train.json": [r"train\0.png"]}, r"train\\0.png is missing"),
    ],
)
def test_what_must_be_done_is_said(tmp_path, files, message):
    write(tmp_path, files)
    if message is None:
        assert converted(tmp_path)[0] == {"train": ["images/0.png"]}
        return
    with pytest.raises(UserError, match=message) as caught:
        convert(tmp_path, tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ({"labels/gone.txt": LINE}, "left out 1 of 11 pictures and 0 of 10 boxes"),
        ({"labels/0.txt": LINE + "0 nan 0.5 0.1 0.1"}, "left out 0 of 10 pictures and 1 of 11 boxes"),
        ({"labels/0.txt": LINE + "1 0.5 0.5 0.1 0.1"}, "left out 0 of 10 pictures and 1 of 11 boxes"),
        ({"images/0.png": b"no picture"}, "left out 1 of 10 pictures and 1 of 10 boxes"),
        ({"images/0.gif": None}, "left out 0 of 10 pictures and 0 of 10 boxes, and 1 other things"),
    ],
)
def test_what_is_left_out_is_counted_and_at_most_a_tenth(tmp_path, lost, message):
    write(
        tmp_path,
        yolo(*(f"images/{number}.png" for number in range(10)), data="train: [images]\nnames: [bolt]"),
    )
    write(tmp_path, lost)
    if ".gif" in str(lost):
        (tmp_path / "images/0.gif").rename(tmp_path / "0.gif")
    files, left_out = convert(tmp_path, tmp_path)
    assert left_out[-1] == message and len(left_out) >= 2
    before = contents_of(files)
    for number in (1, 2, 3):
        write(tmp_path, {f"labels/{number}.txt": "what"})
    with pytest.raises(UserError, match=r"more than --left-out-share 0\.1; nothing is written") as caught:
        convert(tmp_path, tmp_path)
    assert "line 1 of" in str(caught.value) and contents_of(files) == before


def test_the_sizes_of_a_table_and_pages_are_said(tmp_path):
    table = (
        "image,width,height,label,x1,y1,x2,y2\n0.tif,80,100,bolt,40,30,60,50\n1.png,10,20,bolt,40,30,60,50\n"
    )
    write(tmp_path, {"a.csv": table, "1.png": None})
    pages = [Image.new("RGB", (80, 100)) for _ in range(3)]
    pages[0].save(tmp_path / "0.tif", exif=turned(), save_all=True, append_images=pages[1:])
    files, left_out = convert(tmp_path, tmp_path, val_share=0)
    images = {image["file_name"]: image for image in read_json(files[0])["images"]}
    assert (images["0.tif"]["width"], images["0.tif"]["height"]) == (80, 100), "as it is stored"
    assert any("1.png has 100x80 and not 10x20" in line for line in left_out)
    assert any(line.startswith("pages or frames of") and line.endswith("(2 times)") for line in left_out)


def test_a_file_is_whole_or_as_before(tmp_path, monkeypatch):
    write(tmp_path, yolo(*PAIR, data="train: images/train\nval: images/val\nnames: [bolt]"))
    files, _ = convert(tmp_path, tmp_path)
    before = contents_of(files)
    (tmp_path / "data.yaml").write_text("train: images/train\nval: images/val\nnames: [bolt, nut]")
    monkeypatch.setattr(writing.os, "replace", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(UserError, match=r"train\.json .*No space left"):
        convert(tmp_path, tmp_path)
    assert contents_of(files) == before
    assert names_in(tmp_path, "*.json") == ["train.json", "val.json"]


def test_what_may_be_a_mistake_is_one_line_a_kind(tmp_path):
    names = [f"{number}.png" for number in range(5)]
    turned_size = coco_of(names)
    for image in turned_size["images"]:
        image.update(width=80, height=100)
    write(tmp_path, dict.fromkeys(names) | {"train.json": json.dumps(turned_size), "val.json": []})
    _, lines = convert(tmp_path, tmp_path / "out")
    sizes, drawn = lines
    assert sizes.startswith("widths and heights that are not those of the image: 5 (")
    assert "0.png has 100x80 and not 80x100" in sizes and sizes.endswith("… 2 more)")
    assert drawn.startswith("images that are drawn at random for validation, because") and ": 1 (" in drawn
    write(tmp_path, {"val.json": names[:2]})
    (shared,) = convert(tmp_path, tmp_path / "shared")[1][1:]
    assert shared.startswith("images that are for train and for val: 2 (")


def test_pictures_that_come_later_bring_none_from_training_to_validation(tmp_path):
    names = [f"{number}.png" for number in range(17)]
    splits = []
    for count in (15, 17):
        write(tmp_path, dict.fromkeys(names[:count]) | {"all.json": names[:count]})
        splits.append(converted(tmp_path)[0])
    assert len(splits[1]["val"]) == 3 and set(splits[0]["train"]).isdisjoint(splits[1]["val"])


def test_a_split_of_an_earlier_conversion_is_told(tmp_path):
    names = [f"{number}.png" for number in range(5)]
    write(tmp_path, dict.fromkeys(names) | {"all.json": names})
    out = tmp_path / "out"
    (_, val), _ = convert(tmp_path, out)
    (out / "test.json").write_text("{}")
    _, (line, *_) = convert(tmp_path, out, val_share=0)
    assert line == f"files of an earlier conversion, whose pictures may be of another split now: 1 ({val})"


@pytest.mark.parametrize("share", [1.5, -1.0, float("nan")])
@pytest.mark.parametrize("name", ["val_share", "left_out_share"])
def test_a_share_is_from_0_to_1(tmp_path, name, share):
    with pytest.raises(UserError, match=rf"convert: {name} must be float from 0 to 1, got {share}"):
        convert(tmp_path, tmp_path, **{name: share})


def test_lines_in_another_code_are_no_boxes(tmp_path):
    lines = "0 0 9 0 9 9 0 9 bolt 0\n" * 9 + "0 0 9 0 9 9 0 9 größe 0\n"
    write(tmp_path, {"images/0.png": None, "labelTxt/0.txt": lines.encode("latin-1")})
    [file], left_out = convert(tmp_path, tmp_path)
    assert left_out[0].endswith("is no box of a class: it is neither in UTF-8 nor in UTF-16")
    assert [category["name"] for category in read_json(file)["categories"]] == ["bolt"]


IN_ORDER = [10, 20, 30, 20, 30, 40, 10, 40]
CROSSED = (
    [10, 20, 30, 20, 10, 40, 30, 40],
    [10, 20, 10, 40, 30, 20, 30, 40],
    [10, 20, 30, 40, 30, 20, 10, 40],
)


@pytest.mark.parametrize("corners", CROSSED, ids=str)
@pytest.mark.parametrize("kind", ["dota", "yolo", "coco"])
def test_corners_that_cross_are_put_in_order(tmp_path, kind, corners):
    content = coco_of(["images/0.png"])
    content["annotations"][0].update(bbox=[10, 20, 20, 20], segmentation=[corners])
    shares = [side / (100, 80)[k % 2] for k, side in enumerate(corners)]
    files = {
        "dota": {"labelTxt/0.txt": " ".join(map(str, corners)) + " bolt 0"},
        "yolo": {"data.yaml": "names: [bolt]", "labels/0.txt": "0 " + " ".join(map(str, shares))},
        "coco": {"all.json": json.dumps(content)},
    }
    write(tmp_path, files[kind] | {"images/0.png": None})
    [file], lines = convert(tmp_path, tmp_path / "out")
    ((outline,),) = [row["segmentation"] for row in read_json(file)["annotations"]]
    found = torch.tensor([outline, IN_ORDER], dtype=torch.float64)
    assert box_iou_quadri(found, found)[0] == pytest.approx([1, 1])
    assert lines[0].startswith("outlines that cross themselves, whose corners are put in order: 1 (")
    if kind == "coco":
        classes = {"classes": ("bolt",)}
        dataset = CocoDataset(str(tmp_path / "all.json"), str(tmp_path), box_type="rbox", metainfo=classes)
        assert dataset[0]["instances"][0]["bbox"] == outline
        assert "read with their corners in order: 1 (" in str(coco_report(content, str(tmp_path)))


def test_an_outline_that_does_not_cross_stays():
    for corners in (IN_ORDER, IN_ORDER[::-1], [0, 0, 9, 0, 2, 2, 0, 9], [0, 0, 4, 0, 8, 0, 2, 0]):
        assert uncrossed(corners) == corners
