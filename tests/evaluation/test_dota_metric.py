"""DOTAMetric: APs by hand, and those of a plain loop over shapely's polygons."""

import math

import numpy as np
import pytest
import torch
from json_files import write_json
from mmengine.structures import InstanceData

from visdet.registry import METRICS
from visdet.structures import DetDataSample
from visdet.structures.rotated_boxes import boxes_to_polygons

CLASSES = ("ship", "plane", "tank")


def instances(boxes, labels, scores=None):
    fields = dict(
        bboxes=torch.as_tensor(np.reshape(boxes, (-1, 5)), dtype=torch.float32),
        labels=torch.as_tensor(labels, dtype=torch.int64),
    )
    return InstanceData(**fields, **({} if scores is None else dict(scores=torch.tensor(scores))))


def sample(number, truth, ignored, predicted, **metainfo):
    found = DetDataSample(metainfo=dict(img_id=number, **metainfo))
    found.gt_instances, found.ignored_instances = truth, ignored
    found.pred_instances = predicted
    return found.to_dict()


def evaluated(samples, **arguments):
    metric = METRICS.build(dict(type="DOTAMetric", **arguments))
    metric.dataset_meta = dict(classes=CLASSES)
    metric.process({}, samples)
    return metric.evaluate(len(samples)), metric


def random_samples(seed, num_images=8):
    """Return samples whose predictions are moved true boxes and others, with some equal scores."""
    rng = np.random.default_rng(seed)
    integers = rng.integers
    samples = []
    for number in range(num_images):
        parts = []
        for count in (integers(0, 9), integers(0, 4)):
            boxes = np.column_stack(
                [rng.uniform(0, 90, (count, 2)), rng.uniform(8, 50, (count, 2)), rng.uniform(-4, 4, count)]
            )
            parts.append((boxes, integers(0, 2, count)))
        boxes, labels = (np.concatenate(column) for column in zip(*parts, *parts[:1], parts[0], strict=True))
        boxes = boxes + rng.normal(0, 1, boxes.shape) * [2, 2, 2, 2, 0.1]
        scores = np.float32(integers(1, 40, len(boxes)) / 40)
        samples.append(
            sample(number, *(instances(*part) for part in parts), instances(boxes, labels, scores))
        )
    return samples  # fmt: skip


def plain_average_precision(samples, label, threshold, mode):
    """Return the AP of a class as DOTA's evaluation says it, one detection after another."""
    geometry = pytest.importorskip("shapely.geometry")

    def polygons(part):
        chosen = part["bboxes"][part["labels"] == label].double()
        return [geometry.Polygon(corners) for corners in boxes_to_polygons(chosen).tolist()]

    truth = [polygons(one["gt_instances"]) + polygons(one["ignored_instances"]) for one in samples]
    num_true = [int((one["gt_instances"]["labels"] == label).sum()) for one in samples]
    ranked = []
    for number, one in enumerate(samples):
        scores = one["pred_instances"]["scores"][one["pred_instances"]["labels"] == label].tolist()
        ranked += [
            (score, number, box) for score, box in zip(scores, polygons(one["pred_instances"]), strict=True)
        ]
    taken, marks = set(), []
    for _, number, box in sorted(ranked, key=lambda row: -row[0]):
        ious = [box.intersection(other).area / box.union(other).area for other in truth[number]]
        best = int(np.argmax(ious)) if ious else -1
        if not ious or ious[best] <= threshold:
            marks.append(0)
        elif best < num_true[number]:
            marks.append(int((number, best) not in taken))
            taken.add((number, best))
    if not sum(num_true):
        return math.nan
    right = np.cumsum(marks)
    recall, precision = right / sum(num_true), right / np.arange(1, len(marks) + 1)
    if mode == "11points":
        levels = np.arange(0.0, 1.1, 0.1)
        return np.mean([precision[recall >= level].max(initial=0) for level in levels])
    best_from_here = np.maximum.accumulate(precision[::-1])[::-1]
    return (np.diff(recall, prepend=0) * best_from_here).sum()


@pytest.mark.parametrize("mode", ["11points", "area"])
@pytest.mark.parametrize("seed", range(3))
def test_it_equals_a_plain_loop_over_polygons(seed, mode):
    samples = random_samples(seed)
    metrics, metric = evaluated(samples, eval_mode=mode)
    thresholds = [50, 55, 60, 65, 70, 75, 80, 85, 90, 95]
    expected = np.array(
        [
            [plain_average_precision(samples, label, iou / 100, mode) for iou in thresholds]
            for label in range(2)
        ]
    )
    assert metrics["dota/mAP"] == pytest.approx(expected.mean(), abs=1e-6)
    assert 0.1 < metrics["dota/AP50"] == pytest.approx(expected[:, 0].mean(), abs=1e-6)
    assert metrics["dota/AP75"] == pytest.approx(expected[:, 5].mean(), abs=1e-6)
    for label, row in enumerate(metric.classwise_results[:2]):
        assert row["mAP"] == pytest.approx(expected[label].mean(), abs=1e-6)
    assert metric.classwise_results[2] == dict(name="tank", num_boxes=0, mAP=-1, AP50=-1, AP75=-1)
    assert metric.curve_report.classes["ship"]["best_f1"] > 0.3


BOX, FAR = [50, 50, 40, 10, 0.5], [10, 90, 9, 3, 0]


def test_by_hand():
    truth, none = instances([BOX, FAR], [0, 0]), instances([], [])
    # The first recall of 1/2 is at precision 1, so that six of eleven points have it.
    predicted = instances([BOX, BOX], [0, 0], [0.9, 0.8])
    metrics, _ = evaluated([sample(0, truth, none, predicted)], classwise=True)
    assert metrics["dota/AP50"] == pytest.approx(6 / 11) == metrics["dota/mAP/ship"]
    # An equal box that is turned by a quarter overlaps the true one by 100 of 700.
    across = instances([[50, 50, 40, 10, 0.5 + math.pi / 2]], [0], [0.9])
    for iou, expected in ((0.142, 6 / 11), (0.144, 0)):
        metrics, _ = evaluated([sample(0, truth, none, across)], iou_thrs=iou)
        assert metrics["dota/mAP"] == pytest.approx(expected)


def test_the_file_and_the_samples_give_the_same(tmp_path):
    corners = [10, 10, 50, 20, 48, 31, 9, 19]  # no rectangle
    row = dict(
        id=1, image_id=0, category_id=1, bbox=[9, 10, 41, 21], segmentation=[corners], area=500, iscrowd=0
    )
    file = tmp_path / "ann.json"
    content = dict(
        images=[dict(id=0, file_name="0.jpg", height=100, width=100)],
        categories=[dict(id=1, name="ship")],
        annotations=[row],
    )
    write_json(file, content)
    predicted = instances([[29.2, 20, 40, 11, 0.25]], [0], [0.9])
    # The image was resized to other proportions.
    truth = instances([[0, 0, 1, 1, 0]], [0])
    truth.polygons = torch.tensor(corners, dtype=torch.float64).reshape(1, 4, 2)
    one = sample(0, truth, instances([], []), predicted, scale_factor=(2.0, 3.0))
    of_file, of_samples = (evaluated([one], ann_file=path)[0] for path in (str(file), None))
    assert of_file == of_samples and 0.3 < of_file["dota/mAP"] < 1
    scaled = instances([[20, 60, 20, 15, 0]], [0])
    predicted = instances([[10, 20, 10, 5, 0]], [0], [0.9])
    one = sample(0, scaled, instances([], []), predicted, scale_factor=(2.0, 3.0))
    assert evaluated([one])[0]["dota/mAP"] == pytest.approx(1)
    del row["segmentation"]
    write_json(file, content)
    with pytest.raises(
        ValueError,
        match=r"DOTAMetric: an annotation of .* has no segmentation of four points .* such as dino-small",
    ):
        METRICS.build(dict(type="DOTAMetric", ann_file=str(file)))
    with pytest.raises(
        ValueError, match=r"CocoMetric: image 0: predicted bboxes must be \[N, 4\], got \[1, 5\]"
    ):
        METRICS.build(dict(type="CocoMetric")).process({}, [one])
