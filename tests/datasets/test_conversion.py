"""Data sets in other formats become COCO files, and what is left out or looks wrong is named."""

import pytest
from coco_files import turned
from disk import names_in
from json_files import read_json, write_json
from PIL import Image

from visdet.datasets import CocoDataset
from visdet.datasets.conversion import convert
from visdet.errors import UserError
from visdet.structures.coco_json import load_coco_json

VOC = """<annotation><filename>{name}</filename><size><width>100</width><height>80</height></size>
<object><name>bolt</name><bndbox><xmin>10</xmin><ymin>20</ymin><xmax>40</xmax><ymax>60</ymax></bndbox></object>
<object><name>nut</name><difficult>1</difficult><bndbox><xmin>0</xmin><ymin>0</ymin><xmax>9</xmax><ymax>9</ymax>
</bndbox></object><object><name>nut</name></object><object><bndbox><xmin>1</xmin><ymin>2</ymin><xmax>3</xmax>
<ymax>4</ymax></bndbox></object></annotation>"""
TABLE = "{image},xmin,ymin,xmax,ymax,{label}\na.png,10,20,40,60,bolt\na.png,0,0,9,9,nut\nb.png,,,,,\n"
TABLE += "a.png,1,2,x,4,nut\ngone.png,1,2,3,4,nut\n"


def pictures(folder, *names):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        Image.new("RGB", (100, 80)).save(folder / name)


def assert_says(lines, parts):
    assert all(any(part in line for line in lines) for part in parts), lines


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def yolo(root, names="[bolt, nut]", train="images/train"):
    write(root / "labels/train/gone.txt", "0 0.25 0.5 0.3 0.5")
    for split in ("train", "val"):
        pictures(root / "images" / split, "a.png", "b.png")
        write(
            root / "labels" / split / "a.txt",
            "0 0.25 0.5 0.3 0.5\n1 0 0 0.09 0 0.09 0.1125 0 0.1125\n7 1 1 1 1\n",
        )
    write(
        root / "data.yaml", f"path: /on/another/machine\ntrain: {train}\nval: ../images/val\nnames: {names}\n"
    )


def pose(root):
    yolo(root, "[bolt, nut]\nkpt_shape: [1, 3]")
    (root / "data.yaml").rename(root / "my.yml")
    lines = "0 0.25 0.5 0.3 0.5 0.9 0.9 2\n1 0.045 0.05625 0.09 0.1125 0.1 0.2 2\n"
    write(root / "labels/train/a.txt", lines)


def voc(root, suffix=".png", width="100"):
    pictures(root / "JPEGImages", "a.png", "b.png", "c.png")
    for name in ("a", "b", "c", "gone"):
        text = VOC.format(name=f"{name}{suffix}").replace("100", width)
        write(root / "Annotations" / f"{name}.xml", text)
    write(root / "ImageSets/Main/train.txt", "a\ngone\n")
    write(root / "ImageSets/Main/val.txt", "b\n")


def roboflow_csv(root):
    for split in ("train", "valid"):
        pictures(root / split, "a.png", "b.png")
        text = TABLE.format(image="filename", label="class")
        write(root / split / "_annotations.csv", text)


def one_csv(root, separator=","):
    pictures(root / "images", "a.png", "b.png")
    text = TABLE.format(image="Image_Path", label="LABEL")
    write(root / "trees.csv", text.replace(",10,", ",10.0,").replace(",", separator))


def coco(root):
    categories = [
        dict(id=0, name="parts", supercategory="none"),
        dict(id=17, name="bolt", supercategory="parts"),
        dict(id=4, name="nut"),
    ]
    boxes = [
        dict(id=1, image_id=0, category_id=17, bbox=[10, 20, 30, 40]),
        dict(id=2, image_id=0, category_id=4, bbox=[0, 0, 9, 9], iscrowd=1),
    ]
    images = [dict(id=k, file_name=name, width=100, height=80) for k, name in enumerate(("a.png", "b.png"))]
    for split in ("train", "valid"):
        pictures(root / split, "a.png", "b.png")
        rows = [*boxes, dict(id=3, image_id=9, category_id=17, bbox=[1, 1, 2, 2])]
        content = dict(categories=categories, images=images, annotations=rows)
        write_json(root / split / "_annotations.coco.json", content)


@pytest.mark.parametrize(
    ("make", "num_images", "left_out"),
    [
        (yolo, (2, 2), ["line 3 of", "no box of a class", "gone.txt is of no image"]),
        (lambda root: yolo(root, "{1: nut, 0: bolt}"), (2, 2), ["line 3 of"]),
        (pose, (2, 2), ["gone.txt is of no image"]),
        (voc, (1, 1), ["an object nut has no class or no bndbox", "gone.png is missing", "c.png"]),
        (lambda root: voc(root, "", "100.0"), (1, 1), []),
        (roboflow_csv, (2, 2), ["line 5 of", "gone.png is missing"]),
        (one_csv, (1, 1), ["line 5 of", "gone.png is missing"]),
        (lambda root: one_csv(root, ";"), (1, 1), ["line 5 of"]),
        (coco, (2, 2), ["a category that the file does not have", "category parts, which only groups"]),
    ],
)
def test_every_format_gives_the_same_boxes(tmp_path, make, num_images, left_out):
    make(tmp_path)
    files, skipped = convert(tmp_path, tmp_path, val_share=0.5, left_out_share=1)
    contents = {file.stem: read_json(file) for file in files}
    assert list(map(len, (contents["train"]["images"], contents["val"]["images"]))) == list(num_images)
    assert_says(skipped, left_out)
    with_boxes = max(contents.values(), key=lambda content: len(content["annotations"]))
    names = {category["id"]: category["name"] for category in with_boxes["categories"]}
    assert sorted(names.values()) == ["bolt", "nut"]
    assert set(names) == ({17, 4} if make is coco else {1, 2}), "COCO's category ids stay"
    first, second = with_boxes["annotations"]
    assert first["image_id"] == (make is not coco), "COCO's image ids stay"
    assert (names[first["category_id"]], first["bbox"]) == ("bolt", pytest.approx([10, 20, 30, 40]))
    assert (names[second["category_id"]], second["bbox"]) == ("nut", pytest.approx([0, 0, 9, 9]))
    assert bool(second.get("ignore")) == (tmp_path / "Annotations").exists() and bool(second["iscrowd"]) == (
        make is coco
    )
    assert all((tmp_path / image["file_name"]).is_file() for image in with_boxes["images"])
    assert convert(tmp_path, tmp_path, val_share=0.5, left_out_share=1)[0] == files, (
        "its own files may be written again"
    )


# The corners of a bolt of 40 x 20 pixels that is turned by 30 degrees about its top left corner, and those of a nut.
BOLT = [30.0, 20.0, 64.6410162, 40.0, 54.6410162, 57.3205081, 20.0, 37.3205081]
NUT = [5.0, 5.0, 15.0, 5.0, 15.0, 9.0, 5.0, 9.0]


def dota(root):
    pictures(root / "train/images", "a.png")
    lines = [" ".join(map(str, corners)) for corners in (BOLT, NUT)]
    text = f"imagesource:GoogleEarth\ngsd:0.15\n{lines[0]} bolt 0\n{lines[1]} nut 1\n1 2 3 4 nut 0\n"
    write(root / "train/labelTxt-v1.0/a.txt", text)
    write(root / "train/labelTxt-v1.0/trainset_hbb/a.txt", text)


def roboflow_dota(root):
    dota(root)
    write(root / "data.yaml", "train: ../train/images\nnames: [bolt, nut]\n")


def yolo_obb(root):
    pictures(root / "train/images", "a.png")
    write(root / "data.yaml", "train: ../train/images\nnames: [bolt, nut]\n")
    lines = []
    for label, corners in enumerate((BOLT, NUT)):
        shares = [side / (100, 80)[k % 2] for k, side in enumerate(corners)]
        lines.append(" ".join(map(str, [label, *shares])))
    write(root / "train/labels/a.txt", "\n".join(lines))


def roboflow_coco(root):
    pictures(root / "train", "a.png")
    rows = []
    for number, corners in enumerate(([*BOLT, *BOLT[:2]], NUT)):
        bbox = [min(corners[::2]), min(corners[1::2]), 1, 1]
        rows.append(dict(id=number, image_id=0, category_id=number, bbox=bbox, segmentation=[corners]))
    content = dict(
        images=[dict(id=0, file_name="a.png", width=100, height=80)],
        categories=[dict(id=0, name="bolt"), dict(id=1, name="nut")],
        annotations=rows,
    )
    write_json(root / "train/_annotations.coco.json", content)


def label_studio(root):
    pictures(root, "a.png", "b.png", "c.png", "d.png")

    def region(label, x, y, width, height, rotation, kind="rectanglelabels"):
        value = dict(
            x=x, y=y / 0.8, width=width, height=height / 0.8, rotation=rotation, rectanglelabels=[label]
        )
        return dict(type=kind, value=value, original_width=100, original_height=80)

    regions = [
        region("bolt", 30, 20, 40, 20, 30),
        region("nut", 5, 5, 10, 4, 0),
        region("x", 1, 1, 9, 9, 0, "ellipselabels"),
        region("x", None, 1, 9, 9, 0),
    ]
    data = dict(ref="none", image="/data/upload/3/1a2b3c4d-a.png")
    annotations = [dict(was_cancelled=True, result=[]), dict(was_cancelled=False, result=regions)]
    tasks = [
        dict(id=1, data=data, annotations=annotations),
        dict(id=2, data="none", annotations=[]),
        dict(id=3, data=dict(image="b.png"), annotations=[]),
        dict(id=4, data=dict(image="c.png"), annotations=annotations[:1]),
        dict(id=5, data=dict(image="d.png"), annotations=[dict(result=[])]),
    ]
    write_json(root / "export.json", tasks)


@pytest.mark.parametrize(
    ("make", "left_out"),
    [
        (dota, ["line 5 of"]),
        (roboflow_dota, ["line 5 of"]),
        (yolo_obb, []),
        (roboflow_coco, []),
        (label_studio, ["ellipselabels", "NoneType", "task 1 of", "c.png (2 times)"]),
    ],
)
def test_turned_boxes_keep_their_corners(tmp_path, make, left_out):
    make(tmp_path)
    [file], skipped = convert(tmp_path, tmp_path, val_share=0, left_out_share=1)
    assert len(skipped) == (len(left_out) and len(left_out) + 1)
    assert_says(skipped, left_out)
    content = load_coco_json(str(file))
    assert [category["name"] for category in content["categories"]] == ["bolt", "nut"]
    for row, corners in zip(content["annotations"], (BOLT, NUT), strict=True):
        assert row["segmentation"] == [pytest.approx(corners)]
    bolt, nut = content["annotations"]
    if make is not roboflow_coco:
        assert bolt["bbox"] == pytest.approx([20, 20, 44.6410162, 37.3205081])
    assert bool(nut.get("ignore")) == (make in (dota, roboflow_dota)) and not bolt.get("ignore")
    assert convert(tmp_path, tmp_path, val_share=0, left_out_share=1)[0] == [file]
    images = dict(data_root=str(tmp_path), ann_file=file.name, metainfo=dict(classes=("bolt", "nut")))
    assert len(CocoDataset(box_type="rbox", **images)[0]["instances"][0]["bbox"]) == 8


def test_what_cannot_be_converted_is_one_message(tmp_path):
    for make, message in (
        (lambda root: None, "is not a folder"),
        (lambda root: root.mkdir(), "has none of data.yaml"),
        (lambda root: yolo(root, "7"), "must have names"),
        (lambda root: yolo(root, "[a"), "data.yaml is not valid YAML"),
        (lambda root: write(root / "a.csv", "x,y\n1,2\n"), "there is no column image, label, xmin"),
        (lambda root: (one_csv(root), write(root / "train.json", "{}")), "train.json exists"),
    ):
        root = tmp_path / message.replace(" ", "")
        make(root)
        with pytest.raises(UserError, match=message):
            convert(root, root, left_out_share=1)


def test_a_turned_picture_has_the_size_that_viewers_show(tmp_path):
    yolo(tmp_path)
    Image.new("RGB", (100, 80)).save(tmp_path / "images/train/a.png", exif=turned())
    content = read_json(convert(tmp_path, tmp_path / "out", left_out_share=1)[0][0])
    assert (content["images"][0]["width"], content["images"][0]["height"]) == (80, 100)


CONFIG = """
_base_ = "visdet::deformable_detr/deformable-detr_small_coco.py"
data_root = {root!r}
images = dict(data_root=data_root, data_prefix=dict(img=""), metainfo=dict(classes={classes}))
train_dataloader = dict(num_workers=0, persistent_workers=False, dataset=dict(ann_file="train.json", **images))
val_dataloader = dict(dataset=dict(ann_file="val.json", **images))
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=data_root + "val.json")
test_evaluator = val_evaluator
model = dict(bbox_head=dict(num_classes={number}))
"""


def test_the_commands_report_and_draw(tmp_path, program):
    yolo(tmp_path / "mine", "[bolt, nut, Nut, washer]", "[images/train, images/val]")
    assert program("convert", "mine")[:2] == (1, "") and not (tmp_path / "mine/train.json").exists()
    status, printed, _ = program("convert", "mine", "--left-out-share", "0.4")
    assert status == 0
    assert printed.splitlines()[-1] == "left out 1 of 7 pictures and 3 of 9 boxes"
    for line in (
        "train.json: 4 images, 4 boxes: bolt 2, nut 2",
        "images without a box: 2 (",
        "classes without a box: 2 (Nut, washer)",
        "'Nut' differs from 'nut' only in case",
        "line 3 of",
        "classes = ('bolt', 'nut', 'Nut', 'washer')",
    ):
        assert line in printed, line
    for number, classes, status, line in (
        (
            80,
            ("bolt", "nut"),
            1,
            "the data has 2 classes, but the model model.bbox_head.num_classes=80; set 2",
        ),
        (2, ("bolt", "screw"), 1, "a run stops here"),
        (2, ("bolt", "nut"), 0, "images that train has, too: 2"),
    ):
        (tmp_path / "config.py").write_text(
            CONFIG.format(root=f"{tmp_path}/mine/", number=number, classes=classes)
        )
        found, printed, _ = program("check-data", "config.py", "--out-dir", "out")
        assert found == status and line in printed and "4 images, 4 boxes" in printed
        drawn = names_in(tmp_path / "out", "*.png")
        assert drawn == [*(f"{k:05d}_{'ab'[k % 2]}.png" for k in range(4)), "sheet.png"] * (status == 0)
