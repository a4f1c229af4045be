"""Frames of driving metrics, and their evaluation."""

import numpy as np
import torch

from visdet.registry import METRICS


def boxes_of(rows):
    """Return boxes [n, 9] of rows of nine numbers, or of (x, y) alone."""
    boxes = torch.zeros(len(rows), 9, dtype=torch.float64)
    for box, row in zip(boxes, rows, strict=True):
        box[: len(row)] = torch.tensor(row)
    return boxes


def frame(truth, labels, found, scores, found_labels, **more):
    """Return a frame of true and predicted boxes. ``trajs_3d`` and ``instance_ids`` of ``more`` are predictions."""
    predicted = {name: torch.tensor(more.pop(name)) for name in ("trajs_3d", "instance_ids") if name in more}
    predicted |= {"boxes_3d": boxes_of(found), "scores_3d": torch.tensor(scores)}
    predicted["labels_3d"] = torch.tensor(found_labels, dtype=torch.int64)
    true_labels = torch.tensor(labels, dtype=torch.int64)
    sample = {"gt_bboxes_3d": boxes_of(truth), "gt_labels_3d": true_labels, "pred_instances_3d": predicted}
    return sample | more


def evaluate(name, frames, classes=(), **arguments):
    """Return the metrics of frames of one scene, 0.5 s apart, without the prefix of their names."""
    metric = METRICS.build({"type": name, **arguments})
    metric.dataset_meta = {"classes": classes, "map_classes": classes}
    for number, sample in enumerate(frames):
        place = {"token": f"t{number}", "scene_token": "s", "timestamp": 0.5 * number, "T_global": np.eye(4)}
        metric.process({}, [place | sample])
    return {key.partition("/")[2]: value for key, value in metric.evaluate(len(frames)).items()}
