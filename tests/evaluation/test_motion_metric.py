"""Predicted paths: errors, misses and EPA by hand."""

import driving_frames
import numpy as np
import pytest
import torch
from driving_frames import frame

from visdet.evaluation.motion_metric import displacement_errors, motion_scores

CLASSES = ("car", "truck", "pedestrian", "traffic_cone")


def path(x, y, vx, vy=0.0, num_steps=12):
    """Places after each half second."""
    return np.array([x, y]) + np.outer(np.arange(1, num_steps + 1) / 2, [vx, vy])


def beside(distance):
    return np.array([0.0, distance])


def agents(truth, predicted):
    """truth: (place, path or None); predicted: (score, place, paths)."""
    empty = np.zeros((12, 2))
    num_modes = len(predicted[0][2]) if predicted else 1
    return {
        "gt_boxes": np.array([place for place, _ in truth], float).reshape(-1, 2),
        "gt_paths": np.array([empty if way is None else way for _, way in truth]).reshape(-1, 12, 2),
        "gt_known": np.array([[way is not None] * 12 for _, way in truth], bool).reshape(-1, 12),
        "boxes": np.array([place for _, place, _ in predicted], float).reshape(-1, 2),
        "scores": np.array([score for score, _, _ in predicted], float),
        "paths": np.array([paths for _, _, paths in predicted], float).reshape(
            len(predicted), num_modes, 12, 2
        ),
    }


def test_errors_of_one_agent():
    truth = path(0, 0, 2.0)
    shifted = truth + beside(1.5)
    late = truth.copy()
    late[-1] += [2.5, 0.0]  # right but for the last step
    ade, fde, missed = displacement_errors(np.array([shifted, late]), truth, np.ones(12, bool))
    # Each error is the least over both paths. The average error is least for the late path (2.5 m in one of 12 steps).
    # The final error is least for the shifted path (1.5 m), which also misses nothing, as it is never 2 m off.
    assert (ade, fde, missed) == pytest.approx((2.5 / 12, 1.5, 0.0))
    ade, fde, missed = displacement_errors(np.array([late]), truth, np.ones(12, bool))
    assert (ade, fde, missed) == pytest.approx((2.5 / 12, 2.5, 1.0))
    # A future that ends a step earlier.
    known = np.arange(12) < 11
    assert displacement_errors(np.array([late]), truth, known) == pytest.approx((0.0, 0.0, 0.0), abs=1e-12)


def test_errors_without_a_future_and_of_nan():
    truth = path(0, 0, 2.0)
    assert np.isnan(displacement_errors(truth[None], truth, np.zeros(12, bool))).all()
    broken = np.stack([np.full((12, 2), np.nan), truth + beside(1.0)])
    assert displacement_errors(broken, truth, np.ones(12, bool)) == pytest.approx((1.0, 1.0, 0.0))
    assert displacement_errors(broken[:1], truth, np.ones(12, bool)) == (np.inf, np.inf, 1.0)


def test_scores_by_hand():
    """Two cars found, one of them with a wrong path, one car not found, and two false boxes."""
    first, second = path(0, 0, 2.0), path(20, 0, 1.0)
    frames = [
        agents(
            [((0, 0), first), ((40, 0), path(40, 0, 0.0))],
            [(0.9, (0, 1), [first + beside(1.0)]), (0.8, (10, 0), [first])],
        ),
        agents(
            [((20, 0), second)],
            [(0.5, (20, 0), [second + beside(3.0)]), (0.4, (20, 1), [second + beside(9.0)])],
        ),
    ]
    scores = motion_scores(frames)
    # Recall 1/3 at confidence 0.9 and, past the false box, at 0.8; 2/3 at 0.5. Running means: 1 at 0.9, 2 at 0.5.
    recalls = np.arange(11, 67) / 100
    confidence = np.interp(recalls, [1 / 3, 1 / 3 + 1e-12, 2 / 3], [0.9, 0.8, 0.5])
    errors = np.interp(confidence, [0.5, 0.9], [2.0, 1.0])
    assert scores["minADE"] == pytest.approx(errors.mean()) and 1 < scores["minADE"] < 2
    assert scores["minFDE"] == pytest.approx(errors.mean())
    assert scores["MR"] == pytest.approx((errors - 1).mean() / 2)
    # Only the first ends near the truth; two boxes take none.
    assert scores["EPA"] == pytest.approx((1 - 0.5 * 2) / 3)


def test_a_wrong_end_leaves_the_true_box_to_the_next():
    way = path(0, 0, 1.0)
    predicted = [(0.9, (0, 0), [way + 5.0]), (0.8, (0, 1), [way])]
    scores = motion_scores([agents([((0, 0), way)], predicted)])
    assert scores["EPA"] == pytest.approx(1 - 0.5)  # found by the second, which in detection is a false box
    assert scores["minFDE"] == pytest.approx(np.hypot(5, 5))  # of the first, which took the box


def test_unknown_futures():
    way = path(0, 0, 1.0)
    truth = [((0, 0), way), ((20, 0), None)]
    part = agents(truth, [(0.9, (20, 0), [way]), (0.8, (0, 0), [way + beside(1.0)])])
    scores = motion_scores([part])
    assert scores == pytest.approx({"minADE": 1.0, "minFDE": 1.0, "MR": 0.0, "EPA": 0.5})
    published = motion_scores([part], unknown_is_right=True)
    # Running means: 0 up to confidence 0.9 (recall 0.5), 0.5 at 0.8 (recall 1), linear between.
    errors = np.interp(np.arange(11, 101) / 100, [0.5, 1.0], [0.0, 0.5])
    assert published["minADE"] == pytest.approx(errors.mean()) and published["EPA"] == 0.5


def test_nothing():
    nothing = agents([], [])
    assert np.isnan(list(motion_scores([nothing]).values())).all()
    assert np.isnan(list(motion_scores([]).values())).all()
    way = path(0, 0, 1.0)
    true, far = [((0, 0), way)], [(0.9, (9, 0), [way])]
    full = agents(true, [(0.9, (0, 0), [way])])
    assert motion_scores([nothing, full, nothing]) == pytest.approx(dict(minADE=0, minFDE=0, MR=0, EPA=1))
    scores = motion_scores([agents(true, [])])
    assert scores["EPA"] == 0.0 and np.isnan(scores["minADE"])
    assert motion_scores([agents(true, far)])["EPA"] == -0.5
    assert np.isnan(motion_scores([agents([], far)])["EPA"])


def box(x, y, vx=0.0):
    return [x, y, 0.0, 4.0, 2.0, 1.5, 0.0, vx, 0.0]


def evaluate(truth, predicted, **arguments):
    """truth: (box, label, path); predicted: (score, box, label, paths); all in one frame."""
    boxes, labels, ways = zip(*truth, strict=True)
    scores, found, found_labels, paths = zip(*predicted, strict=True)
    starts = np.array(boxes)[:, None, :2]
    sample = frame(
        *(boxes, labels, found, scores, found_labels),
        trajs_3d=np.array(paths),
        gt_agent_fut_trajs=torch.tensor(np.diff(np.array(ways), axis=1, prepend=starts)),
        gt_agent_fut_masks=torch.ones(len(boxes), 12),
    )
    return driving_frames.evaluate("MotionMetric", [sample], CLASSES, **arguments)


def test_classes_are_merged():
    """A truck that is called a car is right; a person is a class of its own, and a cone counts nowhere."""
    ways = [path(0, 0, 2.0), path(9, 0, 1.0), path(0, 9, 0.0)]
    truth = [(box(0, 0), 1, ways[0]), (box(9, 0), 2, ways[1]), (box(0, 9), 3, ways[2])]
    predicted = [
        (0.9, box(0, 0, vx=1.5), 0, [ways[0]]),
        (0.8, box(9, 0, vx=1.0), 2, [ways[1] + [0.0, 3.0]]),
        (0.7, box(30, 30), 3, [ways[2]]),
    ]
    values = evaluate(truth, predicted)
    assert values["car_minADE"] == pytest.approx(0.0, abs=1e-12) and values["car_EPA"] == 1.0
    assert values["pedestrian_minADE"] == pytest.approx(3.0) and values["pedestrian_MR"] == 1.0
    assert values["pedestrian_EPA"] == 0.0
    # The car would fall back by 0.25 m a step, the person go on rightly.
    assert values["constant_velocity_car_minFDE"] == pytest.approx(3.0)
    assert values["constant_velocity_car_minADE"] == pytest.approx(0.25 * 6.5)
    assert values["constant_velocity_car_EPA"] == 0.0
    assert values["constant_velocity_pedestrian_minFDE"] == pytest.approx(0.0, abs=1e-12)
    assert not any("cone" in name for name in values)


def test_threshold_and_range():
    way, far = path(0, 0, 1.0), path(0, 45, 0.0)
    truth = [(box(0, 0), 0, way), (box(0, 45), 2, far)]
    predicted = [(0.9, box(0, 0), 0, [way]), (0.19, box(20, 0), 0, [way]), (0.9, box(0, 45), 2, [far])]
    values = evaluate(truth, predicted)
    assert values["car_EPA"] == 1.0  # the false box is below 0.2
    assert np.isnan(values["pedestrian_EPA"])  # people count up to 40 m
    assert evaluate(truth, predicted, score_threshold=0.1)["car_EPA"] == 0.5
    assert evaluate(truth, predicted, class_range=50.0)["pedestrian_EPA"] == 1.0


def test_a_frame_without_boxes():
    """Files of empty frames may have futures of one dimension."""
    none = {"gt_agent_fut_trajs": torch.zeros(0), "gt_agent_fut_masks": torch.zeros(0)}
    sample = frame([], [], [], [], [], trajs_3d=np.zeros((0, 6, 12, 2)), **none)
    assert np.isnan(driving_frames.evaluate("MotionMetric", [sample], CLASSES)["car_EPA"])
