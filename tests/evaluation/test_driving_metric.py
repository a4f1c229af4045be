"""Results of several processes: every frame counts once, however many each has seen."""

import numpy as np
import torch
from two_processes import in_two_processes

from visdet.evaluation import DrivingMetric
from visdet.structures import DrivingDataSample
from visdet.structures.driving_data_sample import predictions_of


class CountFrames(DrivingMetric):
    default_prefix = "count"

    def process(self, data_batch, data_samples):
        self.results.extend({"token": token} for token in data_samples)

    def compute_metrics(self, results):
        return {"frames": len(results), "distinct": len({frame["token"] for frame in results})}


def test_a_repeated_frame_counts_once(capsys):
    metric = CountFrames()
    metric.process({}, ["a", "b", "a"])
    assert metric.evaluate(3) == {"count/frames": 2, "count/distinct": 2}
    # And is gone afterwards.
    assert metric.evaluate(3) == {"count/frames": 0, "count/distinct": 0}


def count(tokens):
    metric = CountFrames()
    metric.process({}, tokens)
    return metric.evaluate(5)


def test_processes_with_unequal_numbers_of_frames(tmp_path):
    found = in_two_processes(count, (["a", "b", "c", "d"], ["e", "a"]), tmp_path / "store", "fork")
    assert found == [{"count/frames": 5, "count/distinct": 5}] * 2


def test_what_is_predicted_of_a_sample_and_of_its_dict():
    sample = DrivingDataSample(metainfo={"token": "a"}, gt_labels_3d=torch.zeros(1))
    results = {"scores_3d": torch.ones(3), "labels": np.ones(2), "final_planning": torch.ones(6, 2)}
    sample.set_predictions(results)
    assert len(sample.pred_instances_3d) == 3 and len(sample.pred_map) == 2
    for form in (sample, sample.to_dict()):
        found = predictions_of(form)
        assert found.keys() == results.keys() and all(found[name] is results[name] for name in results)
    assert predictions_of(DrivingDataSample()) == {}
