"""Predictions of every family as JSON."""

import json

import numpy as np
import pytest
import torch

from visdet.engine import ConfigError
from visdet.engine.inference.sample_json import record_of
from visdet.structures import DetDataSample, DrivingDataSample

META = {"classes": ("car", "bus"), "map_classes": ("divider", "boundary")}


def driving_sample():
    sample = DrivingDataSample(metainfo={"token": "t0"}, gt_labels_3d=torch.zeros(2))
    sample.set_predictions(
        {
            "boxes_3d": torch.arange(9.0)[None],
            "scores_3d": torch.tensor([0.75]),
            "labels_3d": torch.tensor([1]),
            "instance_ids": torch.tensor([7]),
            "trajs_3d": torch.ones(1, 2, 3, 2),
            "trajs_score": torch.tensor([[0.25, 0.5]]),
            "vectors": [np.array([[0.0, 1.0], [2.0, 3.0]])],
            "scores": np.array([0.5]),
            "labels": np.array([0]),
            "final_planning": torch.ones(6, 2),
        }
    )
    return sample


def test_a_driving_frame():
    record = record_of(driving_sample().to_dict(), META)
    assert record == json.loads(json.dumps(record))
    (box,) = record["boxes"]
    assert (box["class"], box["label"], box["score"], box["track"]) == ("bus", 1, 0.75, 7)
    assert box["box_3d"] == list(range(9)) and box["trajectory_scores"] == [0.25, 0.5]
    assert np.shape(box["trajectories"]) == (2, 3, 2) and np.shape(record["plan"]) == (6, 2)
    line = {"class": "divider", "label": 0, "score": 0.5, "points": [[0, 1], [2, 3]]}
    assert record["lines"] == [line] and record["token"] == "t0"


def test_a_sample_without_predictions():
    with pytest.raises(ConfigError, match=r"hold no predictions.*gt_depth"):
        record_of(DetDataSample(gt_depth=torch.zeros(2)).to_dict(), {})


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("part", "key"),
    [
        ("pred_instances_3d", "boxes_3d"),
        ("pred_map", "scores"),
        ("pred_map", "vectors"),
        ("pred_plan", "final_planning"),
    ],
)
def test_predictions_that_are_not_finite(bad, part, key):
    sample = driving_sample().to_dict()
    spoiled = dict(sample[part].items())
    spoiled[key] = [line * bad for line in spoiled[key]] if key == "vectors" else spoiled[key] * bad
    with pytest.raises(ValueError, match=rf"predictions for token t0: {key}\S* must be finite, got \d+ NaN"):
        record_of(sample | {part: spoiled}, META)


def test_detections_that_are_not_finite():
    image = {"bboxes": torch.zeros(1, 4), "scores": torch.tensor([torch.inf]), "labels": torch.tensor([0])}
    with pytest.raises(ValueError, match=r"image a\.jpg: scores must be finite"):
        record_of({"img_path": "a.jpg", "ori_shape": (4, 5), "pred_instances": image}, META)
