"""Results of several processes: every frame counts once, however many each has seen."""

import multiprocessing

import numpy as np
import torch
import torch.distributed as dist

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


def _run(rank, tokens, store, answers):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    metric = CountFrames()
    metric.process({}, tokens)
    answers.put((rank, metric.evaluate(5)))
    dist.destroy_process_group()


def test_processes_with_unequal_numbers_of_frames(tmp_path):
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    shares = (["a", "b", "c", "d"], ["e", "a"])
    processes = [
        context.Process(target=_run, args=(rank, tokens, tmp_path / "store", answers))
        for rank, tokens in enumerate(shares)
    ]
    for process in processes:
        process.start()
    received = dict(answers.get(timeout=60) for _ in processes)
    for process in processes:
        process.join()
    expected = {"count/frames": 5, "count/distinct": 5}
    assert received == {0: expected, 1: expected}


def test_what_is_predicted_of_a_sample_and_of_its_dict():
    sample = DrivingDataSample(metainfo={"token": "a"}, gt_labels_3d=torch.zeros(1))
    results = {"scores_3d": torch.ones(3), "labels": np.ones(2), "final_planning": torch.ones(6, 2)}
    sample.set_predictions(results)
    assert len(sample.pred_instances_3d) == 3 and len(sample.pred_map) == 2
    for form in (sample, sample.to_dict()):
        found = predictions_of(form)
        assert found.keys() == results.keys() and all(found[name] is results[name] for name in results)
    assert predictions_of(DrivingDataSample()) == {}
