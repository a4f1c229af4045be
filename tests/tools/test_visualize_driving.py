"""Driving scenes drawn by the tool."""

import pathlib

import pytest
import torch
from datasets.driving_files import SMALL, driving_scenes
from disk import names_in
from mmengine.config import Config
from PIL import Image
from toolbox import ROOT, fail_here, succeed_here

from visdet.engine import CheckpointError
from visdet.registry import MODELS

BASE = str(ROOT / "configs/_base_/datasets/driving_scenes.py")


def test_scenes_are_drawn_without_a_model(tmp_path, monkeypatch, capsys):
    config = tmp_path / "config.py"
    dataset = dict(data_root=driving_scenes(), generator=SMALL, data_aug_conf=None)
    config.write_text(f"_base_ = {BASE!r}\ntest_dataloader = {dict(dataset=dataset)!r}\n")
    out = tmp_path / "out"
    options = ("--out-dir", out, "--scenes", 1, "--max-frames", 2)
    printed = succeed_here(monkeypatch, capsys, "visualize-driving", config, *options)
    assert "wrote 2 pictures" in printed
    assert names_in(out) == [
        "scene_001.gif",
        "scene_001_000.png",
        "scene_001_001.png",
    ]
    with Image.open(out / "scene_001_000.png") as picture:
        assert picture.width == 3 * 384
    message = fail_here(monkeypatch, capsys, "visualize-driving", config, "--scenes", 5)
    assert "numbers from 0 to 1, as the data set has 2 scenes, got 5" in message


def test_the_frames_of_a_data_set_are_browsed(tmp_path, monkeypatch, capsys):
    config = tmp_path / "config.py"
    dataset = dict(data_root=driving_scenes(), generator=SMALL)
    config.write_text(
        f"_base_ = {BASE!r}\nval_dataloader = {dict(dataset=dataset)!r}\n"
        "visualizer = dict(type='DrivingVisualizer')\n"
    )
    out = tmp_path / "out"
    options = ("--not-show", "--split", "val", "--number", 3, "--output-dir", out)
    succeed_here(monkeypatch, capsys, "browse", config, *options)
    names = [f"0000{i}_val-0000-0{i}.png" for i in range(3)]
    assert names_in(out) == [*names, "sheet.png"]
    with Image.open(out / "sheet.png") as sheet, Image.open(out / names[0]) as picture:
        assert sheet.width > 2 * picture.width and picture.width == 3 * 384


def test_trust_is_the_configs(tmp_path):
    from visdet.commands.visualize_driving import load_model

    model = {"type": "ResNet", "depth": 18, "base_channels": 4}
    checkpoint = str(tmp_path / "foreign.pth")
    foreign = pathlib.PurePosixPath  # a class is no plain value
    torch.save({"state_dict": MODELS.build(model).state_dict(), "extra": foreign}, checkpoint)
    with pytest.raises(CheckpointError, match="trust_checkpoint=True"):
        load_model(Config({"model": model}), checkpoint, {})
    trusted, (thresholds, _) = load_model(Config({"model": model, "trust_checkpoint": True}), checkpoint, {})
    assert not trusted.training and not thresholds
