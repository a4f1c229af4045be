"""mmengine's own hooks run on the trainer as on mmengine's runner."""

import mmengine.hooks
import pytest
from mmengine.hooks import EMAHook
from mmengine.model import BaseTTAModel
from toy_run import hooks_of, losses, toy_runner, train

from visdet.registry import MODELS


@MODELS.register_module()
class FirstOfAugmentations(BaseTTAModel):
    """Returns the predictions for the first augmentation."""

    def test_step(self, data):
        return self.module.test_step(data)

    def merge_preds(self, data_samples_list):
        return [samples[0] for samples in data_samples_list]


def has_ended(runner, folder):
    return runner.iter == 20


def saved(runner, folder):
    return (folder / "iter_10.pth").exists()


# Each hook of mmengine with its options, the key of the default hook that it replaces, and what shows that it ran.
HOOKS = {
    "CheckpointHook": ({"by_epoch": False, "interval": 10}, "checkpoint", saved),
    "DistSamplerSeedHook": ({}, "sampler_seed", has_ended),
    "EMAHook": ({}, None, lambda runner, folder: hooks_of(runner, EMAHook)[0].ema_model.steps == 20),
    "EmptyCacheHook": ({"after_iter": True}, None, has_ended),
    "IterTimerHook": ({}, "timer", lambda runner, folder: "train/time" in runner.message_hub.log_scalars),
    "LoggerHook": (
        {"interval": 5},
        "logger",
        lambda runner, folder: list(folder.glob("*/vis_data/scalars.json")),
    ),
    "NaiveVisualizationHook": ({}, None, has_ended),
    "ParamSchedulerHook": (
        {},
        "param_scheduler",
        lambda runner, folder: runner.param_schedulers[1].last_step > 0,
    ),
    "ProfilerHook": (
        {"by_epoch": False, "profile_times": 2, "json_trace_path": "trace.json"},
        None,
        has_ended,
    ),
    "RuntimeInfoHook": (
        {},
        "runtime_info",
        lambda runner, folder: runner.message_hub.get_info("max_iters") == 20,
    ),
    "SyncBuffersHook": ({}, None, has_ended),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return losses(train(tmp_path_factory.mktemp("plain")))


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_of_mmengine_sees_what_it_reads_and_changes_no_loss(tmp_path, monkeypatch, plain, name):
    monkeypatch.chdir(tmp_path)
    options, key, shows = HOOKS[name]
    hook = {"type": f"mmengine.{name}", **options}
    replaced = {"custom_hooks": [hook]} if key is None else {f"default_hooks__{key}": hook}
    runner = train(tmp_path, **replaced)
    kind = getattr(mmengine.hooks, name)
    assert [type(hook) for hook in hooks_of(runner, kind)] == [kind] and losses(runner) == plain
    assert shows(runner, tmp_path)
    assert name in runner.get_hooks_info()


def test_a_hook_stops_training_early(tmp_path):
    hook = {"type": "EarlyStoppingHook", "monitor": "toy/images", "rule": "greater", "patience": 1}
    assert train(tmp_path, custom_hooks=[hook], train_cfg__val_interval=2).iter == 4


def test_a_hook_replaces_the_model_of_a_test(tmp_path):
    tta = {"type": "PrepareTTAHook", "tta_cfg": {"type": "FirstOfAugmentations"}}
    runner = toy_runner(tmp_path, custom_hooks=[tta])
    assert runner.test()["toy/images"] == 13 and type(runner.model) is FirstOfAugmentations


def test_the_table_has_every_hook_of_mmengine():
    others = {"Hook", "NPUProfilerHook", "EarlyStoppingHook", "PrepareTTAHook"}
    assert set(mmengine.hooks.__all__) == set(HOOKS) | others
