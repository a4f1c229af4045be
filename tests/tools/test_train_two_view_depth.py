"""The two-view depth config through the tools: it learns, writes pictures, and tests as it validated."""

import json

import pytest
from PIL import Image
from toolbox import ROOT, succeed_here

from visdet.engine import read_scalars

CONFIG = ROOT / "configs/sample_attention/two_view_depth_synthetic.py"
SMALL = [
    "train_dataloader.batch_size=2",
    "train_dataloader.dataset.image_size=[24,32]",
    "val_dataloader.dataset.image_size=[24,32]",
    "val_dataloader.dataset.num_pairs=4",
    "test_dataloader.dataset.image_size=[24,32]",
    "test_dataloader.dataset.num_pairs=4",
    "default_hooks.logger.interval=5",
    "log_processor.window_size=5",
]


def test_trains_draws_and_tests(tmp_path, monkeypatch, capsys):
    work_dir = tmp_path / "run"
    options = ["train_cfg.max_iters=40", "train_cfg.val_interval=20"]
    printed = succeed_here(
        monkeypatch, capsys, "train", CONFIG, "--work-dir", work_dir, "--cfg-options", *SMALL, *options
    )
    assert "two_view/abs_rel" in printed and "two_view/inverse_error_constant" in printed
    losses = read_scalars(str(work_dir))["loss"]
    assert losses[40] < 0.9 * losses[5], losses
    for name in ("iter_20.png", "iter_40.png"):
        with Image.open(work_dir / "val_pictures" / name) as sheet:
            assert sheet.width > 5 * 256 and sheet.height > 4 * 192

    last = list(read_scalars(str(work_dir))["two_view/abs_rel"].values())[-1]
    printed = succeed_here(
        monkeypatch, capsys, "test", CONFIG, work_dir / "iter_40.pth", "--work-dir", tmp_path / "test",
        "--out", tmp_path / "depth.json", "--show-dir", tmp_path / "pictures", "--cfg-options", *SMALL,
    )  # fmt: skip
    assert f"two_view/abs_rel {last:.4f}" in printed
    assert f"pictures: {tmp_path}/pictures" in printed
    assert len(list((tmp_path / "pictures").glob("*.png"))) == 4
    records = json.loads((tmp_path / "depth.json").read_text())
    assert [record["pair"] for record in records] == [0, 1, 2, 3]
    assert len(records[0]["depth"]) == 12 and len(records[0]["depth"][0]) == 16

    folder = tmp_path / "browsed"
    arguments = (CONFIG, "--not-show", "--split", "val", "--output-dir", folder, "--cfg-options", *SMALL)
    succeed_here(monkeypatch, capsys, "browse", *arguments)
    assert sorted(path.name for path in folder.iterdir()) == [
        *(f"0000{i}_image.png" for i in range(4)),
        "sheet.png",
    ]
    with Image.open(folder / "00000_image.png") as drawn:
        assert 3 * 256 < drawn.width < 4 * 256, "both views and the true depth"


@pytest.mark.slow
def test_learns_depth_from_a_second_view(tmp_path, monkeypatch, capsys):
    """In 250 iterations on small pairs, clearly more than the best constant knows."""
    options = [
        "train_cfg.max_iters=250", "train_cfg.val_interval=250", "train_dataloader.batch_size=8",
        "val_dataloader.dataset.num_pairs=32",
        "visualizer.name=learns",  # mmengine keeps one visualizer a name and process, with its first folder
    ]  # fmt: skip
    succeed_here(
        monkeypatch, capsys, "train", CONFIG, "--work-dir", tmp_path, "--cfg-options", *SMALL, *options
    )
    scalars = read_scalars(str(tmp_path))
    error = scalars["two_view/inverse_error"][250]
    assert error < 0.8 * scalars["two_view/inverse_error_constant"][250]
