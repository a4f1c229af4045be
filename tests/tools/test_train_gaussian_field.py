"""tools/train.py on the gaussian_field configs: it fits, resumes, shards its points, and explains bad files."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from toolbox import ROOT, fail_here, succeed, succeed_here

from visdet.datasets import make_volume
from visdet.engine import read_checkpoint

CONFIGS = ROOT / "configs" / "gaussian_field"
SMALL = (
    "model.num_gaussians=20",
    "train_dataloader.batch_size=512",
    "train_cfg.max_iters=60",
    "train_cfg.val_interval=30",
    "default_hooks.logger.interval=30",
    "default_hooks.visualization.num_val_pictures=0",  # To draw one takes as long as 60 iterations.
)


def volume_options(path):
    return [f"{part}_dataloader.dataset.path={path}" for part in ("train", "val", "test")]


def train(monkeypatch, capsys, work_dir, config, *options, resume=False):
    arguments = [CONFIGS / f"{config}.py", "--work-dir", work_dir, *(["--resume"] if resume else [])]
    return succeed_here(monkeypatch, capsys, "train", *arguments, "--cfg-options", *SMALL, *options)


def weights_of(path):
    return read_checkpoint(str(path))["state_dict"]


def last_r2(printed):
    return float(printed.rsplit("field/r2", 1)[1].split()[0])


@pytest.fixture
def volume(tmp_path):
    path = tmp_path / "volume.npy"
    np.save(path, 300 * make_volume((16, 20, 12), num_blobs=4))
    return path


def test_fits_a_volume_and_resumes(monkeypatch, capsys, tmp_path, volume):
    options = volume_options(volume)
    pictures = "default_hooks.visualization.num_val_pictures=1"
    printed = train(monkeypatch, capsys, tmp_path / "whole", "gaussian-field_volume", *options, pictures)
    assert last_r2(printed) > 0.9
    assert "3840 points, batch 512 x 1 process, 60 iterations" in printed
    assert {p.name for p in (tmp_path / "whole" / "val_pictures").iterdir()} == {"iter_30.png", "iter_60.png"}
    with Image.open(tmp_path / "whole" / "val_pictures" / "iter_60.png") as sheet:
        assert min(sheet.size) >= 900, "three cuts of truth, fit and error"

    halves = tmp_path / "halves"
    halves.mkdir()
    whole = tmp_path / "whole"
    (halves / "iter_30.pth").write_bytes((whole / "iter_30.pth").read_bytes())
    (halves / "last_checkpoint").write_text(str(halves / "iter_30.pth"))
    train(monkeypatch, capsys, halves, "gaussian-field_volume", *options, resume=True)
    expected, found = weights_of(whole / "iter_60.pth"), weights_of(halves / "iter_60.pth")
    assert list(found) == ["means", "cov_tril", "weights"]
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_fits_point_samples(monkeypatch, capsys, tmp_path):
    points = np.random.default_rng(0).uniform(-50, 30, (5000, 3))
    values = np.exp(-0.5 * ((points - [-20, 0, -10]) ** 2).sum(1) / 12**2)
    np.savez(tmp_path / "samples.npz", points=points, values=values)
    printed = train(
        monkeypatch,
        capsys,
        tmp_path / "run",
        "gaussian-field_points",
        *volume_options(tmp_path / "samples.npz"),
        "model.use_full_cov=False",
    )
    assert last_r2(printed) > 0.9


def test_a_fitted_volume_is_tested_drawn_and_browsed(monkeypatch, capsys, tmp_path, volume):
    config, options = CONFIGS / "gaussian-field_volume.py", volume_options(volume)
    runner = ("train_cfg.max_iters=2", "train_cfg.val_interval=2")
    printed = train(monkeypatch, capsys, tmp_path / "run", config.stem, *options, *runner)
    tested = succeed_here(
        monkeypatch, capsys, "test", config, tmp_path / "run" / "iter_2.pth", "--work-dir", tmp_path / "test",
        "--out", tmp_path / "field.json", "--show-dir", tmp_path / "pictures",
        "--cfg-options", *SMALL, *options,
    )  # fmt: skip
    assert last_r2(tested) == last_r2(printed)
    (record,) = json.loads((tmp_path / "field.json").read_text())
    fitted = np.array(record["field"])
    truth = np.load(volume)
    error = np.square(fitted - truth / np.abs(truth).max()).mean()
    assert fitted.shape == (16, 20, 12)
    assert float(tested.rsplit("field/mse", 1)[1].split()[0]) == pytest.approx(error, rel=0.01)
    (picture,) = (tmp_path / "pictures").iterdir()
    with Image.open(picture) as drawn:
        assert drawn.size == (900, 900)

    folder = tmp_path / "browsed"
    arguments = (config, "--not-show", "--output-dir", folder, "--cfg-options", *options)
    succeed_here(monkeypatch, capsys, "browse", *arguments)
    assert sorted(path.name for path in folder.iterdir()) == ["00000_image.png", "sheet.png"]
    with Image.open(folder / "00000_image.png") as drawn:
        assert drawn.size == (300, 900), "the truth alone"


@pytest.mark.parametrize(
    "devices", [pytest.param("", id="cpu"), pytest.param("0,1", id="cuda", marks=pytest.mark.cuda(devices=2))]
)
def test_processes_share_the_points_and_reach_the_same_field(tmp_path, monkeypatch, capsys, volume, devices):
    options = ["--cfg-options", *SMALL, *volume_options(volume)]
    # Some of what k-means placed is spent by this measure, so that splits are part of the comparison.
    options += ["custom_hooks.1.interval=20", "custom_hooks.1.prune_below=0.5"]
    one, two = tmp_path / "one", tmp_path / "two"
    command = ("train", CONFIGS / "gaussian-field_volume.py", "--work-dir")
    single = succeed_here(monkeypatch, capsys, *command, one, *options)
    several = succeed(
        *command, two, *options, "train_dataloader.batch_size=256", processes=2, devices=devices
    )
    expected, found = weights_of(one / "iter_60.pth"), weights_of(two / "iter_60.pth")
    for name, value in expected.items():
        assert (found[name] - value).abs().max() < 1e-5 * value.abs().max(), name
    assert last_r2(several) == pytest.approx(last_r2(single), abs=1e-5)


@pytest.mark.parametrize(
    "array, message",
    [
        (np.full((3, 3, 3), 2.0), "has one value everywhere: there is nothing to fit"),
        (np.zeros((3, 0, 3)), "is empty"),
        (np.where(np.eye(3)[None], np.nan, 1.0), "3 NaN or infinite numbers"),
        (np.eye(3), r"must be [D0, D1, D2], got [3, 3]"),
    ],
    ids=["constant", "empty", "nan", "flat"],
)
def test_bad_volumes_are_explained(monkeypatch, capsys, tmp_path, array, message):
    path = Path(tmp_path) / "bad.npy"
    np.save(path, array)
    config = CONFIGS / "gaussian-field_volume.py"
    arguments = [config, "--work-dir", tmp_path / "run", "--cfg-options", *volume_options(path)]
    assert message in fail_here(monkeypatch, capsys, "train", *arguments)
