"""The training data's pipeline is replaced from an epoch or an iteration on, in a resumed run, too."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from toy_detection import ToyBoxes
from toy_run import toy_runner, train

from visdet.engine import ConfigError
from visdet.engine.hooks import PipelineSwitchHook
from visdet.registry import DATASETS, TRANSFORMS

read = []


@DATASETS.register_module()
class PipedBoxes(ToyBoxes):
    def prepare_data(self, idx):
        return self.pipeline(super().prepare_data(idx))


@TRANSFORMS.register_module()
class Noted:
    """Notes by which pipeline a sample was read."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, results: dict) -> dict:
        read.append(self.name)
        return results


def options(**switch):
    read.clear()
    hook = {"type": "PipelineSwitchHook", "switch_pipeline": [{"type": "Noted", "name": "new"}], **switch}
    return {
        "train_dataloader__dataset__type": "PipedBoxes",
        "train_dataloader__dataset__pipeline": [{"type": "Noted", "name": "old"}],
        "custom_hooks": [hook],
        "val_dataloader": None,
        "val_cfg": None,
        "val_evaluator": None,
    }


def test_from_an_iteration_on(tmp_path):
    train(tmp_path, **options(switch_iter=3), train_cfg__max_iters=5, default_hooks__checkpoint__interval=4)
    assert read == ["old"] * 3 * 4 + ["new"] * 2 * 4
    train(tmp_path, resume="auto", **options(switch_iter=3), train_cfg__max_iters=6)
    assert read == ["new"] * 4, "5 of 6 iterations were done"


def test_from_an_epoch_on(tmp_path):
    epochs = {"train_cfg": {"type": "EpochBasedTrainLoop", "max_epochs": 2, "_delete_": True}}
    train(tmp_path, **options(switch_epoch=1), **epochs, param_scheduler=None)
    assert read == ["old"] * 24 + ["new"] * 24


def test_data_sets_inside_of_another_get_the_pipeline(tmp_path):
    settings = options(switch_iter=1)
    inner = {
        "type": settings.pop("train_dataloader__dataset__type"),
        "pipeline": settings.pop("train_dataloader__dataset__pipeline"),
    }
    repeated = {"_delete_": True, "type": "RepeatDataset", "times": 2, "dataset": inner}
    train(tmp_path, **settings, train_dataloader__dataset=repeated, train_cfg__max_iters=2)
    assert read == ["old"] * 4 + ["new"] * 4
    outer = SimpleNamespace(pipeline="old", dataset=SimpleNamespace(pipeline="reads"))
    loader = SimpleNamespace(dataset=outer, num_workers=0, persistent_workers=False)
    runner = SimpleNamespace(train_dataloader=loader, iter=0, epoch=0, logger=Mock())
    hook = PipelineSwitchHook(switch_iter=0)
    hook.before_train(runner)
    hook.before_train_epoch(runner)
    assert outer.pipeline is hook.pipeline and outer.dataset.pipeline == "reads"
    plain = SimpleNamespace(train_dataloader=SimpleNamespace(dataset=range(4)))
    with pytest.raises(ConfigError, match="PipelineSwitchHook: range has no pipeline to replace"):
        PipelineSwitchHook(switch_iter=1).before_train(plain)


def test_what_workers_would_not_see_is_refused(tmp_path):
    runner = toy_runner(tmp_path, **options(switch_iter=3), train_dataloader__num_workers=1)
    with pytest.raises(ConfigError, match=r"train_dataloader\.num_workers=0, or .* got num_workers=1"):
        runner.train()
    with pytest.raises(ConfigError, match="either switch_epoch or switch_iter must be given, got 1 and 2"):
        PipelineSwitchHook(switch_epoch=1, switch_iter=2)
