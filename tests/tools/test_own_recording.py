"""A recording of one's own, from docs/driving_data.md to a trained model, by following the page alone."""

import pytest
from datasets.own_recording import CAMERAS, NAMES, code_blocks, write_recording
from json_files import read_json
from PIL import Image
from toolbox import ROOT, fail_here, succeed_here

from visdet.datasets import load_infos, save_infos

SHORT = (
    "train_cfg.max_iters=2",
    "train_cfg.val_interval=2",
    "train_dataloader.num_workers=0",
    "val_dataloader.num_workers=0",
    "test_dataloader.num_workers=0",
    "param_scheduler=[]",
)


@pytest.fixture
def recording(tmp_path, monkeypatch):
    """Follow the first and third step of the page in an empty working directory, and return the config."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs/sparsedrive").mkdir(parents=True)
    (tmp_path / "configs/_base_").symlink_to(ROOT / "configs/_base_")
    write_recording(tmp_path, {"train": 2, "val": 1})
    config = tmp_path / "configs/sparsedrive/my_recording.py"
    config.write_text(code_blocks()[1])
    return config


def changed(config, *changes):
    text = config.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    config.write_text(text)


@pytest.mark.slow
def test_the_page_leads_to_a_trained_model(recording, monkeypatch, capsys):
    config = "configs/sparsedrive/my_recording.py"
    printed = succeed_here(
        monkeypatch,
        capsys,
        "prepare-nuscenes",
        "--check",
        "data/mine/infos_train.npz",
        "--data-root",
        "data/mine",
    )
    # What the check prints for the config is what the page's config says.
    assert f"class_names = {list(NAMES)}" in printed and f"num_cameras = {len(CAMERAS)}" in printed
    assert "image_width, image_height = 256, 96" in printed and "deer 8 (8 used)" in printed
    printed = succeed_here(monkeypatch, capsys, "make-anchors", config)
    assert "[128, 11] from 8 frames" in printed and "[30, 20, 2] from 8 frames" in printed
    succeed_here(monkeypatch, capsys, "train", config, "--cfg-options", *SHORT)
    checkpoint = "work_dirs/my_recording/iter_2.pth"
    options = ("--out", "results.json", "--cfg-options", *SHORT)
    printed = succeed_here(monkeypatch, capsys, "test", config, checkpoint, *options)
    assert "deer" in printed and "lorry" in printed
    frames = read_json(recording.parents[2] / "results.json")
    assert [frame["token"] for frame in frames] == [f"val-drive-0-000{number}" for number in range(4)]
    drawing = ("--scenes", "0", "--max-frames", "1", "--out-dir", "pictures")
    succeed_here(monkeypatch, capsys, "visualize-driving", config, checkpoint, *drawing)
    with Image.open("pictures/scene_000_000.png") as picture:
        assert picture.width == 3 * 384  # five cameras in two rows


@pytest.mark.slow
def test_a_model_that_does_not_fit_the_recording_is_one_message(recording, monkeypatch, capsys):
    config = "configs/sparsedrive/my_recording.py"
    page = recording.read_text()

    def message(old, new):
        recording.write_text(page)
        changed(recording, (old, new))
        return fail_here(monkeypatch, capsys, "train", config, "--cfg-options", *SHORT)

    assert "training needs the anchor file data/mine/anchors_det.npy" in message(
        "num_cameras = 5", "num_cameras = 5"
    )
    succeed_here(monkeypatch, capsys, "make-anchors", config)
    assert "must have 6 cameras (num_cameras), got 5" in message("num_cameras = 5", "num_cameras = 6")
    assert (
        "model.head.det_head.deformable_model.num_cams is for 6 cameras, but train_dataloader.dataset has 5"
        in (message("cameras = dict(num_cams=num_cameras)", "cameras = dict(num_cams=6)"))
    )
    assert (
        "model.head.det_head.refine_layer.num_cls is for 5 classes, but train_dataloader.dataset has 3"
        in message("    refine_layer=dict(num_cls=len(class_names)),\n", "")
    )
    twice = "dict(type='NormalizeMultiviewImage', mean=(0, 0, 0), std=(1, 1, 1))"
    assert "train_dataloader would be normalised twice" in message(
        "visualizer =", f"train_dataloader['dataset']['pipeline'] = [{twice}]\nvisualizer ="
    )
    lorries = "dict(type='InstanceNameFilter', classes=['lorry'])"
    assert "InstanceNameFilter of train_dataloader is for the classes ['lorry'], but" in message(
        "visualizer =", f"train_dataloader['dataset']['pipeline'] = [{lorries}]\nvisualizer ="
    )
    assert "NuScenesMetric: class_range must name deer" in message(
        "visualizer =", "val_evaluator = [dict(type='NuScenesMetric')]\nvisualizer ="
    )


def test_the_check_names_what_is_wrong_in_a_file(recording, monkeypatch, capsys):
    folder = recording.parents[2] / "data/mine"
    arguments = ("--check", "data/mine/infos_train.npz", "--data-root", "data/mine")
    picture = folder / "pictures/train/1-2-left.png"
    Image.new("RGB", (128, 96)).save(picture)
    message = fail_here(monkeypatch, capsys, "prepare-nuscenes", *arguments)
    assert (
        "frame train-drive-1-0002" in message
        and "is 128 x 96 pixels, but other images are 256 x 96" in message
    )
    picture.write_bytes(b"no image")
    assert "cannot read image data/mine/pictures/train/1-2-left.png" in fail_here(
        monkeypatch, capsys, "prepare-nuscenes", *arguments
    )
    picture.unlink()
    assert "data_path of left: image data/mine/pictures/train/1-2-left.png does not exist" in fail_here(
        monkeypatch, capsys, "prepare-nuscenes", *arguments
    )


def test_the_check_counts_map_lines_beyond_the_region(recording, monkeypatch, capsys):
    infos = list(load_infos("data/mine/infos_train.npz")[0])
    lines = {1: [[[2.0, -9], [2, 9]], [[2.0, -90], [2, 90]], [[500.0, 0], [600, 0]], [[40.0, 1], [40, 2]]]}
    save_infos("data/mine/infos_train.npz", [info | {"map_annos": lines} for info in infos], {})
    arguments = ("--check", "data/mine/infos_train.npz", "--data-root", "data/mine")
    printed = succeed_here(monkeypatch, capsys, "prepare-nuscenes", *arguments)
    assert "map lines: 32, of which 8 are cut and 16 left out" in printed and "30 x 60 m" in printed


def test_anchors_of_nothing_are_not_made(recording, monkeypatch, capsys):
    config = "configs/sparsedrive/my_recording.py"
    infos = list(load_infos("data/mine/infos_train.npz")[0])
    for change, expected in (
        ({"map_annos": {1: []}}, "none of 8 frames has a line in map_annos"),
        ({"gt_boxes": [], "gt_names": [], "instance_inds": []}, "none of 8 frames has a box within 55.0 m"),
        ({"gt_boxes": None, "gt_names": None}, "frame train-drive-0-0000: gt_boxes is missing"),
    ):
        save_infos("data/mine/infos_train.npz", [info | change for info in infos], {})
        message = fail_here(monkeypatch, capsys, "make-anchors", config)
        assert expected in message and "infos_train.npz" in message
