"""SparseDrive's second stage on a few driving scenes: every key its losses need, training, evaluation, pictures."""

import numpy as np
import torch
from datasets.driving_files import SMALL
from disk import names_in
from json_files import read_json
from small_driving import ITERATIONS, small_config
from toolbox import succeed_here

from visdet.engine import read_checkpoint, read_scalars


def test_both_stages_train_and_the_second_is_evaluated(tmp_path, monkeypatch, capsys):
    two = tmp_path / "two"
    first = small_config(tmp_path, 1)
    printed = succeed_here(monkeypatch, capsys, "train", first, "--work-dir", tmp_path / "one")
    assert "NDS_no_attr" in printed and "AMOTA" in printed
    learned = tmp_path / "one" / f"iter_{ITERATIONS}.pth"

    second = small_config(tmp_path, 2, load_from=str(learned), param_scheduler=[])
    printed = succeed_here(monkeypatch, capsys, "train", second, "--work-dir", two)
    scalars = read_scalars(str(two))
    for name in ("motion_loss_cls_0", "motion_loss_reg_0", "planning_loss_reg_0", "planning_loss_status_0"):
        values = list(scalars[name].values())
        assert len(values) == ITERATIONS and np.isfinite(values).all(), name
    assert sum(scalars["motion_loss_reg_0"].values()) > 0 < sum(scalars["planning_loss_reg_0"].values())
    for metric in ("NuScenes", "VectorMap", "Tracking", "Motion", "Planning"):
        assert any(name.startswith(f"{metric}/") for name in scalars), (metric, sorted(scalars))
    assert scalars["Planning/num_frames"][ITERATIONS] > 0
    assert (two / "val_pictures" / f"iter_{ITERATIONS}.png").stat().st_size > 10_000

    trained = two / f"iter_{ITERATIONS}.pth"
    before, after = (read_checkpoint(path)["state_dict"] for path in (learned, trained))
    assert {name for name in after if name not in before} == {
        name for name in after if name.startswith("head.motion_plan_head.")
    }
    # The second stage leaves what the first has learned.
    assert all(torch.equal(after[name], value) for name, value in before.items())

    drawn, records = tmp_path / "drawn", tmp_path / "frames.json"
    options = ("--work-dir", tmp_path / "test", "--out", records, "--show-dir", drawn)
    succeed_here(monkeypatch, capsys, "test", second, trained, *options)
    frames = read_json(records)
    assert len(frames) == SMALL["num_test"] * SMALL["num_frames"]
    assert sorted(path.stem for path in drawn.iterdir()) == sorted(frame["token"] for frame in frames)
    assert all({"boxes", "lines", "plan"} <= set(frame) for frame in frames)
    assert np.shape([frame["plan"] for frame in frames]) == (len(frames), 6, 2)

    out = tmp_path / "pictures"
    succeed_here(
        monkeypatch, capsys, "visualize-driving", second, trained, "--out-dir", out, "--max-frames", 2
    )
    assert names_in(out) == [
        "scene_000.gif",
        "scene_000_000.png",
        "scene_000_001.png",
    ]
