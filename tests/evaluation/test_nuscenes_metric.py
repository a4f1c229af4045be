"""nuScenes' detection metrics: by hand, and against the devkit where it is installed."""

import driving_frames
import numpy as np
import pytest
from numpy.testing import assert_allclose

from visdet.evaluation.detection_curves import (
    average_precision,
    errors_of_matches,
    match_frames,
    mean_errors,
)
from visdet.evaluation.nuscenes_metric import NuScenesMetric
from visdet.structures.poses import turn_about_z

CLASSES = ("car", "pedestrian", "traffic_cone", "barrier")


def box(x, y, size=(4.0, 2.0, 1.5), yaw=0.0, velocity=(0.0, 0.0)):
    return [x, y, 0.0, *size, yaw, *velocity]


def frame(truth, predictions):
    """A frame of true boxes and of predictions (score, box)."""
    boxes, found = (np.array(rows, float).reshape(-1, 9) for rows in (truth, [row for _, row in predictions]))
    scores = np.array([score for score, _ in predictions])
    attributes = dict(gt_attributes=np.full(len(boxes), ""), attributes=np.full(len(found), ""))
    return dict(gt_boxes=boxes, boxes=found, scores=scores, **attributes)


def test_precision_and_errors_by_hand():
    """Two cars, found at scores 0.9 and 0.5, one wrong box between them at 0.7."""
    moving = box(0.6, 0.8, size=(2.0, 2.0, 1.5), yaw=0.5, velocity=(3.0, 4.5))
    frames = [
        frame([box(0, 0, velocity=(3.0, 4.0))], [(0.9, moving), (0.7, box(30, 0))]),
        frame([box(10, 0)], [(0.5, box(10, 0.4))]),
    ]
    curve = match_frames(frames, 2.0)
    errors = errors_of_matches(frames, curve)
    # Recall 0.5 at precision 1 and again at 1/2, recall 1 at 2/3; linear between.
    recalls = np.linspace(0, 1, 101)
    precision = np.interp(recalls, [0.5, 0.5, 1.0], [1.0, 0.5, 2 / 3])
    assert_allclose(curve.precision, precision)
    assert average_precision(curve) == pytest.approx(np.mean(precision[11:] - 0.1) / 0.9)
    # Errors at confidence 0.9: 1 m, half the volume, 0.5 rad, 0.5 m/s; at 0.5: the mean with 0.4 m and no other error.
    confidence = np.interp(recalls, [0.5, 0.5, 1.0], [0.9, 0.7, 0.5])
    assert_allclose(curve.confidence, confidence)
    for name, first, second in (("trans_err", 1.0, 0.7), ("scale_err", 0.5, 0.25), ("orient_err", 0.5, 0.25)):
        running = curve.running_mean(errors[name])
        assert_allclose(running, np.interp(confidence, [0.5, 0.9], [second, first]), atol=1e-12)
        assert curve.mean_error(errors[name]) == pytest.approx(running[11:].mean())
    assert errors["vel_err"][0] == pytest.approx(0.5)


def test_matching_rules():
    truth = [box(0, 0), box(3, 0)]
    # The better one takes the nearest box, the other one may take the next if that is near enough.
    both = [frame(truth, [(0.9, box(1.4, 0)), (0.8, box(1.3, 0))])]
    assert match_frames(both, 2.0).precision[-1] == 1.0
    assert match_frames(both, 1.5).precision[-1] == 0.0
    assert match_frames(both, 1.5).precision[49] == 1.0
    # Exactly at the distance is too far.
    assert match_frames([frame([box(0, 0)], [(0.5, box(2.0, 0))])], 2.0).confidence.max() == 0
    # Twice the same box: the second is wrong.
    twice = [frame(truth, [(0.9, box(0, 0)), (0.8, box(0, 0)), (0.7, box(3, 0))])]
    assert match_frames(twice, 1.0).precision[-1] == pytest.approx(2 / 3)


def test_angles_and_sizes():
    def orientation(truth_yaw, yaw, period=2 * np.pi):
        turned = frame([box(0, 0, yaw=truth_yaw)], [(0.5, box(0, 0, yaw=yaw))])
        return mean_errors([turned], match_frames([turned], 2.0), period)["orient_err"]

    assert orientation(3.1, -3.1) == pytest.approx(2 * np.pi - 6.2)
    assert orientation(0.0, np.pi) == pytest.approx(np.pi)
    assert orientation(0.1, np.pi, np.pi) == pytest.approx(0.1)


def evaluate(*frames, classes=("car",), **arguments):
    """frames: true boxes, their labels, predicted boxes, their scores and labels, and more values by name."""
    samples = [driving_frames.frame(*values, **more) for *values, more in frames]
    return driving_frames.evaluate("NuScenesMetric", samples, classes, **arguments)


def test_scores_of_all_classes():
    """A car found perfectly and a pedestrian missed; cones and barriers are not there."""
    boxes = [box(5, 5), box(-5, 5)]
    metrics = evaluate((boxes, [0, 1], boxes[:1], [0.9], [0], {}), classes=CLASSES)
    assert metrics["car_AP"] == pytest.approx(1) and metrics["mAP"] == pytest.approx(0.25)
    # mAOE: car 0, pedestrian 1, barrier 1 (nothing found); a cone has none. mAVE: car 0, pedestrian 1.
    assert (metrics["mATE"], metrics["mASE"]) == (pytest.approx(0.75), pytest.approx(0.75))
    assert (metrics["mAOE"], metrics["mAVE"]) == (pytest.approx(2 / 3), pytest.approx(0.5))
    expected = (5 * 0.25 + 0.25 + 0.25 + 1 / 3 + 0.5) / 9
    assert metrics["NDS_no_attr"] == pytest.approx(expected) and "NDS" not in metrics


def test_attributes():
    truth = [box(5, 5, velocity=(3.0, 0)), box(8, 8)]
    attributes = {"gt_attributes": np.array(["vehicle.moving", "vehicle.stopped"])}
    metrics = evaluate((truth, [0, 0], truth, [0.9, 0.8], [0, 0], attributes))
    # Moving is right; a car that stands still counts as parked, which is wrong here: running means 0 and 1/2.
    assert 0 < metrics["mAAE"] < 0.5
    assert metrics["NDS"] == pytest.approx((5 + 4 + 1 - metrics["mAAE"]) / 10)


def test_ranges():
    boxes = [box(0, 29), box(0, 31), box(0, 49), box(0, 51)]
    frame = (boxes, [0] * 4, boxes[:1], [0.9], [0], {})
    assert evaluate(frame, class_range=30)["mAP"] == pytest.approx(1)
    # 1 of 3 within 50 m.
    precision = np.interp(np.linspace(0, 1, 101), [1 / 3], [1], right=0)
    assert evaluate(frame)["mAP"] == pytest.approx(np.mean(precision[11:] > 0), abs=1e-9)
    with pytest.raises(ValueError, match="class_range must name bus, got car"):
        evaluate(frame, classes=("bus",), class_range={"car": 1})


def test_classes_in_another_order_than_the_labels():
    metric = NuScenesMetric(classes=("bus", "car"))
    with pytest.raises(ValueError, match=r"the order of the data set's labels, \['car', 'bus'\], got"):
        metric.dataset_meta = {"classes": ("car", "bus")}
    metric.dataset_meta = {"classes": ("Bus", "Car")}


def test_boxes_are_compared_in_the_world():
    """A turned and moved frame: nothing changes."""
    pose = np.eye(4)
    pose[:2, :2], pose[:3, 3] = turn_about_z(2.1), (500, -300, 2)
    truth = [box(5, 5, yaw=1.0, velocity=(3, 1)), box(-8, 12)]
    predicted = [box(5.3, 5.4, yaw=1.2, velocity=(3, 2)), box(-8, 12)]
    here, there = (
        evaluate((truth, [0, 0], predicted, [0.9, 0.8], [0, 0], more)) for more in ({}, {"T_global": pose})
    )
    assert here == pytest.approx(there, abs=1e-5) and here["mATE"] > 0


def test_frames_count_once_and_empty_frames_count():
    place = {"token": "t", "timestamp": 0.0}
    boxes = [box(5, 5)]
    right = (boxes, [0], boxes, [0.9], [0], place)
    empty, alarm = ([], [], [], [], [], {}), ([], [], boxes, [0.95], [0], {})
    one = evaluate(right, empty)
    assert one["mAP"] == pytest.approx(1)
    assert evaluate(right, right, empty) == pytest.approx(one)
    assert evaluate(right, alarm)["mAP"] < 1
