"""What a checkpoint holds of a run, and what a run takes over from it whose config has changed."""

import json
import math
import re
from types import SimpleNamespace

import pytest
import torch
from mmengine.dist import is_main_process
from mmengine.hooks import EarlyStoppingHook, Hook
from torch.utils.data import BatchSampler
from toy_detection import ToyDetector
from toy_run import (
    CONFIG,
    EPOCHS,
    check_equal_weights,
    check_rest,
    hooks_of,
    in_two_processes,
    interrupted,
    losses,
    save_weights,
    toy_config,
    toy_runner,
    train,
    validations,
)

import visdet
from visdet.engine import ConfigError, OptimWrapper, build_runner, read_checkpoint
from visdet.engine.checkpoints import run_state
from visdet.registry import HOOKS


@HOOKS.register_module()
class SavesByItself(Hook):
    """Saves a checkpoint as a hook of a user does."""

    def __init__(self, at, alone=False, **options):
        self.at, self.alone, self.options = at, alone, options

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.iter + 1 == self.at and (is_main_process() or not self.alone):
            runner.save_checkpoint(runner.work_dir, "own.pth", by_epoch=False, **self.options)


@HOOKS.register_module()
class Remembers(Hook):
    """Counts iterations, and remembers its count."""

    def __init__(self, priority=None):
        self.count = 0
        if priority:
            self.priority = priority

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.count += 1

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


@pytest.mark.parametrize(
    "options",
    [{}, {"optim_wrapper__accumulative_counts": 5}, EPOCHS],
    ids=["iterations", "accumulated", "inside-an-epoch"],
)
def test_a_checkpoint_that_a_hook_saves_is_complete(tmp_path, stdout, options):
    options = {**options, "custom_hooks": [{"type": "SavesByItself", "at": 8}]}
    whole = train(tmp_path / "whole", **options)
    own = read_checkpoint(tmp_path / "whole" / "own.pth")
    assert own["meta"]["iter"] == 8 and own["meta"]["epoch"] == int("train_cfg" in options)
    stdout()
    rest = train(tmp_path / "rest", resume=str(tmp_path / "whole" / "own.pth"), **options)
    check_rest(whole, rest, 8)
    assert "not complete" not in stdout()


@pytest.mark.parametrize("moment", ["after_train_iter", "after_val_epoch"])
def test_a_hook_need_not_say_what_is_done(tmp_path, moment):
    """mmengine's default, by_epoch=True, would count an epoch more and an iteration less."""
    hook = Hook()

    def save(runner, **_):
        if runner.iter == 10:
            runner.save_checkpoint(str(tmp_path), "own.pth")

    setattr(hook, moment, save)
    runner = toy_runner(tmp_path / "whole")
    runner.register_hook(hook)
    runner.train()
    rest = train(tmp_path / "rest", resume=str(tmp_path / "own.pth"))
    assert losses(rest) == {step: loss for step, loss in losses(runner).items() if step >= min(losses(rest))}
    assert min(losses(rest)) == (12 if moment == "after_train_iter" else 11)


@pytest.mark.parametrize(
    ("lost", "named"),
    [
        (("meta", "random_states"), "meta['random_states']"),
        (("hooks", "Remembers"), "hooks['Remembers']"),
        (("meta", "recipe"), None),
    ],
)
def test_a_checkpoint_that_is_not_complete_says_so(tmp_path, stdout, lost, named):
    options = {"custom_hooks": [{"type": "Remembers"}], "train_cfg__max_iters": 5}
    train(tmp_path, **options)
    content = read_checkpoint(tmp_path / "iter_5.pth")
    del content[lost[0]][lost[1]]
    torch.save(content, tmp_path / "less.pth")
    stdout()
    train(tmp_path / "rest", resume=str(tmp_path / "less.pth"), **{**options, "train_cfg__max_iters": 6})
    printed = stdout()
    assert (f"less.pth is not complete: it lacks {named}. " in printed) == (named is not None)
    assert ("less.pth does not say which config its learning rates" in printed) == (named is None)


@pytest.mark.parametrize("priority", [None, "LOWEST"])
def test_hooks_keep_their_memory(tmp_path, priority):
    hooks = [{"type": "Remembers"}, {"type": "Remembers", "priority": priority}]
    train(tmp_path, custom_hooks=hooks, train_cfg__max_iters=10)
    rest = train(tmp_path, resume="auto", custom_hooks=hooks, train_cfg__max_iters=14)
    assert [hook.count for hook in hooks_of(rest, Remembers)] == [14, 14]


@pytest.mark.parametrize("best", ["toy/images", None])
def test_early_stopping_goes_on_counting(tmp_path, best):
    """Its best value is that of the first validation, and six validations without a better one end the run."""
    hook = {"type": "EarlyStoppingHook", "monitor": "toy/images", "rule": "greater", "patience": 6}
    options = {
        "custom_hooks": [hook], "train_cfg__val_interval": 2, "train_cfg__max_iters": 40,
        "default_hooks__checkpoint__save_best": best, "default_hooks__checkpoint__rule": "greater",
    }  # fmt: skip
    train(tmp_path, **{**options, "train_cfg__max_iters": 7})
    rest = train(tmp_path, resume="auto", **options)
    whole = train(tmp_path / "whole", **options)
    for runner in (rest, whole):
        assert hooks_of(runner, EarlyStoppingHook)[0].best_score == 13
    assert (rest.iter, whole.iter) == (14, 14)
    options["custom_hooks"] = [{**hook, "monitor": "toy/accuracy"}]
    options["default_hooks__checkpoint__save_best"] = best and "toy/accuracy"
    other = train(tmp_path / "other", resume=str(tmp_path / "iter_14.pth"), **options)
    scores = [hooks_of(other, EarlyStoppingHook)[0].best_score]
    scores += [other.message_hub.get_info("best_score")] if best else []
    assert all(score <= 1 for score in scores), "not the number of images"


def test_the_best_score_is_that_of_the_same_data(tmp_path):
    options = {"train_cfg__val_interval": 2, "train_cfg__max_iters": 4}
    train(tmp_path, **options)
    options |= {"train_cfg__max_iters": 6, "val_dataloader__dataset__count": 5}
    train(tmp_path, resume="auto", **options)
    [log] = [text for path in tmp_path.glob("*/*.log") if "no longer by" in (text := path.read_text())]
    assert (
        "chosen by toy/accuracy on 5 samples of ToyBoxes from now on, and no longer by toy/accuracy on" in log
    )


def rates(folder):
    """Return {iteration: learning rate} of the runs in a folder."""
    found = {}
    for file in sorted(folder.glob("*/vis_data/scalars.json")):
        records = map(json.loads, file.read_text().splitlines())
        found |= {record["step"]: record["lr"] for record in records if "lr" in record}
    return found


LOGGED = {"default_hooks__logger__interval": 1, "train_cfg__val_interval": 100}
LONG_EPOCHS = {
    "train_cfg": {"_delete_": True, "max_epochs": 4, "val_interval": 4},
    "default_hooks__logger__interval": 1,
}
COSINE = {"type": "CosineAnnealingLR", "by_epoch": False}


POLY = {"type": "PolyLR", "by_epoch": False}
STEPS = {"type": "MultiStepLR", "by_epoch": False}
HALVES = {"type": "ExponentialLR", "gamma": 0.5}
CONVERTED = {**COSINE, "by_epoch": True, "convert_to_iter_based": True}
RATE = {"optim_wrapper__optimizer__lr": 3e-3}
HALF_RATE = {"optim_wrapper__optimizer__lr": 5e-3}
PLATEAU = {
    "type": "ReduceOnPlateauLR",
    "monitor": "toy/images",
    "rule": "greater",
    "patience": 0,
    "factor": 0.5,
}
VALIDATED = {"train_cfg__val_interval": 2, "param_scheduler": [PLATEAU]}
# The iterations before the resumption, the options of both runs, those of the first, those of the second, and what the
# second says to be changed.
CHANGES = {
    "longer": (
        6,
        {**LOGGED, "param_scheduler": [COSINE]},
        {"train_cfg__max_iters": 8},
        {},
        "param_scheduler",
    ),
    "milestones": (
        6,
        LOGGED,
        {"param_scheduler": [{**STEPS, "milestones": [4]}]},
        {"param_scheduler": [{**STEPS, "milestones": [6, 12]}]},
        "param_scheduler",
    ),
    "rate": (6, LOGGED, {}, RATE, "lr 0.01 -> 0.003"),
    "no schedule": (6, {**LOGGED, "param_scheduler": None}, {}, RATE, "lr 0.01 -> 0.003"),
    "plateau": (6, {**LOGGED, **VALIDATED}, {}, HALF_RATE, "lr 0.01 -> 0.005"),
    "kind": (6, LOGGED, {}, {"param_scheduler": [POLY]}, "param_scheduler"),
    "epochs": (
        12,
        {**LONG_EPOCHS, "param_scheduler": [HALVES]},
        {},
        {"param_scheduler": [{**HALVES, "gamma": 0.9}]},
        "param_scheduler",
    ),
    "batch": (
        6,
        {**LONG_EPOCHS, "param_scheduler": [CONVERTED]},
        {},
        {"train_dataloader__batch_size": 8},
        "param_scheduler",
    ),
}


@pytest.mark.parametrize(("done", "options", "before", "after", "said"), CHANGES.values(), ids=CHANGES)
def test_a_changed_config_goes_on_as_if_it_had_been_so_from_the_start(
    tmp_path, stdout, done, options, before, after, said
):
    """The learning rates after the resumption are those of a run that had the new config from its start."""
    new = train(tmp_path / "new", **{**options, **after})
    saved = {
        "default_hooks__checkpoint": {
            "type": "CheckpointHook",
            "by_epoch": False,
            "interval": 6,
            "max_keep_ckpts": -1,
        }
    }
    train(tmp_path / "old", **{**options, **saved, **before})
    stdout()
    resumed = train(tmp_path / "rest", str(tmp_path / "old" / f"iter_{done}.pth"), **{**options, **after})
    assert said in re.search(r"the config differs from that of .* in (.*)\. The", stdout())[1]
    expected, found = rates(tmp_path / "new"), rates(tmp_path / "rest")
    assert found == {step: expected[step] for step in found} and len(found) == len(losses(resumed)) >= 8
    assert resumed.optim_wrapper.get_lr() == new.optim_wrapper.get_lr()


def test_another_weight_decay_is_taken(tmp_path, stdout):
    train(tmp_path, train_cfg__max_iters=5)
    new = {"optim_wrapper__optimizer__weight_decay": 0.5, "train_cfg__max_iters": 6}
    rest = train(tmp_path, resume="auto", **new)
    assert rest.optim_wrapper.param_groups[0]["weight_decay"] == 0.5
    assert "weight_decay 0.01 -> 0.5" in stdout()


def test_a_longer_run_keeps_what_a_plateau_has_reduced(tmp_path):
    train(tmp_path, train_cfg__max_iters=8, **VALIDATED)
    rest = train(tmp_path, resume="auto", train_cfg__max_iters=10, **VALIDATED)
    whole = train(tmp_path / "whole", train_cfg__max_iters=10, **VALIDATED)
    assert rest.optim_wrapper.get_lr() == whole.optim_wrapper.get_lr() != {"lr": [1e-2]}


@pytest.mark.parametrize(("size", "again"), [(8, 4), (5, 2)])
def test_another_batch_size_leaves_no_sample_out(tmp_path, stdout, size, again):
    """24 images in batches of 4: after nine iterations, 12 images of the second pass are read."""

    class Seen(Hook):
        def before_train_iter(self, runner, batch_idx, data_batch=None):
            seen.append([sample.img_id for sample in data_batch["data_samples"]])

    interrupted(tmp_path, 9, default_hooks__checkpoint__interval=9)
    seen = []
    resumed = toy_runner(tmp_path, "auto", train_dataloader__batch_size=size)
    resumed.register_hook(Seen())
    resumed.train()
    said = stdout()
    assert (
        f"Of the 12 samples that were read in this pass over the data, {again} are read again, and none"
        in said
    )
    sampler = resumed.train_dataloader.batch_sampler.sampler
    sampler.set_epoch(1)
    assert seen[0] == list(sampler)[12 - again :][:size]


@pytest.mark.parametrize(
    ("before", "now", "iteration", "kind", "expected"),
    [
        ((4, 1), (4, 2), 3, "epochs", (1, 0, "Of the 12 samples .* 4 are read again, and none is left out")),
        ((4, 2), (4, 1), 2, "epochs", (4, 0, "Of the 16 samples .* 0 are read again")),
        ((4, 2), (8, 1), 2, "epochs", (2, 0, None)),
        ((5, 1), (4, 1), 5, "epochs", (6, 0, "0 are read again")),
        ((4, 1), (8, 1), 9, "iterations", (9, -5, "Of the 12 samples .* 4 are read again")),
        ((4, 1), (8, 1), 9, "endless", (9, -5, "Of the 36 samples .* 4 are read again")),
        ((4, 1), (4, 3), 9, "endless", (9, -6, "Of the 36 samples .* 0 are read again")),
        ((4, 1), (8, 1), 3, "planned", (1, 0, "4 are read again, and others may be left out")),
    ],
)
def test_other_batches_and_processes_go_on_after_the_samples_that_are_read(
    before, now, iteration, kind, expected
):
    """Of 24 samples. The iteration, how many batches the data are ahead of it, and what is said."""

    class Loader:
        batch_sampler = SimpleNamespace(
            batch_size=now[0],
            endless_part=object() if kind == "endless" else None,
            batch_sampler=None if kind == "planned" else BatchSampler([0], 1, drop_last=False),
        )

        def __len__(self):
            return math.ceil(24 / now[0] / now[1])

    by_epoch = kind in ("epochs", "planned")
    loop = SimpleNamespace(by_epoch=by_epoch, iter=iteration, epoch=0, batches_ahead=0)
    said = []
    runner = SimpleNamespace(
        train_loop=loop,
        train_dataloader=Loader(),
        world_size=now[1],
        logger=SimpleNamespace(warning=said.append),
    )
    length = math.ceil(24 / before[0] / before[1])
    meta = {"iterations_per_epoch": length, "batch_size": before[0], "processes": before[1]}
    run_state.go_on_in_data(runner, "x.pth", meta)
    assert (loop.iter, loop.batches_ahead) == expected[:2]
    assert re.search(expected[2], said[0]) if expected[2] else not said


def test_a_run_always_validates_at_its_end_and_says_from_when(tmp_path, stdout):
    for number, (begin, interval, text, count) in enumerate(
        [
            (100, 5, "at the end", 1),
            (12, 5, "every 5 iterations from iteration 15 on", 2),
            (1, 5, "every 5 iterations", 4),
        ]
    ):
        cfg = {"train_cfg__val_begin": begin, "train_cfg__val_interval": interval}
        runner = train(tmp_path / str(number), **cfg)
        assert re.search(rf"^val        13 images, {text}$", stdout(), re.M)
        assert len(validations(runner)) == count


def test_a_hook_that_stops_a_run_lets_it_validate(tmp_path):
    hook = Hook()

    def stop(runner, **_):
        runner.train_loop.stop_training = runner.iter + 1 == 3

    hook.after_train_iter = stop
    runner = toy_runner(tmp_path)
    runner.register_hook(hook)
    runner.train()
    assert runner.iter == 3 and len(validations(runner)) == 1


def run_process(rank, folder):
    options = {"train_cfg__max_iters": 8, "launcher": "pytorch"}
    whole = train(folder / "whole", custom_hooks=[{"type": "SavesByItself", "at": 4}], **options)
    rest = train(folder / "rest", resume=str(folder / "whole" / "own.pth"), **options)
    save_weights(rank, folder, whole, rest)
    run_state._PATIENCE = run_state.datetime.timedelta(seconds=1)
    alone = [{"type": "SavesByItself", "at": 4, "alone": True}]
    train(folder / "alone", custom_hooks=alone, **options)


@pytest.mark.timeout(180)
def test_processes_save_together_and_a_hook_of_the_main_one_alone_holds_none_up(tmp_path):
    in_two_processes(run_process, tmp_path)
    check_equal_weights(tmp_path)
    assert len(read_checkpoint(tmp_path / "whole" / "own.pth")["meta"]["random_states"]) == 2
    assert "random_states" not in read_checkpoint(tmp_path / "alone" / "own.pth")["meta"]
    assert len(read_checkpoint(tmp_path / "alone" / "iter_8.pth")["meta"]["random_states"]) == 2


def test_an_optimizer_wrapper_may_be_an_object(tmp_path):
    cfg = toy_config(tmp_path, train_cfg__max_iters=3)
    cfg.model = model = ToyDetector()
    cfg.optim_wrapper = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    runner = build_runner(cfg)
    weight = runner.model.conv.weight
    before = weight.detach().clone()
    runner.train()
    assert not torch.equal(before, weight)
    cfg.model = {"type": "ToyDetector"}
    cfg.experiment_name = "other"
    with pytest.raises(ConfigError, match="parameters that the model does not have"):
        build_runner(cfg).train()


def test_hooks_can_call_what_the_docstring_promises(tmp_path):
    runner = toy_runner(tmp_path, load_from=None)
    runner.optim_wrapper = runner.build_optim_wrapper(runner.cfg.optim_wrapper)
    runner.scale_lr(runner.optim_wrapper, {"enable": True, "base_batch_size": 2})
    assert runner.optim_wrapper.get_lr() == {"lr": [2e-2]}
    (schedule,) = runner.build_param_scheduler({**COSINE, "end": 10})
    assert schedule.end == 10 and len(runner.build_evaluator({"type": "ToyAccuracy"}).metrics) == 1
    runner.register_custom_hooks([{"type": "Remembers"}, Remembers("LOWEST")])
    assert len(hooks_of(runner, Remembers)) == 2 and type(runner.hooks[-1]) is Remembers
    count = len(runner.hooks)
    runner.register_hooks(custom_hooks=[{"type": "Remembers"}])
    assert len(runner.hooks) == count + 7
    runner.load_or_resume()
    assert not runner.has_loaded


def test_compiling_says_how_far_it_is(tmp_path, stdout):
    train(tmp_path, train_cfg__max_iters=2, compile={"backend": "eager"})
    printed = stdout()
    assert "compile: torch compiles the training step" in printed
    assert re.search(r"^compile: 1 part compiled after \d+ s$", printed, re.M)


def test_the_last_iteration_is_logged(tmp_path):
    options = {
        "train_cfg__max_iters": 7,
        "train_cfg__val_interval": 100,
        "default_hooks__logger__interval": 5,
    }
    train(tmp_path, **options)
    assert list(rates(tmp_path)) == [5, 7]


@pytest.mark.parametrize("stage", ["train", "evaluate"])
def test_a_run_that_fails_leaves_no_empty_folder(tmp_path, stage):
    def run(**options):
        if stage == "train":
            visdet.train(CONFIG, work_dir=tmp_path / "runs" / "new", **options)
        else:
            visdet.evaluate(CONFIG, "gone.pth", work_dir=tmp_path / "new", show_dir=tmp_path / "pictures")

    with pytest.raises(visdet.engine.CheckpointError, match=r"gone\.pth does not exist"):
        run(from_="gone.pth")
    assert not list(tmp_path.iterdir())
