"""What data workers need is said before they start, and a worker that fails ends the run with its cause."""

import functools
import multiprocessing
import os
import signal
import time

import pytest
import torch
from mmengine.dataset import default_collate, pseudo_collate
from mmengine.hooks import Hook
from torch.testing import assert_close
from torch.utils.data import DataLoader
from toy_detection import ToyBoxes
from toy_run import losses, toy_runner, train

from visdet.engine import UserError
from visdet.engine.data.data_workers import (
    WorkerError,
    _is_stopped,
    explain_collation,
    worker_failures_explained,
)
from visdet.engine.data.loaders import build_dataloader
from visdet.engine.data.one_block import collated_in_one_block
from visdet.errors import hints_of
from visdet.registry import DATASETS

WORKERS = {"train_dataloader__num_workers": 2, "val_dataloader": None, "val_cfg": None, "val_evaluator": None}


def out_of_memory():
    raise MemoryError


FAILURES = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "asleep": lambda: time.sleep(8),
    "allocation": lambda: torch.empty(2**50),
    "memory": out_of_memory,
}


@DATASETS.register_module()
class FailingBoxes(ToyBoxes):
    """Fails in a worker that reads the image with the index ``at``, or gives something that cannot be sent."""

    def __init__(self, how: str, at: int = 9, **base) -> None:
        self.how, self.at = how, at
        super().__init__(**base)

    def prepare_data(self, idx):
        item = super().prepare_data(idx)
        if idx == self.at:
            FAILURES.get(self.how, int)()
            item["data_samples"].set_metainfo({"function": lambda: None})
        return item


def failing(how: str, **options) -> dict:
    options = {**WORKERS, "default_hooks__checkpoint__save_best": None, **options}
    return {**options, "train_dataloader__dataset": {"type": "FailingBoxes", "how": how}}


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("killed", r"a data worker has died, .* killed by signal: Killed.*Lower num_workers"),
        ("memory", "a data worker has died, .*memory"),
        ("allocation", "a data worker has died, .*allocate memory"),
        (
            "stopped",
            r"data workers \d+.* have been stopped by a signal .SIGSTOP. for the timeout of their loader",
        ),
        (
            "asleep",
            r"no data worker has given a batch for 2 seconds, which is the timeout of the loader. Workers may",
        ),
    ],
)
def test_a_worker_without_memory_is_explained(tmp_path, how, message):
    options = {"train_dataloader__timeout": 2} if how in ("stopped", "asleep") else {}
    with pytest.raises(WorkerError, match=message) as caught:
        train(tmp_path, **failing(how, **options))
    assert hints_of(caught.value) == ["no checkpoint has been written yet"]
    children = [child.pid for child in multiprocessing.active_children()]
    assert not any(map(_is_stopped, children)), "Python would wait for a child that is stopped"


@pytest.mark.parametrize(
    "text", ["Too many open files. Communication with the workers", "received 0 items of ancdata"]
)
def test_too_few_file_handles_are_explained(text):
    told = rf"too few file handles: .*{text}.*`ulimit -n 65536`"
    with pytest.raises(WorkerError, match=told), worker_failures_explained():
        raise RuntimeError(text)


@pytest.mark.parametrize(("given", "expected"), [({}, 1800), ({"timeout": 5}, 5), ({"timeout": 0}, 0)])
def test_a_loader_does_not_wait_for_ever(given, expected):
    base = {"dataset": [1], "batch_size": 1, "sampler": {"type": "DefaultSampler", "shuffle": False}}
    assert build_dataloader({**base, "num_workers": 1, **given}).timeout == expected
    assert build_dataloader({**base, "num_workers": 0}).timeout == 0


@pytest.mark.timeout(180)
def test_a_batch_that_cannot_be_sent_ends_the_run(tmp_path):
    """The loader of torch would wait for it for ever."""
    with pytest.raises(RuntimeError, match=r"sending a batch(.|\n)*pickle"):
        train(tmp_path, **failing("not sent"))


class Interrupt(Hook):
    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.iter + 1 == 4:
            raise KeyboardInterrupt


@pytest.mark.parametrize(("interval", "promised"), [(3, True), (5, False)])
def test_an_interrupt_promises_a_checkpoint_that_exists(tmp_path, interval, promised):
    runner = toy_runner(tmp_path, default_hooks__checkpoint__interval=interval)
    runner.register_hook(Interrupt(), "LOWEST")
    with pytest.raises(KeyboardInterrupt) as caught:
        runner.train()
    [hint] = hints_of(caught.value)
    assert hint == (
        f"`--resume {tmp_path}/iter_3.pth` continues the run"
        if promised
        else "no checkpoint has been written yet"
    )
    assert len(losses(runner)) >= 3


@pytest.mark.parametrize("collate", [pseudo_collate, default_collate])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_samples_that_are_not_packed_are_one_message(collate, num_workers):
    samples = [{"img": torch.zeros(3, size), "boxes": [0.0] * size} for size in (4, 5)]
    loader = DataLoader(samples, batch_size=2, collate_fn=collate, num_workers=num_workers)
    explain_collation(loader)
    with pytest.raises(UserError, match=r"parts are img, boxes; a pipeline must end with .* PackDetInputs"):
        next(iter(loader))


def test_a_batch_arrives_in_one_block_as_it_was():
    """Tensors of all kinds, twice the same one, and what is no plain tensor."""
    one = torch.arange(5.0)
    sample = {
        "one": one,
        "same": one,
        "view": torch.arange(12).view(3, 4).t()[1:],
        "empty": torch.empty(0, 4),
        "conj": torch.tensor([1 + 2j]).conj(),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    collate = functools.partial(collated_in_one_block, lambda samples: samples)
    (found,) = next(iter(DataLoader([sample], num_workers=1, collate_fn=collate)))
    assert_close(found, sample, rtol=0, atol=0)
    assert found["one"] is found["same"] and found["parameter"].requires_grad
    blocks = {found[name].untyped_storage().data_ptr() for name in ("one", "view", "conj", "half")}
    assert len(blocks) == 1
    assert next(iter(DataLoader([sample], collate_fn=collate)))[0] is sample
