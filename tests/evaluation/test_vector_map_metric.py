"""Map average precision, by hand."""

import driving_frames
import numpy as np
import pytest

from visdet.structures.polylines import resample

CLASSES = ("ped_crossing", "divider", "boundary")


def straight(x, length=10.0):
    return np.array([[x, 0.0], [x, length]])


def objects(lines):
    array = np.empty(len(lines), dtype=object)
    array[:] = lines
    return array


def evaluate(frames, **arguments):
    """frames: (true lines, their labels, predicted lines, scores, labels)."""
    samples = []
    for truth, truth_labels, lines, scores, labels in frames:
        predicted = {"vectors": lines, "scores": np.array(scores), "labels": np.array(labels)}
        true_labels = np.array(truth_labels, dtype=np.int64)
        samples.append({"vectors": objects(truth), "vector_labels": true_labels, "pred_map": predicted})
    return driving_frames.evaluate("VectorMapMetric", samples, CLASSES, **arguments)


def test_thresholds():
    """A divider 0.8 m off is right from 1 m on."""
    metrics = evaluate([([straight(0)], [1], [straight(0.8)], [0.5], [1])])
    assert metrics["divider_AP"] == pytest.approx(2 / 3) and metrics["mAP"] == pytest.approx(2 / 9)


def test_the_best_takes_the_line():
    """Of lines that are nearest to one true line, that with the highest score takes it, if it is near enough."""
    lines = [straight(x) for x in (0.4, 0.1, 5.2, 9.0)]
    frame = ([straight(0), straight(5)], [1, 1], lines, [0.9, 0.5, 0.8, 0.7], [1] * 4)
    metrics = evaluate([frame], thresholds=(0.15,))
    assert metrics["divider_AP"] == pytest.approx(1 / 8)  # the second line alone, behind three wrong ones
    assert evaluate([frame], thresholds=(0.5,))["divider_AP"] == pytest.approx(1)


def test_direction_and_points_do_not_matter():
    truth = np.array([[0.0, 0.0], [4.0, 3.0], [8.0, 3.0]])
    same = resample(truth, 17)[::-1]
    assert evaluate([([truth], [2], [same], [0.9], [2])])["boundary_AP"] == pytest.approx(1)


def test_empty_frames_classes_and_short_lines():
    line = straight(0)
    lines = [line]
    metrics = evaluate([([], [], [], [], []), (lines, [0], [line, np.zeros((1, 2))], [0.5, 0.9], [0, 0])])
    assert metrics["ped_crossing_AP"] == pytest.approx(1) and metrics["divider_AP"] == 0
    # A line where there is none is wrong.
    more = evaluate([([], [], lines, [0.9], [0]), (lines, [0], lines, [0.5], [0])])
    assert more["ped_crossing_AP"] == pytest.approx(0.5)


def test_true_lines_of_one_point_do_not_count():
    line, point = straight(0.0), np.array([[5.0, 5.0]])
    found = evaluate([([line, point], [1, 1], [line], [0.9], [1])])
    assert found == evaluate([([line], [1], [line], [0.9], [1])]) and found["divider_AP"] > 0.99
