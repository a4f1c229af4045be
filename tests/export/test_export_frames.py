"""Driving models exported with their state, frame by frame beside the model in Python."""

import subprocess
import sys

import drive
import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from tiny_driving import HEIGHT, WIDTH, motion_frame, tiny_config, tiny_model, tiny_stage2
from torch.testing import assert_close

import visdet
from tests.fuzz.problem import generator_of
from visdet.engine.stages import StagedModel
from visdet.export.families import family_of
from visdet.registry import MODELS
from visdet.structures.poses import turn_about_z

# Seconds since the frame before: 2 Hz and 10 Hz, irregular times, a dropped frame, and pauses of another scene.
STEPS = [0.0, 0.5, 0.5, 0.1, 0.1, 0.1, 0.43, 0.61, 0.5, 1.0, 0.5, 2.6, 0.5, 0.5, 0.1, 0.5, 0.5, 0.5, 0.5, 0.5]
NEW_SCENE = 15  # the frame with which the second of two drives comes into another scene


def frames():
    """Yield the frames of two drives."""
    for index, time in enumerate(np.cumsum(STEPS)):
        pose = np.eye(4)
        pose[:2, :2] = turn_about_z(0.02 * index)
        pose[1, 3] = 4 * time
        scenes = ["a", "b" if index < NEW_SCENE else "c"]
        yield motion_frame([1e9 + time] * 2, seed=index, poses=[pose] * 2, scenes=scenes)


def with_random_weights(model):
    model = model.eval()
    generator = generator_of(0)
    for name, parameter in model.named_parameters():
        if not name.endswith("ego_anchor"):  # It stands still in every checkpoint.
            parameter.data.add_(0.01 * torch.randn(parameter.shape, generator=generator))
    return model


def shallow_decoder(part):
    """Leave two layers, the second of which does not sample, for less to compile."""
    part.update(operation_order=[*part["operation_order"][:-11], "refine"], num_decoder=2)
    return part


def shallow(head):
    """Leave two layers of each decoder, one of motion, and less of the encoder of boxes."""
    head.det_head.anchor_encoder.out_loops = 1
    shallow_decoder(head.det_head)
    shallow_decoder(head.map_head)
    head.motion_plan_head.operation_order = head.motion_plan_head.operation_order[-8:]


@pytest.mark.slow
@pytest.mark.timeout(1800)  # The compilation for C++ takes minutes on a busy machine.
@pytest.mark.parametrize(
    ("language", "device"),
    [("Python", "cpu"), ("C++", "cpu"), pytest.param("C++", "cuda", marks=pytest.mark.cuda)],
)
def test_twenty_frames_with_state_equal_the_model(language, device, request, tmp_path):
    """The programs carry the state of the graph over twenty frames, identities included.

    Random weights double a difference with each frame: images that differ by 1e-7 move boxes by up to 1 mm.
    """
    if language == "C++":
        program, format = [request.getfixturevalue("program")("drive")], "aoti"
    else:
        program, format = [sys.executable, drive.__file__, "run"], "pt2"
    model = with_random_weights(tiny_stage2(shallow)).to(device)
    exported, found = tmp_path / "exported", tmp_path / "found"
    report = visdet.export(
        model,
        exported,
        format,
        shape=(HEIGHT, WIDTH),
        batch=2 if format == "aoti" else None,  # A batch of any number takes Inductor twice as long.
    )
    assert "next_state.det.bank.cached_anchor" in report["differences"]["outputs"]
    given, scenes, paths = list(frames()), [], []
    for index, frame in enumerate(given):
        paths.append(tmp_path / f"{index:03}.pt")
        torch.save(drive.frame_of(*frame, scenes), paths[-1])
    found.mkdir()

    def drives(*paths):
        return subprocess.run([*program, exported, found, *paths], capture_output=True, text=True)

    done = drives(*paths)
    assert done.returncode == 0, done.stderr
    if language == "C++":
        frame = torch.load(paths[0])
        frame["images"] = frame["images"][..., ::2]
        torch.save(frame, tmp_path / "small.pt")
        small = drives(tmp_path / "small.pt")
        assert small.returncode == 1 and "images has the sizes" in small.stderr
    family, staged, found_ids = family_of(model, (HEIGHT, WIDTH), None), StagedModel(model), set()
    for (images, samples), path in zip(given, paths, strict=True):
        outputs = dict(torch.load(found / path.name))
        theirs_of = family.samples_of(outputs, [sample.clone() for sample in samples])
        with torch.no_grad():
            expected = [
                s.cpu() for s in staged.predictions(images.to(device), [s.to(device) for s in samples])
            ]
        for ours, theirs in zip(expected, theirs_of, strict=True):
            boxes, others = ours.pred_instances_3d, theirs.pred_instances_3d
            assert torch.equal(boxes.instance_ids, others.instance_ids)
            found_ids |= set(boxes.instance_ids.tolist())
            for name in ("boxes_3d", "scores_3d"):
                assert_close(boxes[name], others[name], rtol=1e-4, atol=1e-2)
            assert_allclose(ours.pred_map.vectors, theirs.pred_map.vectors, rtol=1e-4, atol=1e-2)
            assert torch.equal(boxes.period, others.period)
            # Errors of the steps of a trajectory, which is up to 40 m long, add up.
            assert_close(boxes.trajs_3d, others.trajs_3d, rtol=1e-4, atol=3e-2)
            plans = ours.pred_plan.final_planning, theirs.pred_plan.final_planning
            assert_close(*plans, rtol=1e-4, atol=1e-2)
    assert len(found_ids) > 24  # The ids go on counting in a new scene.


def test_images_of_another_size_are_refused():
    family = family_of(tiny_stage2(shallow), (HEIGHT, WIDTH), 2)
    images, samples = next(frames())
    with pytest.raises(visdet.export.ExportError, match="outside the exported range"):
        family.inputs_of(images[..., ::2], samples)


@pytest.mark.slow
def test_sparse4d_in_standard_operators(tmp_path):
    pytest.importorskip("onnxscript", reason="extra export")
    pytest.importorskip("onnxruntime", reason="extra export")
    onnx = pytest.importorskip("onnx", reason="extra export")
    config = tiny_config()
    config = {**config, "type": "Sparse4D", "head": shallow_decoder(config["head"]["det_head"])}
    torch.manual_seed(0)
    model = MODELS.build(config)
    model.init_weights()
    report = visdet.export(model, tmp_path, "onnx", shape=(HEIGHT, WIDTH), batch=1)
    differences = report["differences"]["outputs"]
    assert max(one["largest"] for one in differences.values()) < 1e-4
    assert {"results.instance_ids", "next_state.bank.cached_anchor"} <= set(differences)
    kinds = {node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node}
    assert not kinds & {"IsInf", "IsNaN", "GatherElements"}


def test_the_size_of_the_images_must_be_given(tmp_path):
    with pytest.raises(visdet.export.ExportError, match="--shape"):
        visdet.export(tiny_model(), tmp_path)
