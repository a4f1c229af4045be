"""Configs: clear errors before anything is built, and what is filled in."""

import os
import sys
from pathlib import Path

import pytest
from mmengine.config import Config
from programs import ROOT
from toy_run import CONFIG

from visdet.engine import (
    ConfigError,
    UserError,
    check_required_keys,
    check_work_dir,
    complete_config,
    load_config,
)
from visdet.engine.config.foreign_scope import adopt_mmdet_scope


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "a_config.py"
    path.write_text(text)
    return str(path)


def test_custom_imports(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "a_module_to_import.py").write_text("")
    load_config(written(tmp_path, "custom_imports = dict(imports='a_module_to_import')"))
    assert "a_module_to_import" in sys.modules
    with pytest.warns(UserWarning, match="no_such_module"):
        load_config(
            written(tmp_path, "custom_imports = dict(imports=['no_such_module'], allow_failed_imports=True)")
        )
    with pytest.raises(UserError, match=r"custom_imports.*a_module_to_import"):
        load_config(written(tmp_path, "custom_imports = ['a_module_to_import']"))
    with pytest.raises(ConfigError, match="there is no module given_as_option"):
        load_config(written(tmp_path, ""), {"custom_imports": {"imports": ["given_as_option"]}})


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("trian_dataloader", "train_dataloader"),
        ("val_evalautor", "val_evaluator"),
        ("workdir", "work_dir"),
        ("load_form", "load_from"),
        ("custom_hook", "custom_hooks"),
    ],
)
def test_a_misspelt_key_names_the_nearest(tmp_path, wrong, right):
    with pytest.raises(ConfigError, match=rf"unknown key '{wrong}'; did you mean '{right}'\?"):
        load_config(written(tmp_path, f"{wrong} = 1"))
    with pytest.raises(ConfigError, match=rf"^--cfg-options.*'{wrong}'.*did you mean '{right}'"):
        load_config(CONFIG, {f"{wrong}.batch_size": 2})


def test_options_reach_lists_and_new_keys_of_known_sections():
    options = {
        "param_scheduler.1.eta_min_ratio": 0.5,
        "train_cfg.max_iters": 7,
        "randomness.deterministic": True,
    }
    cfg, remarks = load_config(CONFIG, options)
    assert cfg.param_scheduler[1].eta_min_ratio == 0.5 and cfg.train_cfg.max_iters == 7
    assert cfg.randomness == {"seed": 5, "deterministic": True} and remarks == []


@pytest.mark.parametrize(
    ("text", "options", "value"),
    [
        ("a = None", {"a.b": 1}, "the config has no such place"),
        ("a = dict(t=(1, 2))", {"a.t.0": 3}, "the config has no such place"),
        ("a = [1]", {"a.x": 3}, "the config has no such place"),
        ("a = [1]", {"a.1": 3}, "the config has no such place"),
        ("a = 1", {"a.x": 3}, "the config has no such place"),
        ("a = None", {"a": {"b": 1}}, {"b": 1}),
        ("a = dict(x=1, y=dict(z=2))", {"a": {"y": {"w": 3}}}, {"x": 1, "y": {"z": 2, "w": 3}}),
        ("a = dict(x=1)", {"a": {"_delete_": True, "w": 3}}, {"w": 3}),
        ("a = [dict(x=1)]", {"a.0.y.z": 3}, [{"x": 1, "y": {"z": 3}}]),
        ("a = 1", {"a": [{"x": 1}]}, [{"x": 1}]),
    ],
)
def test_an_option_is_set_or_says_where_it_does_not_fit(tmp_path, text, options, value):
    path = written(tmp_path, text)
    if not isinstance(value, str):
        assert load_config(path, options)[0].a == value
    else:
        with pytest.raises(ConfigError, match=f"^--cfg-options {next(iter(options))}=.*: {value}"):
            load_config(path, options)


@pytest.mark.parametrize("by_option", [True, False])
def test_vis_backends_are_those_of_the_visualizer(tmp_path, by_option):
    base = written(
        tmp_path, "vis_backends = [dict(type='A')]\nvisualizer = dict(type='V', vis_backends=vis_backends)"
    )
    name = Path(base).name
    (tmp_path / "sub").mkdir()
    child = written(tmp_path / "sub", f"_base_ = '../{name}'\nvis_backends = [dict(type='B')]")
    cfg, remarks = load_config(base, {"vis_backends.0.type": "B"}) if by_option else load_config(child)
    assert cfg.visualizer == dict(type="V", vis_backends=[dict(type="B")]) and not remarks
    both = written(tmp_path / "sub", f"_base_ = '../{name}'\nvis_backends = 1\nvisualizer = dict(type='W')")
    assert load_config(both)[0].visualizer == dict(type="W", vis_backends=[dict(type="A")])


def test_changing_a_helper_variable_is_remarked_on(tmp_path):
    path = written(tmp_path, "data_root = 'a/'\nmodel = dict(root=data_root)")
    cfg, remarks = load_config(path, {"data_root": "b/"})
    assert cfg.model.root == "a/"
    assert len(remarks) == 1 and "data_root changes a helper variable" in remarks[0]


def test_an_unwritable_work_dir(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"folder .*file/run cannot be written: Not a directory"):
        check_work_dir(str(tmp_path / "file" / "run"))
    with pytest.raises(UserError, match="folder /proc/visdet cannot be written"):
        check_work_dir("/proc/visdet")
    check_work_dir(str(tmp_path / "new" / "run"))
    assert os.listdir(tmp_path / "new" / "run") == []


def test_required_keys():
    cfg = Config({"model": {}, "train_cfg": {"max_iters": 3}})
    with pytest.raises(ConfigError, match="lacks train_dataloader, optim_wrapper"):
        check_required_keys(cfg, for_training=True)
    with pytest.raises(ConfigError, match="lacks test_dataloader, test_cfg, test_evaluator"):
        check_required_keys(cfg, for_training=False)
    given = ("model", "train_dataloader", "train_cfg", "optim_wrapper", "val_dataloader")
    with pytest.raises(
        ConfigError, match=r"val_cfg and val_evaluator are None\. To leave out validation, set all of"
    ):
        check_required_keys(Config({key: {} for key in given}), for_training=True)


def test_completing_an_iteration_based_config():
    cfg = Config(
        {
            "train_cfg": {"type": "IterBasedTrainLoop", "max_iters": 90, "val_interval": 30},
            "param_scheduler": [
                {"type": "CosineAnnealingLR", "by_epoch": False, "begin": 10},
            ],
            "train_dataloader": {"num_workers": 0, "persistent_workers": True},
            "val_dataloader": {"num_workers": 2, "persistent_workers": True},
        }
    )
    complete_config(cfg)
    assert cfg.default_scope == "visdet"
    assert cfg.train_dataloader.persistent_workers is False and cfg.val_dataloader.persistent_workers is True
    assert cfg.default_hooks.checkpoint == {"type": "CheckpointHook", "by_epoch": False, "interval": 30}
    assert cfg.default_hooks.logger == {"type": "LoggerHook", "log_metric_by_epoch": False}
    assert cfg.log_processor == {"by_epoch": False}
    assert "end" not in cfg.param_scheduler[0]


def test_completing_an_epoch_based_config_keeps_what_it_says():
    cfg = Config(
        {
            "train_cfg": {"type": "EpochBasedTrainLoop", "max_epochs": 12},
            "default_hooks": {"checkpoint": {"type": "CheckpointHook", "interval": 4}, "logger": None},
            "param_scheduler": {"type": "CosineAnnealingLR", "T_max": 5},
        }
    )
    complete_config(cfg)
    assert cfg.default_hooks.checkpoint == {"type": "CheckpointHook", "interval": 4, "by_epoch": True}
    assert cfg.default_hooks.logger is None
    assert cfg.log_processor == {"by_epoch": True}
    assert cfg.param_scheduler == {"type": "CosineAnnealingLR", "T_max": 5}


def test_stock_mmdet_configs_are_read_in_our_scope():
    cfg = Config(
        {
            "default_scope": "mmdet",
            "model": {"type": "mmdet.DeformableDETR", "backbone": {"type": "ResNet", "_scope_": "mmdet"}},
            "train_pipeline": [{"type": "mmcv.LoadImageFromFile"}, {"type": "mmengine.Thing"}],
        }
    )
    remarks = adopt_mmdet_scope(cfg)
    assert cfg.default_scope == "visdet"
    assert cfg.model == {"type": "DeformableDETR", "backbone": {"type": "ResNet"}}
    assert [step["type"] for step in cfg.train_pipeline] == ["LoadImageFromFile", "mmengine.Thing"]
    assert len(remarks) == 1 and "default_scope='visdet'" in remarks[0] and " 3 prefixes" in remarks[0]
    assert adopt_mmdet_scope(Config({"default_scope": "visdet", "model": {"type": "mmdet.X"}})) == []


def test_the_published_learning_rates(tmp_path):
    """AdamW 2e-4, a tenth of it for the backbone and the layers that say where to look, a tenth after epoch 40."""
    from mmengine.optim import build_optim_wrapper
    from torch import nn

    schedule = Config.fromfile(ROOT / "configs/_base_/schedules/schedule_50e_adamw.py")
    expected = {"backbone": 2e-5, "sampling_offsets": 2e-5, "reference_points_fc": 2e-5, "value_proj": 2e-4}
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in expected})
    wrapper = build_optim_wrapper(model, schedule.optim_wrapper)
    rates = {id(p): group["lr"] for group in wrapper.param_groups for p in group["params"]}
    for name, rate in expected.items():
        assert [rates[id(p)] for p in model[name].parameters()] == pytest.approx([rate, rate]), name
    assert {group["weight_decay"] for group in wrapper.param_groups} == {1e-4}
    assert wrapper.clip_grad_kwargs == {"max_norm": 0.1, "norm_type": 2}
    assert schedule.param_scheduler[0].milestones == [40] and schedule.train_cfg.max_epochs == 50
