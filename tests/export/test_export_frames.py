"""Driving models exported with their state, frame by frame beside the model in Python."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import visdet
from visdet.engine.stages import StagedModel
from visdet.export.families import family_of
from visdet.export.formats import pt2
from visdet.registry import MODELS

sys.path.insert(0, str(Path(__file__).parents[1] / "models" / "sparsedrive"))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from drive import drive, frame_of
from test_frozen_perception import motion_frame, tiny_stage2
from tiny_driving import HEIGHT, WIDTH, tiny_config

# Seconds since the frame before: 2 Hz and 10 Hz, irregular times, a dropped frame, and pauses of another scene.
STEPS = [0.0, 0.5, 0.5, 0.1, 0.1, 0.1, 0.43, 0.61, 0.5, 1.0, 0.5, 2.6, 0.5, 0.5, 0.1, 0.5, 0.5, 0.5, 0.5, 0.5]
NEW_SCENE = 15  # the frame with which the second of two drives comes into another scene


def frames():
    """Yield the frames of two drives."""
    times = np.cumsum(STEPS)
    for index, time in enumerate(times):
        pose = np.eye(4)
        pose[:2, :2] = [
            [np.cos(0.02 * index), -np.sin(0.02 * index)],
            [np.sin(0.02 * index), np.cos(0.02 * index)],
        ]
        pose[1, 3] = 4 * time
        scenes = ["a", "b" if index < NEW_SCENE else "c"]
        yield motion_frame([1e9 + time] * 2, seed=index, poses=[pose] * 2, scenes=scenes)


@pytest.fixture(scope="module")
def model():
    model = tiny_stage2().eval()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if not name.endswith("ego_anchor"):  # It stands still in every checkpoint.
            parameter.data.add_(0.01 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.slow
def test_twenty_frames_with_state_equal_the_model(model, tmp_path):
    """examples/drive.py carries the state of the graph over twenty frames, identities included.

    Random weights double a difference with each frame: images that differ by 1e-7 move boxes by up to 1 mm.
    """
    report = visdet.export(model, tmp_path, "pt2", shape=(HEIGHT, WIDTH))
    assert "next_state.motion_plan.period" in report["differences"]["outputs"]
    family, staged, scenes = family_of(model, (HEIGHT, WIDTH), None), StagedModel(model), []
    given, found_ids = list(frames()), set()
    described = json.loads((tmp_path / "model.json").read_text())
    driven = drive(pt2.load(tmp_path), described, (frame_of(*frame, scenes) for frame in given))
    for (images, samples), outputs in zip(given, driven, strict=True):
        found = family.samples_of(outputs, [sample.clone() for sample in samples])
        with torch.no_grad():
            expected = staged.predictions(images, samples)
        for ours, theirs in zip(expected, found, strict=True):
            boxes, others = ours.pred_instances_3d, theirs.pred_instances_3d
            assert torch.equal(boxes.instance_ids, others.instance_ids)
            assert torch.equal(boxes.period, others.period)
            found_ids |= set(boxes.instance_ids.tolist())
            for name in ("boxes_3d", "scores_3d"):
                torch.testing.assert_close(boxes[name], others[name], rtol=1e-4, atol=1e-2)
            # Errors of the steps of a trajectory, which is up to 40 m long, add up.
            torch.testing.assert_close(boxes.trajs_3d, others.trajs_3d, rtol=1e-4, atol=3e-2)
            plans = ours.pred_plan.final_planning, theirs.pred_plan.final_planning
            torch.testing.assert_close(*plans, rtol=1e-4, atol=1e-2)
            np.testing.assert_allclose(ours.pred_map.vectors, theirs.pred_map.vectors, rtol=1e-4, atol=1e-2)
    assert len(found_ids) > 24  # The ids go on counting in a new scene.


@pytest.mark.slow
def test_sparse4d_in_standard_operators(tmp_path):
    pytest.importorskip("onnxscript", reason="extra export")
    pytest.importorskip("onnxruntime", reason="extra export")
    config = tiny_config()
    config = {**config, "type": "Sparse4D", "head": config["head"]["det_head"]}
    torch.manual_seed(0)
    model = MODELS.build(config)
    model.init_weights()
    report = visdet.export(model, tmp_path, "onnx", shape=(HEIGHT, WIDTH))
    differences = report["differences"]["outputs"]
    assert max(one["largest"] for one in differences.values()) < 1e-4
    assert {"results.instance_ids", "next_state.bank.cached_anchor"} <= set(differences)


def test_the_size_of_the_images_must_be_given(model, tmp_path):
    with pytest.raises(visdet.export.ExportError, match="--shape"):
        visdet.export(model, tmp_path)
