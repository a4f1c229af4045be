"""The detector as a whole: temporal state, training, empty targets, errors."""

import math
import warnings

import numpy as np
import pytest
import torch
from refused import assert_refused
from tiny_driving import NUM_DET, frame, tiny_config, tiny_model
from torch.testing import assert_close
from training_steps import are_finite, backward, without_gradient

from visdet.engine.stages import StagedModel
from visdet.models.sparsedrive import SparseDrive
from visdet.models.sparsedrive.sample_batch import batch_of
from visdet.registry import MODELS
from visdet.structures import DrivingDataSample


def raw(model, images, data, state=None):
    """Return the head's outputs as one flat dict of tensors, and the state after the frame."""
    with torch.no_grad():
        (det, lines, *_), state = model.step(images, data, state)
    out = {}
    for name, outs in (("det", det), ("map", lines)):
        for key, value in (outs or {}).items():
            for i, tensor in enumerate(value if isinstance(value, list) else [value]):
                if tensor is not None and key != "instance_id":
                    out[f"{name}.{key}.{i}"] = tensor
    return out, state


def test_a_batch_of_two_sequences_equals_two_single_runs():
    model = tiny_model().eval()
    both, single = None, [None, None]
    scenes = [
        ("a", "x"),
        ("a", "x"),
        ("b", "x"),
        ("b", "x"),
    ]  # the first sample's scene ends after two frames
    for i, pair in enumerate(scenes):
        times, poses = [0.5 * i, 3 + 0.4 * i], [np.eye(4), np.eye(4)]
        poses[0][1, 3], poses[1][0, 3] = 2.0 * i, -1.0 * i
        images, data = frame(times, seed=[(i, 0), (i, 1)], scenes=pair, poses=poses)
        together, both = raw(model, images, data, both)
        assert both.clock.scene == pair
        for sample in range(2):
            alone_images, alone_data = frame(
                times[sample : sample + 1],
                seed=[(i, sample)],
                scenes=pair[sample : sample + 1],
                poses=poses[sample : sample + 1],
            )
            assert torch.equal(alone_images[0], images[sample])
            alone, single[sample] = raw(model, alone_images, alone_data, single[sample])
            for name, value in alone.items():
                assert_close(together[name][sample], value[0], atol=2e-4, rtol=2e-4, msg=name)
        if i == 2:
            fresh, _ = raw(model, *frame(times[:1], seed=[(i, 0)], poses=poses[:1]))
            for name, value in fresh.items():
                assert_close(together[name][0], value[0], atol=2e-4, rtol=2e-4, msg=name)


def test_the_model_keeps_nothing_and_frames_without_a_state_have_no_ids():
    model = tiny_model().eval()
    (first,), (second,) = (model(*frame([time], seed=0), mode="predict") for time in (0.0, 0.5))
    boxes = [one.pred_instances_3d for one in (first, second)]
    assert torch.equal(boxes[0].scores_3d, boxes[1].scores_3d)
    assert all((one.instance_ids == -1).all() for one in boxes)
    staged = StagedModel(model)
    (first,), (second,) = (staged.predictions(*frame([time], seed=0)) for time in (0.0, 0.5))
    linked = set(first.pred_instances_3d.instance_ids.tolist()) & set(
        second.pred_instances_3d.instance_ids.tolist()
    )
    assert linked - {-1}


def test_the_state_survives_a_checkpoint(tmp_path):
    model = tiny_model()
    staged = StagedModel(model)
    staged.losses(*frame([0.0], scenes=["a"]))
    torch.save(model.plain_state(staged.state), tmp_path / "state.pth")
    other = StagedModel(model)
    other.state = model.state_of_plain(torch.load(tmp_path / "state.pth", weights_only=True))
    outcomes = []
    for one in (staged, other):
        before = one.state
        torch.manual_seed(0)
        outcomes.append(one.losses(*frame([0.5], seed=1, scenes=["a"])))
        one.state = before
    assert_close(*outcomes, rtol=0, atol=0)
    assert len(outcomes[0]) > 20
    assert_older_checkpoints_load(model, staged.state)
    with pytest.raises(ValueError, match="unknown 'Elsewhere'"):
        model.state_of_plain({"kind": "Elsewhere"})


def assert_older_checkpoints_load(model, state):
    """Load the state in the form in which each bank had a clock of its own."""
    plain = model.plain_state(state)
    older = dict(plain["head"])
    for name, part in older.items():
        older[name] = {**part, "bank": {**part["bank"], "clock": plain["clock"], "frame": None}}
    again = model.state_of_plain(older)
    assert again.clock.scene == state.clock.scene
    assert torch.equal(*[one.head["det"].bank.cached_anchor for one in (again, state)])


def test_every_parameter_gets_a_gradient_whatever_the_targets():
    for num_boxes, num_lines in (([4, 3], [3, 2]), ([0, 2], [0, 1]), ([0, 0], [0, 0])):
        model = tiny_model()
        staged = StagedModel(model)
        for time, seed in ((0.0, 0), (0.5, 1)):
            model.zero_grad()
            images, data = frame([time] * 2, seed, num_boxes=num_boxes, num_lines=num_lines)
            losses = staged.losses(images, data)
            backward(losses)
            frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
            assert without_gradient(model) == frozen


def test_no_depth_ground_truth():
    model = tiny_model()
    images, (sample,) = frame([0.0])
    del sample.gt_depth
    loss = model(images, [sample], mode="loss")["loss_dense_depth"]
    assert float(loss.detach()) == 0 and loss.requires_grad


def test_denoising_over_frames_with_changing_numbers_of_boxes():
    staged = StagedModel(tiny_model())
    for i, count in enumerate((3, 1, 5, 0, 2)):
        assert are_finite(staged.losses(*frame([0.5 * i], seed=i, num_boxes=[count])))
        carried = staged.state.head["det"].denoising
        assert (carried is None) == (count == 0)
        if carried is not None:
            assert carried["dn_anchor"].shape[:3] == (1, 2, 2 * count)


def test_a_forward_pass_in_training_never_sees_the_ground_truth():
    model = tiny_model()
    images, (sample,) = frame([0.0])
    blind = DrivingDataSample(metainfo={k: v for k, v in sample.metainfo.items() if k != "instance_id"})
    for name, value in sample.items():
        if not name.startswith("gt_"):
            blind.set_field(value, name)
    with torch.no_grad():
        detection, lines = model(images, [blind], mode="tensor")[:2]
    assert "dn_prediction" not in detection and len(detection["prediction"]) == len(lines["prediction"]) > 0


def test_denoising_queries_are_invisible_to_the_others():
    model = tiny_model()
    for module in model.modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            module.eval()
    images, samples = frame([0.0])
    data = batch_of(samples)
    with torch.no_grad():
        queries = model.head.denoising_queries(data)
        (with_dn, *_), _ = model.head(model.extract_feat(images), data, denoising=queries)
        without = model(images, samples, mode="tensor")[0]
    assert "dn_prediction" in with_dn and "dn_prediction" not in without
    last = with_dn["prediction"][-1]
    assert last.shape == (1, NUM_DET, 11)
    assert_close(last, without["prediction"][-1], atol=1e-4, rtol=1e-4)


def test_sparse4d_alone():
    config = tiny_config()
    config = {**config, "type": "Sparse4D", "head": config["head"]["det_head"]}
    model = MODELS.build(config)
    model.init_weights()
    assert "det_loss_cls_dn_0" in model.train()(*frame([0.0]), mode="loss")
    (result,) = model.eval()(*frame([0.0]), mode="predict")
    assert len(result.pred_instances_3d) == NUM_DET


def test_bfloat16_stays_close_and_boxes_stay_float32():
    model = tiny_model().eval()
    images, data = frame([0.0])
    with torch.no_grad():
        exact = model(images, data, mode="tensor")[0]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rough = model(images, data, mode="tensor")[0]
            losses = model.train()(images, data, mode="loss")
    assert rough["prediction"][-1].dtype == torch.float32
    assert float((rough["prediction"][0] - exact["prediction"][0]).abs().max()) < 0.3
    assert all(loss.dtype == torch.float32 and loss.isfinite() for loss in losses.values())


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, None), (torch.float16, torch.bfloat16)], ids=str)
def test_a_sequence_goes_on_with_another_type_of_autocast(dtypes):
    """A run that is resumed may have another precision than the one that saved its temporal state."""
    staged = StagedModel(tiny_model())
    for time, dtype in enumerate(dtypes):
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            losses = staged.losses(*frame([0.5 * time]))
        backward(losses)
    assert staged.state.head["det"].bank.history == (True,)


def test_nan_in_annotations_gives_finite_losses():
    model = tiny_model()
    images, data = frame([0.0])
    data[0].gt_bboxes_3d[1, 7:] = math.nan
    data[0].gt_bboxes_3d[2, 3:6] = 0.0
    assert are_finite(model(images, data, mode="loss"))


@pytest.mark.parametrize(("name", "count"), [("gt_labels_3d", 5), ("gt_map_labels", 3)])
@pytest.mark.parametrize("is_negative", [True, False])
def test_labels_must_be_classes(name, count, is_negative):
    model = tiny_model()
    images, samples = frame([0.0, 0.0], num_boxes=[0, 2], num_lines=[0, 2])
    wrong = -1 if is_negative else count
    setattr(samples[1], name, torch.tensor([0, wrong]))
    message = (
        rf"data_samples\[1\].{name} must lie in 0..{count - 1}, got \[{min(0, wrong)}, {max(0, wrong)}\]"
    )
    with pytest.raises(ValueError, match=message):
        model(images, samples, mode="loss")


def test_errors_say_what_is_wrong():
    model = tiny_model().eval()
    images, data = frame([0.0])
    fewer = data[0].clone()
    fewer.projection_mat, fewer.image_wh = fewer.projection_mat[:3], fewer.image_wh[:3]
    assert_refused(
        TypeError,
        (
            lambda: model(images[0], data),
            r"inputs must be a \[B, V, 3, H, W\] tensor, got \(6, 3, 32, 64\)",
        ),
        (lambda: model([images], data), r"inputs must be a \[B, V, 3, H, W\] tensor, got list"),
    )
    other = data[0].clone()
    del other.gt_labels_3d
    assert_refused(
        ValueError,
        (
            lambda: model(images[:, :3], [fewer], mode="tensor"),
            r"projection_mat must be of 6 cameras, .* got \(3, 3, 3\)",
        ),
        (
            lambda: model(images, data, mode="test"),
            "mode must be 'tensor', 'predict' or 'loss', got 'test'",
        ),
        (lambda: model(images), "data_samples with the cameras and poses are needed"),
        (
            lambda: model(images.expand(2, -1, -1, -1, -1), [data[0], other]),
            r"must all have gt_labels_3d; frames \[.+\] do not",
        ),
        (lambda: SparseDrive({}, {}, train_cfg={"a": 1}), "SparseDrive: train_cfg must be None"),
        (
            lambda: MODELS.build(
                {"type": "SparseDriveHead", "task_config": {"with_det": True, "with_motion_plan": True}}
            ),
            "with_motion_plan needs with_det and with_map",
        ),
        (
            lambda: MODELS.build({"type": "SparseDriveHead", "task_config": {}}),
            "task_config must have a task",
        ),
        (lambda: tiny_model(head__map_head__task_prefix="det"), "task_prefix of det_head and map_head must"),
    )
    config = tiny_config().head.det_head
    config.operation_order = ["gnn", "sum"]
    with pytest.raises(ValueError, match=r"operation_order"):
        MODELS.build(config)


@pytest.mark.cuda
def test_a_training_step_waits_for_the_device_nowhere():
    staged = StagedModel(tiny_model().cuda())

    def step(i):
        images, data = frames[i]
        sum(staged.losses(images, data).values()).backward()

    frames = [frame([0.5 * i], seed=i) for i in range(3)]
    frames = [
        (images.cuda(), [sample.with_inputs_on("cuda") for sample in samples]) for images, samples in frames
    ]
    step(0)
    step(1)  # with a frame before it
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step(2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [f"{w.filename}:{w.lineno}" for w in caught if "synchronizing CUDA operation" in str(w.message)]
    # The GPU solves the assignments. The denoising queries are matched with annotations on the host.
    assert waits == []
