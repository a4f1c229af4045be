"""Training on a folder of pictures, and the options that need no config of one's own."""

from pathlib import Path

import numpy as np
import pytest
import torch
from json_files import read_json, write_json
from PIL import Image
from torch.testing import assert_close

import visdet
from visdet.commands import main
from visdet.data_folder import _base_of, config_for
from visdet.engine import UserError, load_config, read_checkpoint
from visdet.engine.config.load import build_dataset

SMALL = """_base_ = ["visdet::dino/dino-small_coco.py"]
resize = dict(type="Resize", scale=(64, 64), keep_ratio=True)
read = [dict(type="LoadImageFromFile", channel_order="rgb"), dict(type="LoadAnnotations", with_bbox=True)]
train_dataloader = dict(dataset=dict(pipeline=[*read, resize, dict(type="PackDetInputs")]))
val_dataloader = dict(dataset=dict(pipeline=[read[0], resize, read[1], dict(type="PackDetInputs")]))
test_dataloader = val_dataloader
model = dict(encoder=dict(num_layers=1), num_queries=10)
visualizer = dict(vis_backends=[dict(type="LocalVisBackend")])
default_hooks = dict(visualization=None)
"""


def draw_images(folder, names):
    folder.mkdir(parents=True, exist_ok=True)
    numbers = np.random.default_rng(0)
    for name in names:
        pixels = numbers.integers(0, 60, (48, 64, 3), dtype=np.uint8)
        pixels[10:30, 20:50, 0] = 230
        Image.fromarray(pixels).save(folder / name)


def yolo(folder):
    """Return a folder without a validation part."""
    names = [f"{number}.png" for number in range(10)]
    draw_images(folder / "images", names)
    (folder / "labels").mkdir()
    for name in names:
        (folder / "labels" / name).with_suffix(".txt").write_text("1 0.5 0.4 0.47 0.42\n")
    (folder / "data.yaml").write_text("names: [nut, bolt]\ntrain: images\n")
    return folder


def coco(folder):
    """Return a folder with all three parts."""
    for split, count in (("train", 4), ("valid", 2), ("test", 3)):
        names = [f"{split}{number}.png" for number in range(count)]
        draw_images(folder / split, names)
        box = {"bbox": [20, 10, 30, 20], "area": 600, "iscrowd": 0, "category_id": 7}
        content = {
            "images": [
                {"id": k, "file_name": name, "width": 64, "height": 48} for k, name in enumerate(names, 1)
            ],
            "annotations": [{"id": k, "image_id": k, **box} for k in range(1, count + 1)],
            "categories": [{"id": 7, "name": "bolt"}],
        }
        write_json(folder / split / "_annotations.coco.json", content)
    return folder


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.py").write_text(SMALL)
    return tmp_path


def test_a_folder_is_trained_on_without_a_config(here, stdout):
    result = visdet.train("small.py", data=yolo(here / "mine"), iters=2, batch_size=2, lr=1e-3, seed=3)
    said = stdout()
    assert "images that are drawn at random for validation" in said.replace("\n", " ")
    assert result.work_dir == str(here / "work_dirs/mine")
    short = Path("work_dirs/mine/data/mine.py").read_text()
    assert len(short.splitlines()) < 15 and all(line in said for line in short.splitlines())
    cfg, _ = load_config("work_dirs/mine/best.pth")
    assert cfg.train_cfg.max_iters == 2 and cfg.train_dataloader.batch_size == 2 and cfg.randomness.seed == 3
    assert cfg.optim_wrapper.optimizer.lr == 1e-3 and cfg.model.bbox_head.num_classes == 2
    meta = read_checkpoint("work_dirs/mine/best.pth")["meta"]
    assert meta["dataset_meta"]["classes"] == ("nut", "bolt") and meta["category_ids"] == [1, 2]
    metrics = visdet.evaluate("work_dirs/mine/best.pth", data=coco(here / "other"), work_dir="test")
    assert "coco/bbox_mAP" in metrics


def test_objects_have_the_sizes_that_validation_has(here):
    cfg, _ = load_config(config_for(yolo(here / "mine"), _base_of("dino-small"), here / "run"))
    dataset = build_dataset(cfg, "train")
    boxes = torch.cat([item["data_samples"].gt_instances.bboxes for item in dataset])
    sides = torch.tensor([0.47 * 480, 0.42 * 360]).expand(len(dataset), -1)
    assert_close(boxes[:, 2:] - boxes[:, :2], sides, rtol=0, atol=0.1)


def test_outlines_of_four_corners_are_answered_with_the_model_for_boxes_that_turn(here, stdout):
    root, base = coco(here / "mine"), _base_of("dino-small")
    config_for(root, base, here / "upright")
    empty = coco(here / "empty")
    for file in empty.glob("*/*.json"):
        write_json(file, read_json(file) | {"annotations": []})
    config_for(empty, base, here / "without boxes")
    assert "four corners" not in stdout()
    for file in root.glob("*/*.json"):
        content = read_json(file)
        for row in content["annotations"]:
            row["segmentation"] = [[21, 11, 49, 13, 48, 27, 20, 25]]
        write_json(file, content)
    config_for(root, base, here / "turned")
    assert "--model rotated-dino-small boxes that turn" in stdout().replace("\n", " ")


def test_the_parts_of_a_folder_are_kept_and_epochs_are_counted(here, stdout):
    visdet.train("small.py", data=coco(here / "mine"), epochs=2, batch_size=3, work_dir="run")
    said = stdout()
    assert "data: 4 images for train, 2 images for val, 3 images for test" in said.replace("\n", " ")
    assert "at random" not in said
    cfg, _ = load_config("run/last.pth")
    assert cfg.train_cfg.max_iters == 2 * 2
    assert cfg.test_dataloader.dataset.ann_file.endswith("run/data/test.json")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"data": "mine", "model": "dino-smal"}, "model must be one of dino-small"),
        ({"data": "mine", "model": "dino_shapes"}, "dino-small, .* data are those of ShapesDataset"),
        ({"data": "mine", "model": "dino/dino_shapes"}, "data are those of ShapesDataset"),
        ({"data": "mine", "iters": 2, "epochs": 3}, "either iters or epochs"),
        ({"data": "nowhere"}, "nowhere is not a folder"),
        ({"model": "dino-small"}, "names the model for data=FOLDER"),
        ({"data": "mine", "device": "cuda:99"}, "device 'cuda:99' is not available"),
        ({"data": "mine", "device": "gpu"}, "device must be 'cpu', 'cuda'"),
        ({"data": "mine", "imgsz": 640}, "the scale of Resize"),
        ({"data": "mine", "batch": 640}, r"batch_size=\.\.\."),
        ({"data": "mine", "lr0": 1}, r"lr=\.\.\."),
        ({"data": "mine", "batch_size": 0}, "batch_size must be"),
    ],
)
def test_what_is_refused(here, arguments, message):
    yolo(here / "mine")
    with pytest.raises(UserError, match=message):
        visdet.train(**arguments)
    assert not (here / "work_dirs" / "nowhere").exists()
    with pytest.raises(UserError, match="counts epochs; give epochs"):
        visdet.train("dino/dino-4scale_r50_8xb2-12e_coco", iters=3)


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("--imgsz", "the scale of Resize"),
        ("--lr0", "optim_wrapper=dict(optimizer=dict(lr=...)), or lr=... (--lr)"),
        ("--weights", "from_=... (--from)"),
    ],
)
def test_near_names_of_other_programs_are_answered(option, hint, capsys):
    with pytest.raises(SystemExit):
        main(["train", "--data", "x", option, "3"])
    assert f"for {option} write {hint}" in capsys.readouterr().err


def test_one_image_and_test_images_alone_are_refused(here):
    Image.new("RGB", (64, 48)).save(here / "0.png")
    (here / "0.csv").write_text("image,label,x1,y1,x2,y2\n0.png,bolt,1,2,30,40\n")
    with pytest.raises(
        UserError, match="its images are for train, and one for training and one for validation"
    ):
        config_for(here, _base_of("dino-small"), here / "run")
    folder = coco(here / "mine")
    for split in ("train", "valid"):
        (folder / split / "_annotations.coco.json").unlink()
    with pytest.raises(UserError, match=r"has nothing to train on: its images are for test|left out"):
        visdet.train(data=folder)


def test_the_command_takes_a_folder(here, stdout):
    options = ["--iters", "1", "--batch-size", "2", "--workers", "0", "--seed", "3"]
    main(["train", "small.py", "--data", str(yolo(here / "mine")), *options])
    assert "visdet infer work_dirs/mine/best.pth" in stdout()
