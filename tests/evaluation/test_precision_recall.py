"""Precision over recall, the best threshold of a class, and confusion matrices."""

import json

import numpy as np
import pytest
from PIL import Image

from visdet.evaluation import NuScenesMetric, VectorMapMetric
from visdet.evaluation.box_evaluation import import_backend
from visdet.evaluation.precision_recall import CurveReport, box_report, score_curve


def test_a_curve_by_hand():
    # Sorted: 0.9 right, 0.8 wrong, 0.7 right, 0.6 wrong, of 3 true objects.
    curve = score_curve(np.array([0.7, 0.9, 0.6, 0.8]), np.array([True, True, False, False]), 3)
    assert curve["scores"] == [0.9, 0.8, 0.7, 0.6]
    most = 2 / 3
    assert curve["precision"] == pytest.approx([1, 1 / 2, most, 1 / 2])
    assert curve["recall"] == pytest.approx([1 / 3, 1 / 3, most, most])
    best = [curve[f"best_{name}"] for name in ("f1", "precision", "recall", "threshold")]
    assert best == pytest.approx([most, most, most, 0.65])


@pytest.mark.parametrize("seed", range(4))
def test_the_best_threshold_is_that_of_an_exhaustive_search(seed):
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, 30, 500) / 30  # with many ties
    is_right = rng.random(500) < scores
    num_truths = int(is_right.sum()) + 40

    def f1_above(threshold):
        kept = scores >= threshold
        return 2 * is_right[kept].sum() / (kept.sum() + num_truths)

    curve = score_curve(scores, is_right, num_truths)
    assert curve["best_f1"] == pytest.approx(max(map(f1_above, scores)))
    assert f1_above(curve["best_threshold"]) == pytest.approx(curve["best_f1"])
    assert not (scores == curve["best_threshold"]).any(), "> and >= keep the same"


@pytest.mark.parametrize(
    ("scores", "right", "num_truths"), [([], [], 0), ([], [], 3), ([0.5], [False], 3), ([0.5], [False], 0)]
)
def test_nothing_right_has_no_threshold(scores, right, num_truths):
    curve = score_curve(np.array(scores), np.array(right, bool), num_truths)
    assert curve["best_threshold"] is None and curve["num_truths"] == num_truths
    json.dumps(curve, allow_nan=False)


def test_a_long_curve_is_short_in_the_file_and_has_its_best_point():
    scores = np.linspace(1, 0, 10001)
    curve = score_curve(scores, scores > 0.5, 5000)
    assert len(curve["scores"]) <= 201 and curve["best_f1"] == pytest.approx(1)
    assert curve["best_recall"] in curve["recall"]


def true(label, box, crowd=0):
    return {"category_id": label, "bbox": box, "iscrowd": crowd}


def found(*rows):
    """The boxes that are found in an image, of (label, box, score)."""
    labels, boxes, scores = map(np.array, zip(*rows, strict=True))
    return {"labels": labels, "bboxes": boxes.astype(float), "scores": scores}


A, B, C, FAR = [0, 0, 10, 10], [20, 0, 10, 10], [40, 0, 10, 10], [200, 200, 10, 10]


def test_boxes_and_their_confusion_by_hand():
    truth = [[true(0, A), true(1, B)], [true(0, A), true(1, C, crowd=1)]]
    first = found(
        (0, A, 0.9),  # right
        (0, [1, 0, 10, 10], 0.8),  # a second one of the same box: wrong
        (0, B, 0.7),  # class 0 on a box of class 1: wrong, and confused
    )
    second = found(
        (0, A, 0.6),  # right
        (1, C, 0.95),  # on the crowd: does not count
        (1, FAR, 0.2),  # wrong
        (2, A, 0.2),  # of no class
    )
    report = box_report(truth, [first, second], ("a", "b"), import_backend().iou)
    a, b = report.classes["a"], report.classes["b"]
    assert a["num_truths"] == 2 and a["scores"] == [0.9, 0.8, 0.7, 0.6]
    assert a["precision"] == pytest.approx([1, 1 / 2, 1 / 3, 1 / 2]) and a["recall"] == pytest.approx(
        [0.5, 0.5, 0.5, 1]
    )
    assert (a["best_threshold"], a["best_f1"]) == pytest.approx((0.85, 2 / 3))
    assert b["num_truths"] == 1 and b["best_threshold"] is None and b["scores"] == [0.2]
    # The best F1 of a, 2/3, is that above 0.85 (1 of 1 right, 1 of 2 found) and that of all four: the first counts.
    assert report.confusion.tolist() == [[1, 0, 1], [0, 0, 1], [0, 0, 0]]


def test_pictures_and_numbers(tmp_path):
    some, none = (
        score_curve(np.array(scores), np.array(right), 2)
        for scores, right in (([0.9, 0.2], [True, False]), ([], []))
    )
    curves = {"круг": some, "无": none}
    report = CurveReport("IoU 0.5", curves, np.array([[3, 0, 1], [0, 0, 0], [2, 0, 0]]))
    files = report.draw(tmp_path, "coco")
    assert [file.rsplit("/", 1)[1] for file in files] == [
        "coco_precision_recall.png",
        "coco_confusion_matrix.png",
    ]
    for file in files:
        with Image.open(file) as picture:
            assert min(picture.size) > 300
    record = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert record["confusion_matrix"]["labels"] == ["круг", "无", "background"]
    assert len(CurveReport("nothing", {}).draw(tmp_path, "empty")) == 1


def test_boxes_of_frames_and_map_lines_have_curves():
    boxes = np.zeros((3, 9))
    boxes[:, 0], boxes[:, 3:6] = (0, 10, 20), 1
    moved = boxes + np.array([0.5, *[0] * 8])
    objects = {
        "gt_boxes": boxes,
        "gt_labels": np.array([0, 0, 1]),
        "gt_attributes": np.full(3, ""),
        "boxes": np.concatenate([moved, moved[:1] + 30]),
        "scores": np.array([0.9, 0.8, 0.7, 0.6]),
        "labels": np.array([0, 1, 1, 0]),  # The second is a car that is taken for a bus.
    }
    frame = {"vehicle": np.zeros(2), "objects": objects, "has_attributes": False}
    metric = NuScenesMetric(classes=("car", "bus"))
    metric.compute_metrics([frame, frame])
    car, bus = metric.curve_report.classes.values()
    assert (car["num_truths"], bus["num_truths"]) == (4, 2)
    assert car["best_threshold"] == pytest.approx(0.75) and car["best_f1"] == pytest.approx(2 / 3)
    assert bus["best_threshold"] == pytest.approx(0.35) and bus["best_f1"] == pytest.approx(2 / 3)
    assert metric.curve_report.confusion.tolist() == [[2, 2, 0], [0, 2, 0], [0, 0, 0]]

    line = np.array([[0.0, 0.0], [10.0, 0.0]])
    lines = {"gt_lines": [line], "gt_labels": np.array([0]), "lines": [line + np.array([0, 0.8]), line + 20]}
    metric = VectorMapMetric(classes=("divider", "boundary"))
    metric.compute_metrics([lines | {"scores": np.array([0.4, 0.9]), "labels": np.array([0, 0])}])
    divider, boundary = metric.curve_report.classes.values()
    assert divider["precision"] == [0, 0.5] and divider["best_threshold"] == pytest.approx(0.2)
    assert boundary["best_threshold"] is None and metric.curve_report.confusion is None
    assert metric.curve_report.matched_by == "Chamfer distance 1 m"
