"""A resumed run is the uninterrupted run."""

import itertools
import math
import multiprocessing
import random
import re

import numpy as np
import pytest
import torch
from mmengine.dataset import DefaultSampler
from mmengine.hooks import EMAHook, Hook
from torch.testing import assert_close
from torch.utils.data import BatchSampler, DataLoader, Dataset
from toy_detection import Stack, ToyDetector
from toy_run import (
    EPOCHS,
    check_rest,
    check_two_halves,
    hooks_of,
    interrupted,
    losses,
    toy_config,
    toy_runner,
    train,
    validations,
)

from visdet.engine import CheckpointError, build_runner, read_checkpoint
from visdet.engine.data.resumable_batches import ResumableBatches
from visdet.execution.staged_detector import TemporalDetector
from visdet.models.base_detector import BaseDetector
from visdet.registry import MODELS

ITERATIONS = {"train_cfg__max_iters": 24}
SGD = {"type": "OptimWrapper", "optimizer": {"type": "SGD", "lr": 0.01, "momentum": 0.9}}
PLANNED = {"train_dataloader__batch_sampler": {"type": "PlannedBatchSampler"}}


def test_a_detector_of_rotated_boxes_resumes(tmp_path):
    drawn = {"num_train": 4, "num_val": 2, "image_size": 64, "num_workers": 1}
    options = {
        f"{split}_dataloader__dataset__{key}": value
        for split in ("train", "val")
        for key, value in (("data_root", str(tmp_path / "shapes")), ("generator", drawn))
    }
    options |= {"train_dataloader__batch_size": 2, "train_cfg__max_iters": 3, "train_cfg__val_begin": 3}
    options |= {"model__backbone__base_channels": 8, "model__neck__in_channels": [16, 32, 64]}
    options |= {"model__encoder__num_layers": 1, "model__decoder__num_layers": 1}
    options["val_evaluator__ann_file"] = str(tmp_path / "shapes/annotations/instances_val.json")
    config = "rotated_dino/rotated-dino_shapes"
    whole, _ = check_two_halves(tmp_path, 2, config=config, custom_hooks=[], **options)
    assert whole.message_hub.get_scalar("val/dota/AP50").current() >= 0


class Start(Hook):
    """Keeps the weights with which training begins."""

    def before_train(self, runner):
        self.weight = runner.model.conv.weight.detach().clone()


@pytest.mark.parametrize(
    ("loop", "sampler"),
    [
        pytest.param(ITERATIONS, "DefaultSampler", id="iterations-finite"),
        pytest.param(ITERATIONS, "InfiniteSampler", id="iterations-endless"),
        pytest.param(EPOCHS, "DefaultSampler", id="inside-an-epoch"),
        pytest.param(EPOCHS | PLANNED, "DefaultSampler", id="planned-inside-an-epoch"),
        pytest.param(ITERATIONS | PLANNED, "InfiniteSampler", id="planned-endless"),
    ],
)
def test_two_halves_equal_the_whole(tmp_path, loop, sampler):
    """24 images in batches of 4 are six iterations an epoch: 9 is inside the second epoch."""
    _, rest = check_two_halves(tmp_path, 9, **loop, train_dataloader__sampler__type=sampler)
    assert list(losses(rest)) == list(range(10, 25))


@MODELS.register_module()
class ToyTracker(TemporalDetector, BaseDetector):
    """A model with stages, which adds the losses of the step before, halved, to those of the next."""

    def __init__(self):
        super().__init__(data_preprocessor=Stack())
        self.part = ToyDetector()
        self.conv = self.part.conv

    def training_batch(self, inputs, data_samples, state=None):
        return inputs, data_samples, 0.0 if state is None else state

    def predictions_and_costs(self, batch):
        losses = self.part(*batch[:2], mode="loss")
        return losses, float(sum(loss.detach() for loss in losses.values()))

    def assign(self, outputs, batch):
        return None

    def losses(self, predictions, batch, assignment):
        return {**predictions, "loss_memory": batch[2] + 0 * self.conv.bias.sum()}

    def state_after(self, outputs, batch):
        return 0.5 * (outputs + batch[2])

    def plain_state(self, state):
        return {"memory": state}

    def state_of_plain(self, plain):
        return plain["memory"]

    def predict(self, inputs, data_samples):
        return self.part(inputs, data_samples, mode="predict")

    raw_outputs = predict
    prediction_batch = detections = with_detections = None


ONE_CYCLE = {"type": "OneCycleLR", "eta_max": 0.02, "total_steps": 20, "by_epoch": False}
RESTART = {
    "type": "CosineRestartLR",
    "periods": [8, 12],
    "restart_weights": [1, 0.5],
    "eta_min": 0,
    "by_epoch": False,
}


@pytest.mark.parametrize(
    "schedule",
    [
        ONE_CYCLE,
        {**ONE_CYCLE, "anneal_strategy": "linear"},
        {"type": "ReduceOnPlateauLR", "monitor": "toy/accuracy", "rule": "greater", "patience": 0},
        RESTART,
        {"type": "PolyLR", "power": 0.9, "by_epoch": False},
    ],
    ids=["cycle", "linear cycle", "plateau", "restart", "poly"],
)
def test_a_schedule_goes_on(tmp_path, schedule):
    whole, rest = check_two_halves(tmp_path, 9, param_scheduler=[schedule], train_cfg__val_interval=3)
    assert rest.optim_wrapper.get_lr() == whole.optim_wrapper.get_lr()


def test_a_model_of_sequences_remembers(tmp_path):
    whole, rest = check_two_halves(tmp_path, 9, model={"type": "ToyTracker"}, train_cfg__max_iters=14)
    assert rest.steps.state == whole.steps.state > 0


def test_the_seed_of_an_unseeded_run_is_resumed(tmp_path):
    """The order of the data follows the seed, which a config without one draws anew at every start."""
    options = {"randomness": {"seed": None}, "default_hooks__checkpoint__interval": 10}
    interrupted(tmp_path, at=10, **options)
    rest = train(tmp_path, resume="auto", **options)
    assert rest.seed == read_checkpoint(tmp_path / "iter_10.pth")["meta"]["seed"]
    assert rest.train_dataloader.batch_sampler.sampler.seed == rest.seed


def test_validation_does_not_change_training(tmp_path):
    often = train(tmp_path / "often", train_cfg__val_interval=3)
    assert losses(often) == losses(train(tmp_path / "never", train_cfg__val_interval=1000))


def test_resume_skips_by_index_and_reads_no_image(tmp_path):
    options = {"default_hooks__checkpoint__interval": 10}
    interrupted(tmp_path, at=10, **options)
    runner = toy_runner(tmp_path, resume="auto", **options)
    dataset = runner.train_loop.dataloader.dataset
    dataset.full_init()
    read, prepare = [], dataset.prepare_data
    dataset.prepare_data = lambda idx: read.append(idx) or prepare(idx)
    runner.train()
    assert len(read) == 10 * 4


def test_a_cut_checkpoint_is_passed_over(tmp_path, stdout):
    train(tmp_path, default_hooks__checkpoint__interval=5)
    newest = tmp_path / "iter_20.pth"
    newest.write_bytes(newest.read_bytes()[:3000])
    flipped = bytearray((tmp_path / "iter_15.pth").read_bytes())
    flipped[len(flipped) // 2] ^= 0xFF
    (tmp_path / "iter_15.pth").write_bytes(flipped)
    runner = train(tmp_path, resume="auto", default_hooks__checkpoint__interval=5)
    printed = stdout()
    assert f"resumed from {tmp_path}/iter_10.pth at iteration 10" in printed
    assert "iter_20.pth (3000 bytes) cannot be read" in printed and "iter_15.pth" in printed
    assert runner.iter == 20
    assert read_checkpoint(newest)["meta"]["iter"] == 20


@pytest.mark.parametrize("pointer", [b"", b"\xff", b"/elsewhere/iter_10.pth", None])
def test_a_pointer_that_leads_nowhere_is_passed_over(tmp_path, pointer):
    """Other tools do not write it at once, and a folder may be moved."""
    train(tmp_path, train_cfg__max_iters=10)
    if pointer is None:
        (tmp_path / "latest.pth").symlink_to(tmp_path / "gone.pth")
    else:
        (tmp_path / "last_checkpoint").write_bytes(pointer)
    assert train(tmp_path, resume="auto").iter == 20


def damage(path) -> str:
    """Cut a file, and return what is said of it."""
    path.write_bytes(path.read_bytes()[:3000])
    return rf"{path.stem}\.pth \(3000 bytes\) cannot be read"


def test_what_cannot_be_resumed_is_named(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*empty can be resumed"):
        train(tmp_path / "run", resume=str(tmp_path / "empty"))
    first = tmp_path / "first"
    train(first, default_hooks__checkpoint__interval=10)
    older, newer = (damage(first / f"iter_{step}.pth") for step in (10, 20))
    for path in first.glob("best*"):
        path.unlink()
    for folder, resume in (
        (tmp_path / "run", first),
        (tmp_path / "run", first / "iter_20.pth"),
        (first, "auto"),
    ):
        with pytest.raises(CheckpointError, match=newer) as caught:
            train(folder, resume=str(resume))
        assert ("choose another --work-dir" in str(caught.value)) == (resume == "auto")
        assert bool(re.search(older, str(caught.value))) == (resume != first / "iter_20.pth")


def test_auto_with_a_pointer_to_a_checkpoint_that_is_gone_fails(tmp_path):
    train(tmp_path, train_cfg__max_iters=5, default_hooks__checkpoint__save_best=None)
    (tmp_path / "iter_5.pth").unlink()
    with pytest.raises(CheckpointError, match=r"last_checkpoint names iter_5\.pth"):
        train(tmp_path, resume="auto")


def test_auto_without_a_checkpoint_loads_what_load_from_names(tmp_path, stdout):
    train(tmp_path / "stage1", train_cfg__max_iters=5)
    stage1 = str(tmp_path / "stage1" / "iter_5.pth")
    with pytest.raises(CheckpointError, match="does not exist"):
        toy_runner(tmp_path / "stage2", resume="auto", load_from=stage1 + "x")
    runner = toy_runner(tmp_path / "stage2", resume="auto", load_from=stage1, train_cfg__max_iters=5)
    runner.register_hook(start := Start())
    runner.train()
    assert torch.equal(start.weight, read_checkpoint(stage1)["state_dict"]["conv.weight"])
    assert f"starts from the weights of {stage1}" in stdout()
    again = train(tmp_path / "stage2", resume="auto", load_from=stage1 + "x")
    assert next(iter(losses(again))) == 6, "stage 2 goes on, with or without what it began from"


def test_true_resumes_what_load_from_names(tmp_path):
    """mmengine's way to say it, in a config."""
    train(tmp_path / "first", train_cfg__max_iters=10)
    cfg = toy_config(tmp_path / "again", load_from=str(tmp_path / "first" / "iter_10.pth"))
    cfg.resume = True
    runner = build_runner(cfg)
    runner.train()
    assert runner.resumed_from.endswith("first/iter_10.pth") and runner.iter == 20


@pytest.mark.parametrize(
    ("at", "batch_size", "first", "count"),
    [
        pytest.param(6, 8, 4, 9, id="6-to-3-after-an-epoch"),
        pytest.param(6, 6, 5, 12, id="6-to-4-after-an-epoch"),
        pytest.param(6, 3, 9, 24, id="6-to-8-after-an-epoch"),
        pytest.param(9, 12, 4, 5, id="6-to-2-inside-an-epoch"),
        pytest.param(9, 2, 19, 30, id="6-to-12-inside-an-epoch"),
    ],
)
def test_epochs_of_another_length_leave_nothing_out(tmp_path, at, batch_size, first, count, stdout):
    """24 images in batches of 4 are six iterations an epoch, of which four epochs are to be run."""
    options = {
        **EPOCHS,
        "default_hooks__checkpoint__by_epoch": False,
        "default_hooks__checkpoint__interval": 3,
        "optim_wrapper__accumulative_counts": 2,
    }
    interrupted(tmp_path, at=at, **options)
    resumed = train(tmp_path, resume="auto", train_dataloader__batch_size=batch_size, **options)
    assert sorted(losses(resumed)) == list(range(first, first + count))
    assert resumed.epoch == 4 and resumed.iter == resumed.max_iters
    assert "with 6 iterations per epoch, but this run has" in stdout()


@pytest.mark.parametrize("loop", [{}, {**EPOCHS, "train_cfg__max_epochs": 1}], ids=["iterations", "epochs"])
def test_resume_of_a_finished_run_validates_and_trains_nothing(tmp_path, loop, stdout):
    """The run may have been killed after its last checkpoint and before its last validation."""
    finished = train(tmp_path, **loop)
    stdout()
    again = train(tmp_path, resume="auto", **loop)
    assert again.iter == finished.iter and losses(again) == {}
    printed = stdout()
    assert printed.count("toy/accuracy") == 1
    assert f"at iteration {finished.iter} of {finished.iter}" in printed


def test_weights_alone_cannot_be_resumed(tmp_path):
    train(tmp_path, train_cfg__max_iters=5)
    weights_only = tmp_path / "weights.pth"
    torch.save({"state_dict": read_checkpoint(tmp_path / "iter_5.pth")["state_dict"]}, weights_only)
    with pytest.raises(CheckpointError, match="cannot be resumed: it has no optimizer, message_hub, meta"):
        train(tmp_path, resume=str(weights_only))


@pytest.mark.parametrize(
    ("path", "value", "part"),
    [
        (("meta",), {}, "meta"),
        (("meta", "iter"), -1, "meta"),
        (("meta", "iter"), "x", "meta"),
        (("meta", "iter"), math.inf, "meta"),
        (("meta", "epoch"), math.nan, "meta"),
        (("meta", "epoch"), None, "meta"),
        (("message_hub", "runtime_info"), [], "message_hub"),
        (("message_hub",), {}, "message_hub"),
        (("param_schedulers",), 5, "param_schedulers"),
        (("param_schedulers", 0), {}, "param_schedulers"),
        (("meta", "random_states"), 5, r"meta\['random_states'\]"),
        (("meta", "random_states"), [{}], r"meta\['random_states'\]"),
        (("meta", "random_states", 0, "torch"), torch.zeros(5), r"meta\['random_states'\]"),
        (("meta", "accumulated_gradients"), "x", r"meta\['accumulated_gradients'\]"),
        (("optimizer",), {"param_groups": [[1]], "state": {}}, "optimizer"),
        (("optimizer", "state", 0, "momentum_buffer"), torch.zeros(7), r"optimizer.* shape \(7,\), not \("),
    ],
)
def test_a_part_that_cannot_be_restored_is_named(tmp_path, path, value, part):
    train(tmp_path, train_cfg__max_iters=5, optim_wrapper=SGD)
    content = node = read_checkpoint(tmp_path / "iter_5.pth")
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    torch.save(content, tmp_path / "other.pth")
    with pytest.raises(CheckpointError, match=rf"cannot be resumed: its {part}"):
        train(tmp_path, resume=str(tmp_path / "other.pth"), optim_wrapper=SGD)


def test_another_optimizer_cannot_be_resumed(tmp_path):
    train(tmp_path, train_cfg__max_iters=5)
    kind = toy_config(tmp_path).optim_wrapper.optimizer.type
    assert kind != "SGD"
    with pytest.raises(
        CheckpointError, match=rf"cannot be resumed: it has the state of {kind}, but the config has SGD"
    ):
        train(tmp_path, resume="auto", optim_wrapper=SGD)


def test_ema_and_its_counter_are_resumed(tmp_path):
    whole, rest = check_two_halves(tmp_path, 10, custom_hooks=[{"type": "EMAHook", "momentum": 0.05}])
    averages = [hooks_of(runner, EMAHook)[0].ema_model for runner in (whole, rest)]
    assert averages[0].steps == averages[1].steps == 20
    assert_close(list(averages[0].parameters()), list(averages[1].parameters()), rtol=0, atol=0)
    saved = read_checkpoint(tmp_path / "whole" / "iter_20.pth")["state_dict"]["conv.weight"]
    assert torch.equal(saved, averages[0].module.conv.weight.cpu()), (
        "the checkpoint's weights are the average"
    )
    without = train(tmp_path / "without", resume=str(tmp_path / "whole" / "iter_10.pth"))
    check_rest(whole, without, 10)


class Noise(Dataset):
    """What each generator of the worker draws for an item."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return index, random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002


def noise(workers: int, iteration: int = 0, batches: int = 10) -> list:
    sampler = BatchSampler(DefaultSampler(Noise(), shuffle=True, seed=3), batch_size=4, drop_last=False)
    loader = DataLoader(Noise(), batch_sampler=sampler, num_workers=workers, collate_fn=list)
    loader = ResumableBatches.install(loader, endless=True)
    loader.batch_sampler.start_at(seed=5, iteration=iteration, skipped=iteration)
    return list(itertools.islice(loader, batches))


def test_what_a_worker_draws_depends_on_the_batch_alone():
    whole = noise(workers=2)
    assert noise(workers=1) == whole and noise(workers=2, iteration=7, batches=3) == whole[7:]
    drawn = [number for batch in whole for item in batch for number in item[1:]]
    assert len(set(drawn)) == 40 * 3, "no number is drawn twice"


@pytest.mark.parametrize(
    ("loop", "persistent", "at"),
    [(ITERATIONS, False, 9), (EPOCHS, True, 9), (EPOCHS, False, 12)],
    ids=["iterations-new-9", "epochs-persistent-9", "epochs-new-12"],
)
def test_two_halves_with_workers_equal_the_whole(tmp_path, loop, persistent, at):
    """12 is the end of the second epoch, 9 is inside of it."""
    options = {**loop, "train_dataloader__num_workers": 2, "train_dataloader__persistent_workers": persistent}
    children = set(multiprocessing.active_children())
    check_two_halves(tmp_path, at, **options)
    assert set(multiprocessing.active_children()) <= children, "the workers end with the training"


@pytest.mark.parametrize("loop", [{}, EPOCHS], ids=["iterations", "epochs"])
def test_a_validation_that_was_due_when_the_run_was_killed_is_made_up_for(tmp_path, loop):
    """The checkpoint of an iteration is written before its validation."""
    runs = check_two_halves(tmp_path, 6, **(loop or {"train_cfg__val_interval": 6}))
    of_whole, of_rest = map(validations, runs)
    assert of_whole == of_rest and len(of_whole) == 4


def test_a_run_without_iterations_says_so(tmp_path, stdout):
    runner = toy_runner(tmp_path, train_cfg__max_iters=0)
    runner.train()
    assert runner.iter == 0
    assert "from scratch" in stdout()
