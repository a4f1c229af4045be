"""Training by two processes on the CPU: what one of them meets, both act upon."""

import itertools

import pytest
import torch
from mmengine.hooks import Hook
from torch.nn.utils import parameters_to_vector
from torch.testing import assert_close
from toy_run import in_two_processes, toy_runner

from visdet.engine import NonFiniteLossError


class Snapshots(Hook):
    """Keeps the weights before training and after each iteration."""

    def __init__(self):
        self.weights = []

    def before_train(self, runner):
        self.weights.append(parameters_to_vector(runner.model.parameters()).detach())

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.before_train(runner)


# The times that a bad loss is skipped, and whether DistributedDataParallel averages the gradients.
TRAININGS = {"skips": (20, False), "stops": (1, False), "by the wrapper": (20, True)}


def run_process(rank, folder):
    for name, options in TRAININGS.items():
        train(rank, folder / name, *options)


def train(rank, folder, max_skips, by_the_wrapper):
    hook = {"type": "CheckInvalidLossHook", "action": "skip", "max_skips": max_skips}
    runner = toy_runner(
        folder / "run",
        launcher="pytorch",
        model__explode_at=3 if rank == 1 else 5,
        model__explodes_gradients=rank == 1,
        train_cfg__max_iters=6,
        find_unused_parameters=by_the_wrapper,
        default_hooks__invalid_loss=hook,
    )
    snapshots = Snapshots()
    runner.register_hook(snapshots)
    error = ""
    try:
        runner.train()
    except NonFiniteLossError as found:
        error = str(found)
    assert runner.optim_wrapper.averages_gradients != by_the_wrapper
    torch.save({"weights": snapshots.weights, "error": error}, folder / f"result{rank}.pt")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The weights and the errors of both processes in each training."""
    folder = tmp_path_factory.mktemp("two_processes")
    for name in TRAININGS:
        (folder / name).mkdir()
    in_two_processes(run_process, folder)
    return {name: [torch.load(folder / name / f"result{rank}.pt") for rank in (0, 1)] for name in TRAININGS}


@pytest.mark.timeout(120)
def test_a_bad_loss_of_one_process_is_skipped_by_both(results):
    first, second = (result["weights"] for result in results["skips"])
    assert len(first) == len(second) == 7, "before training and after each of six steps"
    for step, (ours, theirs) in enumerate(zip(first, second, strict=True)):
        assert torch.equal(ours, theirs), f"weights differ after step {step}"
        assert ours.isfinite().all()
    moved = [not torch.equal(before, after) for before, after in itertools.pairwise(first)]
    skipped = [step for step, has_moved in enumerate(moved, 1) if not has_moved]
    assert skipped == [3, 5], "the loss of step 3 has gradients of NaN, that of step 5 has finite ones"


@pytest.mark.timeout(120)
def test_both_processes_stop_at_the_bad_loss_of_one(results):
    """A process that went on alone would wait for the gradients of the other."""
    good, bad = (result["error"] for result in results["stops"])
    assert good.startswith("iteration 3: a loss of another process")
    assert bad.startswith("iteration 3: loss = nan")


@pytest.mark.timeout(120)
def test_gradients_are_those_that_the_wrapper_would_average(results):
    for ours, theirs in zip(results["skips"], results["by the wrapper"], strict=True):
        assert_close(ours["weights"], theirs["weights"])
