"""Mistakes in a config, and places that cannot be written, are one message before data are read."""

import errno
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from unittest.mock import Mock

import pytest
import torch
from mmengine.optim import OptimWrapper
from programs import ROOT
from toy_detection import ToyBoxes
from toy_run import error_of, toy_config

from visdet.engine import UserError, build_runner, check_out_file, write_detections
from visdet.engine.checkpoints.checkpoint import os as os_of_checkpoint
from visdet.engine.errors import explain
from visdet.engine.process.places import free_folder, only_training_in

PLATEAU = {"type": "ReduceOnPlateauLR", "by_epoch": False, "rule": "greater"}
FFN = {"_delete_": True, "type": "FFN"}
COCO = {"_delete_": True, "type": "CocoMetric"}
AMP = {"_delete_": True, "type": "AmpOptimWrapper", "optimizer": {"type": "SGD", "lr": 1}}
WRAPPER = OptimWrapper(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1))
MULTI_STEP = {"type": "MultiStepLR", "by_epoch": False}
PARAMWISE = "optim_wrapper__paramwise_cfg"


@pytest.fixture
def no_data(monkeypatch):
    monkeypatch.setattr(ToyBoxes, "full_init", Mock(side_effect=AssertionError("data were read")))


def message_of(tmp_path, **options) -> str:
    error = error_of(tmp_path, **options)
    message = explain(error)
    assert message is not None, repr(error)
    return message


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"model": "ToyDetector"}, "model"),
        ({"model__type": None}, "model"),
        ({"model__channels": "8"}, "model channels"),
        ({"model__channels": 0}, "model conv.weight"),
        ({"model__chanels": 3}, "model ToyDetector 'chanels'"),
        ({"model__type": "ToyDetecter"}, "'ToyDetecter' visdet::model 'ToyDetector'"),
        (
            {"model": {"_delete_": True, "type": "DeformableDETR", "encoder": 3, "backbone": 3}},
            "model DeformableDETR",
        ),
        ({"model": {**FFN, "embed_dims": 10**9, "feedforward_channels": 10**9}}, "model"),
        ({"val_dataloader__dataset__pipeline": ["x"]}, "val_dataloader.dataset pipeline"),
        ({"train_dataloader": [1]}, "train_dataloader"),
        ({"train_dataloader__batch_size": 0}, "train_dataloader.batch_size"),
        ({"train_dataloader__dataset__count": "many"}, "train_dataloader.dataset count"),
        ({"train_dataloader__batchsize": 3}, "train_dataloader 'batchsize'"),
        ({"train_dataloader__dataset__cuont": 3}, "train_dataloader.dataset 'cuont'"),
        ({"train_dataloader__dataset__type": "ToyBoxez"}, "'ToyBoxez' @DATASETS.register_module()"),
        ({"train_cfg__max_iter": 3}, "train_cfg 'max_iter' max_iters"),
        ({"train_cfg__max_iters": 0.5}, "train_cfg max_iters"),
        ({"train_cfg__val_interval": 0}, "train_cfg val_interval"),
        ({"train_cfg__dynamic_intervals": [("a", 1)]}, "train_cfg dynamic_intervals"),
        ({"param_scheduler": [{**MULTI_STEP, "milestones": ["5"]}]}, "param_scheduler.0 milestones"),
        ({"param_scheduler": {"type": "ExponentialLR", "gamma": 0.9}}, "param_scheduler (ExponentialLR)"),
        ({"param_scheduler__0__by_epoch": "False"}, "param_scheduler.0 by_epoch"),
        ({"default_hooks__checkpoint": "CheckpointHook"}, "default_hooks"),
        ({"default_hooks__timer": {"interval": 1}}, "default_hooks interval"),
        ({"default_hooks__checkpoint__by_epoch": True}, "default_hooks.checkpoint (CheckpointHook)"),
        ({"default_hooks__checkpoint__interval": "5"}, "default_hooks.checkpoint interval"),
        ({"default_hooks__checkpoint__save_best": "nonsense"}, "default_hooks.checkpoint"),
        ({"default_hooks__checkpoint__filename_tmpl": "{x}.pth"}, "filename_tmpl"),
        ({"default_hooks__logger__interval": -5}, "default_hooks.logger interval"),
        ({"custom_hooks": {"type": "EMAHook"}}, "custom_hooks"),
        ({"custom_hooks": [{"type": "EarlyStoppingHook", "monitor": "x"}]}, "custom_hooks rule"),
        ({"custom_hooks": [{"type": "EMAHook", "priority": "NOPE"}]}, "custom_hooks.0"),
        ({"custom_hooks": [{"type": "EMAHook", "momentum": 2}]}, "custom_hooks momentum range"),
        ({"env_cfg": None}, "env_cfg"),
        ({"env_cfg__mp_cfg__mp_start_method": "x"}, "env_cfg 'x'"),
        ({"randomness__seed": 2**32}, "randomness.seed"),
        ({"runner_type": 5}, "runner_type"),
        ({"visualizer__vis_backends": "LocalVisBackend"}, "visualizer vis_backends"),
        ({"visualizer__line_width": "x", "visualizer__type": "DetLocalVisualizer"}, "line_width"),
        ({"optim_wrapper__optimizer__lr": "1e-3"}, "optim_wrapper 'str'"),
        ({"optim_wrapper__optimizer__lr": -1.0}, "optim_wrapper learning rate"),
        ({"optim_wrapper__optimizer__lr": float("inf")}, "optim_wrapper lr inf"),
        ({"optim_wrapper__clip_grad__max_norm": -1.0}, "optim_wrapper max_norm -1.0"),
        ({"optim_wrapper__clip_grad__max_nrom": 1.0}, "optim_wrapper clip_grad 'max_nrom' max_norm"),
        ({PARAMWISE: {"custom_kyes": {}}}, "paramwise_cfg 'custom_kyes' custom_keys"),
        ({PARAMWISE: {"custom_keys": {"conv": {"lr_mul": 0.1}}}}, "custom_keys.conv.lr_mul 'lr_mult'"),
        ({PARAMWISE: {"custom_keys": {"conv": {"lr_mult": -1}}}}, "custom_keys.conv.lr_mult -1"),
        ({"optim_wrapper__optimizer__type": "AdamX"}, "'AdamX' visdet::optimizer"),
        (
            {"optim_wrapper__optimizer__weight_deacy": 3},
            "optim_wrapper.optimizer 'weight_deacy'",
        ),
        ({"optim_wrapper": {**AMP, "dtype": "float8"}}, "optim_wrapper dtype 'float8'"),
        ({"optim_wrapper": {"_delete_": True, "head": WRAPPER}}, "optim_wrapper one optimizer"),
        ({"log_level": "1x"}, "log_level '1x'"),
        ({"val_evaluator__type": "ToyAcuracy"}, "'ToyAcuracy' visdet::metric"),
        ({"val_evaluator": {**COCO, "proposal_nums": 7}}, "val_evaluator proposal_nums"),
        ({"val_evaluator": {**COCO, "backend": "coco"}}, "backend"),
        ({"log_processor": {"window_size": 0}}, "log_processor.window_size"),
        ({"graph": "x"}, "graph"),
        ({"compile": 5}, "compile"),
        ({"activation_checkpointing": ["nope"]}, "activation_checkpointing nope"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mistake_is_one_message_before_training(tmp_path, options, names):
    found = message_of(tmp_path, **options)
    assert all(name in found for name in names.split(" ")) and len(found.splitlines()[0]) < 400, found


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({"default_hooks__checkpoint__save_best": "coco/bbox_mAPP"}, "save_best of the checkpoint hook"),
        (
            {"default_hooks__checkpoint__save_best": ["coco/bbox_mAP", "bbox_mAP"]},
            "save_best of the checkpoint hook",
        ),
        (
            {"custom_hooks": [{"type": "EarlyStoppingHook", "monitor": "coco/mAP"}]},
            "monitor of EarlyStoppingHook",
        ),
        ({"param_scheduler": [{**PLATEAU, "monitor": "mAP"}]}, "monitor of ReduceOnPlateauLR"),
        ({"param_scheduler": [PLATEAU]}, "monitor of ReduceOnPlateauLR"),
    ],
)
def test_a_metric_that_validation_does_not_return(tmp_path, no_data, options, place):
    message = message_of(tmp_path, val_evaluator=COCO, **options)
    assert place in message and "validation returns no metric" in message and "coco/bbox_mAP" in message


def test_a_metric_is_missing_where_nothing_validates(tmp_path, no_data):
    nothing = dict.fromkeys(("val_dataloader", "val_cfg", "val_evaluator"))
    message = message_of(tmp_path, default_hooks__checkpoint__save_best="coco/bbox_mAP", **nothing)
    assert "no metric 'coco/bbox_mAP'; there are none" in message


def test_a_metric_of_ones_own_that_is_missing_is_one_message(tmp_path):
    message = message_of(tmp_path, default_hooks__checkpoint__save_best="toy/accuracyy")
    assert "validation returned no metric toy/accuracyy; there are " in message
    assert list(tmp_path.glob("*.pth")), "the checkpoint of this step was saved"


@pytest.mark.parametrize(
    ("key", "option"),
    [
        ("val_evaluator__outfile_prefix", "val_evaluator.outfile_prefix"),
        ("work_dir", "--work-dir"),
    ],
)
def test_a_place_that_cannot_be_written(tmp_path, no_data, key, option):
    (tmp_path / "file").touch()
    cfg = toy_config(tmp_path, **({} if key == "work_dir" else {key: str(tmp_path / "file" / "x" / "y")}))
    if key == "work_dir":
        cfg.work_dir = str(tmp_path / "file" / "x")
    with pytest.raises(UserError, match=f"cannot be written: Not a directory.*{option}"):
        build_runner(cfg)


def test_a_file_that_cannot_be_written(tmp_path):
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "file").touch()
    for path, reason in (("folder.json", "it is a folder"), ("file/x.json", "it is a file")):
        with pytest.raises(UserError, match=reason):
            write_detections(toy_config(tmp_path / "run"), str(tmp_path / path))
    check_out_file(tmp_path / "new" / "x.json")
    assert list((tmp_path / "new").iterdir()) == []


def test_a_disk_without_space_for_a_checkpoint(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")(10**9, 10**9, 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    assert "a checkpoint takes about 0 MB" in message_of(tmp_path)


def test_a_disk_that_becomes_full_keeps_the_last_checkpoint(tmp_path, monkeypatch):
    replace, calls = os.replace, []

    def full(source, target):
        calls.append(target)
        if str(target).endswith("iter_20.pth"):
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os_of_checkpoint, "replace", full)
    message = message_of(tmp_path)
    assert "iter_20.pth" in message and "No space left on device" in message
    assert (tmp_path / "last_checkpoint").read_text().endswith("iter_10.pth")
    assert (tmp_path / "iter_10.pth").is_file() and not list(tmp_path.glob(".*partial"))


def test_a_second_training_in_a_folder_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("visdet.engine.process.places._PATIENCE", 0.1)
    code = (
        "import time\nfrom visdet.engine.process.places import only_training_in\n"
        f"with only_training_in({str(tmp_path)!r}):\n    print('held', flush=True)\n    time.sleep(60)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    holder = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment
    )
    given = str(tmp_path)
    next_one = f"{given}_2"
    try:
        assert holder.stdout.readline() == "held\n"
        assert "another training is running in" in message_of(tmp_path)
        assert free_folder(given) == next_one, "it has a log, and is in use"
        with only_training_in(tmp_path.parent):
            pass
    finally:
        holder.kill()
        holder.wait()
    assert free_folder(given) == given, "the training was over before it wrote numbers"
    assert free_folder(given, for_training=False) == next_one
    for _ in range(2):  # A killed run leaves no lock.
        build_runner(toy_config(tmp_path, train_cfg__max_iters=1)).train()
    assert free_folder(given) == next_one


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compile": {"fullgraf": True}}, "fullgraf"),
        ({"compile": {"backend": "nope"}}, "compile cannot be built: Invalid backend"),
        (
            {"efficient_conv_bn_eval": ["norm"]},
            "efficient_conv_bn_eval cannot be built",
        ),
    ],
)
def test_what_torch_cannot_compile_or_trace_is_one_message(tmp_path, options, message):
    assert message in message_of(tmp_path, **options)
