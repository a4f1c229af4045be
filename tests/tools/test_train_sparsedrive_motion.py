"""SparseDrive's second stage on a few driving scenes: every key its losses need, training, evaluation, pictures."""

import numpy as np
import pytest
import torch
from datasets.driving_files import SMALL
from json_files import read_json
from mmengine.dataset import pseudo_collate
from small_driving import ITERATIONS, small_config
from toolbox import succeed_here

from visdet.engine import load_config, read_checkpoint, read_scalars
from visdet.models.sparsedrive.sample_batch import batch_of
from visdet.registry import DATASETS, MODELS


def test_the_pipeline_keeps_what_motion_and_planning_learn_from(tmp_path):
    cfg, _ = load_config(small_config(tmp_path, 2, load_from=None))
    dataset = DATASETS.build(cfg.train_dataloader.dataset)
    frames = [dataset[0], dataset[1]]
    batch = batch_of(
        MODELS.build(cfg.data_preprocessor)(pseudo_collate(frames), training=True)["data_samples"]
    )
    for name, shape in {
        "gt_ego_fut_trajs": (2, 6, 2),
        "gt_ego_fut_masks": (2, 6),
        "gt_ego_fut_cmd": (2, 3),
        "ego_status": (2, 10),
    }.items():
        assert batch[name].shape == shape and batch[name].dtype == torch.float32, name
    for trajectories, masks, boxes in zip(
        batch["gt_agent_fut_trajs"], batch["gt_agent_fut_masks"], batch["gt_bboxes_3d"], strict=True
    ):
        assert trajectories.shape == (len(boxes), 12, 2) and masks.shape == (len(boxes), 12)
    # The vehicle's steps are those between the poses of its frames.
    poses = [frame["data_samples"].T_global for frame in frames]
    step = (np.linalg.inv(poses[0]) @ poses[1])[:2, 3]
    assert batch["gt_ego_fut_trajs"][0, 0].tolist() == pytest.approx(step.tolist(), abs=1e-3)
    assert np.hypot(*step) > 0.5 and batch["gt_ego_fut_cmd"].sum(1).tolist() == [1, 1]


def test_both_stages_train_and_the_second_is_evaluated(tmp_path, monkeypatch, capsys):
    first = small_config(tmp_path, 1)
    printed = succeed_here(monkeypatch, capsys, "train", first, "--work-dir", tmp_path / "one")
    assert "NDS_no_attr" in printed and "AMOTA" in printed
    learned = tmp_path / "one" / f"iter_{ITERATIONS}.pth"

    second = small_config(tmp_path, 2, load_from=str(learned), param_scheduler=[])
    printed = succeed_here(monkeypatch, capsys, "train", second, "--work-dir", tmp_path / "two")
    scalars = read_scalars(str(tmp_path / "two"))
    for name in ("motion_loss_cls_0", "motion_loss_reg_0", "planning_loss_reg_0", "planning_loss_status_0"):
        values = list(scalars[name].values())
        assert len(values) == ITERATIONS and np.isfinite(values).all(), name
    assert sum(scalars["motion_loss_reg_0"].values()) > 0 < sum(scalars["planning_loss_reg_0"].values())
    for metric in ("NuScenes", "VectorMap", "Tracking", "Motion", "Planning"):
        assert any(name.startswith(f"{metric}/") for name in scalars), (metric, sorted(scalars))
    assert scalars["Planning/num_frames"][ITERATIONS] > 0
    assert (tmp_path / "two" / "val_pictures" / f"iter_{ITERATIONS}.png").stat().st_size > 10_000

    trained = tmp_path / "two" / f"iter_{ITERATIONS}.pth"
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
    assert sorted(path.name for path in out.iterdir()) == [
        "scene_000.gif",
        "scene_000_000.png",
        "scene_000_001.png",
    ]
