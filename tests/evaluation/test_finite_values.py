"""No metric accepts values that are NaN or infinite, and frames of several data sets stay apart."""

import math

import numpy as np
import pytest
import torch

from visdet.registry import METRICS

BAD = (math.nan, math.inf, -math.inf)


def driving_sample(**changes):
    """Return a frame with one box, one line and a plan, which every driving metric accepts."""
    vectors = np.empty(1, dtype=object)
    vectors[0] = np.array([[0.0, 0.0], [0.0, 10.0]])
    future = np.empty(6, dtype=object)
    future[:] = [np.zeros((0, 7))] * 6
    boxes = torch.tensor([[5.0, 5.0, 0.0, 4.0, 2.0, 1.5, 0.0, 0.0, 0.0]])
    labels = torch.tensor([0])
    scores = torch.tensor([0.9])
    return {
        "token": "t",
        "scene_token": "s",
        "timestamp": 1.0,
        "T_global": np.eye(4),
        "ego2global_translation": np.zeros(3),
        "gt_bboxes_3d": boxes.clone(),
        "gt_labels_3d": labels,
        "instance_id": np.array([3]),
        "gt_agent_fut_trajs": torch.zeros(1, 12, 2),
        "gt_agent_fut_masks": torch.ones(1, 12),
        "gt_ego_fut_trajs": torch.ones(6, 2),
        "gt_ego_fut_masks": torch.ones(6),
        "ego_status": torch.zeros(10),
        "fut_boxes": future,
        "vectors": vectors,
        "vector_labels": np.array([1]),
        "pred_instances_3d": {
            "boxes_3d": boxes.clone(),
            "scores_3d": scores,
            "labels_3d": labels,
            "instance_ids": torch.tensor([8]),
            "cls_scores": scores,
            "trajs_3d": torch.zeros(1, 6, 12, 2),
        },
        "pred_map": {
            "vectors": [torch.tensor([[0.0, 0.0], [0.0, 9.0]])],
            "scores": torch.tensor([0.5]),
            "labels": torch.tensor([1]),
        },
        "pred_plan": {"final_planning": torch.ones(6, 2).cumsum(0)},
    } | changes


CLASSES = {"classes": ("car", "pedestrian"), "map_classes": ("ped_crossing", "divider")}
# What each metric reads, of the predictions and of the ground truth.
READ = {
    "NuScenesMetric": (["boxes_3d", "scores_3d"], ["gt_bboxes_3d", "T_global", "ego2global_translation"]),
    "TrackingMetric": (["boxes_3d", "scores_3d", "cls_scores"], ["gt_bboxes_3d", "T_global", "timestamp"]),
    "MotionMetric": (
        ["boxes_3d", "scores_3d", "cls_scores", "trajs_3d"],
        ["gt_bboxes_3d", "gt_agent_fut_trajs"],
    ),
    "PlanningMetric": (["final_planning"], ["gt_ego_fut_trajs", "ego_status", "fut_boxes"]),
    "VectorMapMetric": (["vectors", "scores"], ["vectors"]),
}
KEYS = [
    (metric, kind, key)
    for metric, parts in READ.items()
    for kind, keys in zip(("predicted", "true"), parts, strict=True)
    for key in keys
]


def spoiled(value, bad):
    """Return a copy of a value with one bad number."""
    if isinstance(value, float):
        return bad
    if isinstance(value, np.ndarray) and value.dtype.kind == "O":  # one array per line or step
        copied = value.copy()
        copied[0] = np.full((1, 7), bad)
        return copied
    if isinstance(value, list):
        return [torch.full((2, 2), bad)]
    copied = value.clone() if isinstance(value, torch.Tensor) else value.copy()
    copied.reshape(-1)[-1 if copied.shape != (1, 9) else 0] = bad
    return copied


def build(name):
    metric = METRICS.build({"type": name})
    metric.dataset_meta = CLASSES
    return metric


@pytest.mark.parametrize("name", READ)
def test_finite_values_are_accepted(name):
    metric = build(name)
    metric.process({}, [driving_sample()])
    assert metric.evaluate(1)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name, kind, key", KEYS)
def test_values_that_are_not_finite(name, kind, key, bad):
    sample = driving_sample()
    predictions = {"VectorMapMetric": "pred_map", "PlanningMetric": "pred_plan"}
    part = sample if kind == "true" else sample[predictions.get(name, "pred_instances_3d")]
    part[key] = spoiled(part[key], bad)
    message = rf"{name}: frame t: {kind} {key}.* must be finite, got . NaN or infinite"
    with pytest.raises(ValueError, match=message):
        build(name).process({}, [sample])


def test_unknown_velocities_and_futures_may_be_nan():
    sample = driving_sample()
    sample["gt_bboxes_3d"][:, 7:] = math.nan
    sample["gt_agent_fut_trajs"][:, 6:], sample["gt_agent_fut_masks"][:, 6:] = math.nan, 0
    for name in ("NuScenesMetric", "TrackingMetric", "MotionMetric"):
        metric = build(name)
        metric.process({}, [sample])
        assert metric.evaluate(1)


@pytest.mark.parametrize("name", READ)
def test_frames_of_several_data_sets(name):
    """A sampler repeats frames, but different frames need tokens of their own, and so do different scenes."""
    metric = build(name)
    metric.process({}, [driving_sample(), driving_sample()])
    assert metric.evaluate(2)
    moved = np.eye(4)
    moved[0, 3] = 7.0
    for change, message in (
        ({"scene_token": "r"}, "two frames have the token 't', but their scene_token is s and r"),
        ({"timestamp": 2.0}, "two frames have the token 't', but their timestamp is 1.0 and 2.0"),
        ({"T_global": moved}, "two frames have the token 't', but their T_global is"),
        ({"token": "u"}, "frames 't' and 'u' of scene 's' have the same time 1.0"),
    ):
        metric = build(name)
        metric.process({}, [driving_sample(), driving_sample(**change)])
        with pytest.raises(ValueError, match=f"{name}: .*{message}"):
            metric.evaluate(2)
