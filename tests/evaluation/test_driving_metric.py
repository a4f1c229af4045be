"""Results of several processes: every frame counts once, however many each has seen."""

import multiprocessing

import pytest
import torch.distributed as dist

from visdet.evaluation import DrivingMetric
from visdet.evaluation.driving_metric import frames_of_batch


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


@pytest.mark.parametrize("metas", [[{"token": "a"}, {"token": "b"}], {"token": ["a", "b"]}])
def test_frames_of_a_batch(metas):
    batch = {"data_samples": {"img_metas": metas, "gt_labels_3d": [1, 2], "gt_depth": [[0], [0]]}}
    frames = list(frames_of_batch(batch, [{"img_bbox": {"x": 3}}, {"x": 4}]))
    assert frames == [
        ({"token": "a"}, {"gt_labels_3d": 1}, {"x": 3}),
        ({"token": "b"}, {"gt_labels_3d": 2}, {"x": 4}),
    ]
