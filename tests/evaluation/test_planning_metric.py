"""Plans: distances, collisions and both summaries by hand."""

import driving_frames
import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from visdet.evaluation.planning_metric import (
    boxes_intersect,
    collides,
    headings,
)

AHEAD = np.pi / 2
EGO = (4.0, 2.0)

EIGHTH = np.pi / 4  # of a turn


def box(x, y, length=2.0, width=2.0, yaw=0.0):
    return [x, y, 0.0, length, width, 1.5, yaw]


def straight(step, num_steps=6):
    """A plan straight ahead, ``step`` metres each."""
    return np.outer(np.arange(1, num_steps + 1), [0.0, step])


@pytest.mark.parametrize(
    ("other", "meets"),
    [
        (box(1.9, 0.0), True),
        (box(2.1, 0.0), False),
        (box(2.0, 0.0), True),  # touching
        (box(2.0, 2.0), True),  # corner on corner
        (box(0.0, 0.0, 0.1, 0.1, 0.3), True),  # within: no corner of the larger one is in the smaller
        (box(2.4, 0.0, yaw=EIGHTH), True),  # 1 + sqrt(2) = 2.414
        (box(2.42, 0.0, yaw=EIGHTH), False),
        (
            box(1.8, 1.8, yaw=EIGHTH),
            False,
        ),  # only the axis of the turned box parts them: 1 + sqrt(2) < 1.8 * sqrt(2)
        (box(1.7, 1.7, yaw=EIGHTH), True),
        (box(np.nan, 0.0), False),
        (box(0.0, 0.0, 10, 0.1, 0.8), True),  # a cross: no corner of one is inside the other
    ],
)
def test_boxes_that_meet(other, meets):
    first = np.array(box(0.0, 0.0))
    assert boxes_intersect(first, np.array([other])).tolist() == [meets]
    assert boxes_intersect(np.array(other), first[None]).tolist() == [meets]


def test_headings():
    assert_allclose(headings(straight(2.0)), AHEAD)
    # A step ahead, then one to the right: chords (1, 1) and, at the end, (1, 0).
    assert_allclose(headings(np.array([[0.0, 1.0], [1.0, 1.0]])), [EIGHTH, 0])
    # Hardly moves: ahead, whatever the noise.
    assert_allclose(headings(np.array([[0.3, 0.0], [0.0, 0.0], [0.2, 0.1]])), AHEAD)
    # A standing vehicle that starts to move to the left.
    assert_allclose(headings(np.array([[0.0, 0.0], [-4.0, 0.0]])), [np.pi, np.pi])


def test_the_vehicles_box_is_ahead_of_the_lidar():
    """4 m long and 0.5 m ahead: from 1.5 m behind to 2.5 m ahead of the lidar."""
    stay = np.zeros((1, 2))
    for y, hits in ((3.4, True), (3.6, False), (-2.4, True), (-2.6, False)):
        assert collides(stay, [np.array([box(0.0, y)])], EGO, 0.5).tolist() == [hits]
    # In every row of the plan, also to the side: at (-10, 0) and heading left, the box ends at -12.5.
    plan = np.array([[-5.0, 0.0], [-10.0, 0.0]])
    for x, hits in ((-13.4, True), (-13.6, False)):
        assert collides(plan, [np.array([box(x, 0.0)])] * 2, EGO, 0.5).tolist() == [False, hits]


def truth(path, boxes=None, mask=None, speed=None):
    boxes = boxes if boxes is not None else [np.zeros((0, 7))] * len(path)
    coming = np.empty(len(boxes), dtype=object)
    coming[:] = boxes
    sample = {
        "gt_ego_fut_trajs": torch.tensor(np.diff(path, axis=0, prepend=np.zeros((1, 2)))),
        "gt_ego_fut_masks": torch.ones(len(path)) if mask is None else torch.tensor(mask),
        "fut_boxes": coming,
    }
    if speed is not None:
        sample["ego_status"] = torch.tensor([0.0] * 6 + [speed, 0.0, 0.0, 0.0])
    return sample


def evaluate(truths, plans, **arguments):
    frames = [
        sample | {"pred_plan": {"final_planning": torch.tensor(plan)}}
        for sample, plan in zip(truths, plans, strict=True)
    ]
    return driving_frames.evaluate("PlanningMetric", frames, ego_size=EGO, **arguments)


def test_two_frames_by_hand():
    """One plan is right, the other falls back by half a metre a step and is hit at the fourth step."""
    path = straight(2.0)
    boxes = [np.zeros((0, 7))] * 6
    boxes[3] = np.array([box(0.0, 3.5)])  # 2.5 to 4.5; the true box is at 6 to 10, the plan's at 4 to 8
    values = evaluate(
        [truth(path, speed=4.0), truth(path, boxes, speed=2.0)], [path, straight(1.5)], ego_offset=0.0
    )
    for t in range(6):
        assert values[f"L2@{(t + 1) / 2:g}s"] == pytest.approx(0.25 * (t + 1))
        assert values[f"collision@{(t + 1) / 2:g}s"] == (0.5 if t == 3 else 0.0)
    assert values["uniad_L2"] == pytest.approx((0.5 + 1.0 + 1.5) / 3)
    assert values["vad_L2"] == pytest.approx((0.375 + 0.625 + 0.875) / 3)
    assert values["uniad_collision_2s"] == 0.5 and values["uniad_collision"] == pytest.approx(0.5 / 3)
    assert values["vad_collision_2s"] == pytest.approx(0.125)
    assert values["vad_collision"] == pytest.approx((0.0 + 0.125 + 0.5 / 6) / 3)
    assert values["truth_collision"] == 0.0 and values["num_frames"] == 2
    # Straight on at 4 m/s is the first true way, at 2 m/s it falls back by 1 m a step: 2 to 6 at the fourth.
    assert values["constant_velocity_uniad_L2"] == pytest.approx((1 + 2 + 3) / 3)
    assert values["constant_velocity_uniad_collision_2s"] == 0.5
    assert values["standing_still_uniad_L2"] == pytest.approx((4 + 8 + 12) / 3)


def test_a_step_where_the_truth_collides_does_not_count():
    path = straight(2.0)
    boxes = [np.array([box(0.0, 2.0 * (t + 1))]) if t < 2 else np.zeros((0, 7)) for t in range(6)]
    values = evaluate([truth(path, boxes)], [path])
    assert values["uniad_collision"] == values["vad_collision"] == 0.0
    assert values["truth_collision"] == pytest.approx(2 / 6)
    assert "constant_velocity_uniad_L2" not in values


def test_incomplete_frames_are_left_out():
    path = straight(2.0)
    late = truth(path, mask=[1.0] * 5 + [0.0])
    no_boxes = truth(path, boxes=[np.zeros((0, 7))] * 4)
    values = evaluate([late, truth(path), no_boxes], [path + 9, path + np.array([3.0, 4.0]), path + 9])
    assert values["num_frames"] == 1 and values["vad_L2"] == pytest.approx(5.0)
    values = evaluate([late], [path])
    assert values["num_frames"] == 0 and np.isnan(values["vad_L2"]) and np.isnan(values["truth_collision"])
