"""Motion and planning: golden vectors, targets and collisions by hand, and state."""

import math

import numpy as np
import pytest
import torch
from refused import assert_refused
from sparsedrive_golden import close, decoded, module_case
from torch.testing import assert_close

from tests.fuzz.problem import generator_of
from visdet.models.sparsedrive import (
    HierarchicalPlanningDecoder,
    InstanceQueue,
    InstanceQueueState,
    SparseBox3DKeyPointsGenerator,
)
from visdet.models.sparsedrive.motion.motion_decoder import _yaws
from visdet.models.sparsedrive.motion.motion_planning_head import (
    MotionPlanningHead,
)
from visdet.models.sparsedrive.temporal.frame_clock import FrameClock
from visdet.structures.poses import turn_about_z


@pytest.mark.parametrize("variant", ["corrected", "no_rescore"])
def test_planning_decoder_matches_golden(variant):
    # "original" shifts the ego's box in two rows instead of two columns: ours is "corrected".
    config, _, given, expected = module_case("HierarchicalPlanningDecoder")
    decoder = HierarchicalPlanningDecoder(**{**config, "use_rescore": variant == "corrected"})
    results = decoded(
        decoder,
        {"classification": [given["det_classification"]], "prediction": [given["det_anchors"]]},
        {"classification": [given["motion_classification"]], "prediction": [given["motion_prediction"]]},
        {
            "classification": [given["planning_classification"]],
            "prediction": [given["planning_prediction"]],
            "anchor_queue": list(given["planning_anchor_queue"].unbind(2)),
            "period": given["ego_period"],
        },
        given,
    )
    for i, result in enumerate(results):
        for name, value in result.items():
            close(value, expected[f"{variant}/{i}/{name}"])


def test_an_agent_that_stands_keeps_its_heading():
    paths = torch.tensor([[[1, -1], [0.3, 0.3]], [[1, 1], [2, 2]]])
    turned = math.pi / 4
    expected = torch.tensor([[2.0, 2], [turned, turned]])
    assert_close(_yaws(paths, torch.tensor([2.0, 0.0])), expected)


def make_queue(**changes):
    torch.manual_seed(0)
    return InstanceQueue(8, **{"queue_length": 3, "tracking_threshold": 0.2, **changes}).eval()


def queue_frame(ids, time, seed, scene="a"):
    """Return (det_output, maps, metas) of one sample."""
    generator = generator_of(seed)
    count = len(ids)
    det = {
        "instance_feature": torch.randn(1, count, 8, generator=generator),
        "prediction": [torch.randn(1, count, 11, generator=generator)],
        "classification": [torch.full((1, count, 2), 2.0)],
        "instance_id": torch.tensor([ids]),
    }
    maps = [torch.randn(1, 6, 8, 4, 6, generator=generator)]
    pose = np.eye(4)
    meta = {"T_global": pose, "T_global_inv": pose, "scene_token": scene}
    return det, maps, {"img_metas": [meta], "timestamp": [time]}


def run_queue(queue, frames, before=None):
    """Return the outputs of each (frame, continues), and the state and the clock after the last one."""
    outs, (state, clock) = [], before or (None, None)
    for (det, maps, metas), continues in frames:
        now = FrameClock.of(metas)
        step, clock = now.since(clock), now
        if step is not None:
            step, _ = step.entered(math.inf if continues else -1.0, 0.0, torch.device("cpu"), torch.float32)
        *got, state = queue.get(state, det, maps, step, SparseBox3DKeyPointsGenerator)
        got.append(queue.ego_motion_embed(state))
        state = queue.cache(state, det, torch.zeros(1, 1, 8), torch.full((1, 1, 10), 4.0))
        outs.append(got)
    return outs, (state, clock)


def test_queue_follows_ids():
    queue = make_queue()
    first, second = queue_frame([5, -1, 7], 0.0, 0), queue_frame([7, 5, -1], 0.5, 1)
    (_, (_, ego_anchor, features, _, is_absent, _)), (state, _) = run_queue(
        queue, [(first, True), (second, True)]
    )
    assert features.shape == (1, 4, 2, 8)
    assert_close(features[0, 0, 0], first[0]["instance_feature"][0, 2])
    assert_close(features[0, 1, 0], first[0]["instance_feature"][0, 0])
    assert is_absent[0].tolist() == [[False, False], [False, False], [True, False], [False, False]]
    assert state.period.tolist() == [[2, 2, 1]]
    assert ego_anchor[0, 0, 9].item() == 4.0  # the speed predicted in the frame before


def test_queue_forgets_the_oldest_and_goes_on_from_any_state():
    frames = [(queue_frame([1, 2], 0.5 * i, i), True) for i in range(5)]
    queue = make_queue()
    outs, kept = run_queue(queue, frames[:4])
    assert outs[-1][2].shape[2] == 3
    (expected,), _ = run_queue(queue, frames[4:], kept)
    run_queue(queue, frames[:2])
    (again,), _ = run_queue(queue, frames[4:], kept)
    assert_close(again[:5], expected[:5], rtol=0, atol=0)


def moving_frame(time, place, yaw=0.0):
    """Return a frame of ``queue_frame`` taken at ``place`` in the world, turned left by ``yaw``."""
    det, maps, metas = queue_frame([1, 2], time, 0)
    pose = np.eye(4)
    pose[:2, :2] = turn_about_z(yaw)
    pose[:2, 3] = place
    metas["img_metas"][0].update(T_global=pose, T_global_inv=np.linalg.inv(pose))
    return det, maps, metas


def test_the_ego_knows_its_motion_from_poses():
    queue = make_queue(ego_motion_from_poses=True)
    frames = [
        moving_frame(0.0, (0, 0)),
        moving_frame(0.5, (0, 3)),  # 6 m/s ahead
        moving_frame(1.0, (-2, 3), yaw=math.pi / 2),  # 4 m/s, and by now that is ahead
        moving_frame(1.0, (-2, 4), yaw=math.pi / 2),  # no time passed
        moving_frame(1.5, (5, 5)),
    ]
    embeds, velocities, kept = [], [], None
    for frame, continues in zip(frames, [True, True, True, True, False], strict=True):
        ((_, anchor, *_, embed),), kept = run_queue(queue, [(frame, continues)], kept)
        velocities.append(anchor[0, 0, 8:10].tolist())
        embeds.append(embed)
    # The first frame, and one whose history was dropped, know nothing; the predicted 4 m/s is not taken.
    for velocity, expected in zip(velocities, [(0, 0), (0, 6), (0, 4), (0, 0), (0, 0)], strict=True):
        assert velocity == pytest.approx(expected, abs=1e-5)
    assert all(embed.shape == (1, 1, 8) and embed.requires_grad for embed in embeds)
    unknown, known, other, standing, dropped = embeds
    assert_close(unknown, dropped)
    for different in (known, other, standing):
        assert not torch.allclose(different, unknown, atol=1e-2)
    assert make_queue().ego_motion_embed(InstanceQueueState()) is None
    assert not any("motion" in name for name in make_queue().state_dict())


def test_the_change_of_velocity_counts_from_the_third_frame_on():
    def embed_after(places):
        queue = make_queue(ego_motion_from_poses=True)
        frames = [moving_frame(0.5 * i, (0, place)) for i, place in enumerate(places)]
        return run_queue(queue, [(frame, True) for frame in frames])[0][-1][-1]

    steady, braking = embed_after([0, 2, 4]), embed_after([0, 3, 5])  # 4 m/s, and down to it from 6 m/s
    assert not torch.allclose(steady, braking, atol=1e-2)
    assert_close(embed_after([1, 3]), embed_after([2, 4]))


def head_parts():
    """Return the configs that a head cannot do without."""
    return {
        name: {"type": kind}
        for name, kind in (
            ("motion_loss_reg", "L1Loss"),
            ("plan_loss_reg", "L1Loss"),
            ("plan_loss_status", "L1Loss"),
        )
    } | {
        "instance_queue": {"type": "InstanceQueue", "embed_dims": 8, "queue_length": 2},
        "motion_sampler": {"type": "MotionTarget"},
        "planning_sampler": {"type": "PlanningTarget", "ego_fut_ts": 6, "ego_fut_mode": 6},
        "motion_decoder": {"type": "SparseBox3DMotionDecoder"},
        "planning_decoder": {"type": "HierarchicalPlanningDecoder", "ego_fut_ts": 6, "ego_fut_mode": 6},
        "motion_loss_cls": {"type": "FocalLoss", "use_sigmoid": True},
        "plan_loss_cls": {"type": "FocalLoss", "use_sigmoid": True},
    }


def test_rejections():
    with pytest.raises(ValueError, match="queue_length"):
        InstanceQueue(8, 0)
    parts = head_parts()
    assert_refused(
        ValueError,
        (
            lambda: MotionPlanningHead(**{**parts, "operation_order": ["dance"]}),
            "operation_order",
        ),
        (
            lambda: MotionPlanningHead(**parts, motion_anchor=np.zeros((5, 6, 6, 2))),
            r"motion_anchor must be \['classes', 6, 12, 2\], got \[5, 6, 6, 2\]",
        ),
        (
            lambda: MotionPlanningHead(**parts, motion_anchor=np.zeros((5, 6, 12, 2)), num_classes=4),
            r"motion_anchor must be \[4, 6, 12, 2\], got \[5, 6, 12, 2\]",
        ),
    )


def test_missing_anchor_files_wait_for_a_checkpoint(tmp_path):
    sizes = {"ego_fut_mode": 6, "num_classes": 5}
    files = {name: str(tmp_path / f"{name}.npy") for name in ("motion_anchor", "plan_anchor")}
    with pytest.warns(
        UserWarning, match="MotionPlanningHead: no (motion|plan)_anchor file .*npy.*zeros"
    ) as said:
        head = MotionPlanningHead(**head_parts(), **sizes, **files)
    assert len(said) == 2
    given = {}, {}, [], None, None, None, None
    assert head.motion_anchor.shape == (5, 6, 12, 2) and head.plan_anchor.shape == (3, 6, 6, 2)
    with pytest.raises(FileNotFoundError, match=r"needs the motion_anchor file .*make-anchors"):
        head.train()(*given)
    with pytest.raises(ValueError, match="detection must give ids"):  # evaluation gets past the anchors
        head.eval()(*given)

    anchors = {"motion_anchor": np.ones((5, 6, 12, 2)), "plan_anchor": np.full((3, 6, 6, 2), 2.0)}
    head.load_state_dict(MotionPlanningHead(**head_parts(), **sizes, **anchors).state_dict())
    with pytest.raises(ValueError, match="detection must give ids"):
        head.train()(*given)
    assert (head.motion_anchor == 1).all() and (head.plan_anchor == 2).all()
