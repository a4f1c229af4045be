"""The thresholds of an evaluation reach the pictures and the detector."""

import shutil

import numpy as np
import pytest
import torch
from disk import names_in
from json_files import read_json
from mmengine.structures import InstanceData
from toy_run import detector_of, toy_config, train

import visdet
from visdet.engine import build_runner, read_checkpoint
from visdet.engine.checkpoints.checkpoint import add_thresholds
from visdet.engine.checkpoints.score_thresholds import thresholds_of
from visdet.errors import UserError
from visdet.registry import VISUALIZERS
from visdet.structures import DetDataSample

METRICS = [{"type": "ToyAccuracy"}, {"type": "CocoMetric"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    options = {"default_hooks__checkpoint__interval": 75, "train_cfg__val_interval": 150}
    train(folder, val_evaluator=METRICS, train_cfg__max_iters=150, **options)
    return folder


def test_a_checkpoint_holds_the_thresholds_of_its_own_validation(folder, tmp_path):
    """One that was saved before its validation gets them, too."""
    assert not list(folder.glob("precision_recall*")) and not list(folder.glob("*.png"))
    content = read_checkpoint(folder / "iter_150.pth")
    kept = content["meta"]["score_thresholds"]
    assert kept == read_checkpoint(folder / "best.pth")["meta"]["score_thresholds"]
    assert read_checkpoint(folder / "iter_75.pth")["meta"]["score_thresholds"] == {}
    expected = [kept.get(name, 0.3) for name in ("dark", "bright")]
    shutil.copyfile(folder / "iter_150.pth", tmp_path / "a.pth")
    assert expected != [0.3, 0.3]
    detector = detector_of(folder, tmp_path / "a.pth")
    assert detector.origin_of_thresholds == "the checkpoint's validation"
    assert detector.score_thresholds == expected
    image = np.full((32, 32, 3), 60, np.uint8)
    (label,) = detector(image, score_threshold=0).labels.tolist()
    for threshold, number in ((0.0, 1), (1.5, 0)):
        detector.score_thresholds = [2.0, 2.0]
        detector.score_thresholds[label] = threshold
        assert len(detector(image)) == number


@pytest.mark.parametrize(
    ("metrics", "save_best", "rewritten"), [(METRICS, None, 1), (METRICS, "auto", 0), (METRICS[:1], None, 0)]
)
def test_a_checkpoint_is_rewritten_only_if_it_lacks_thresholds(
    tmp_path, monkeypatch, metrics, save_best, rewritten
):
    calls = []

    def noted(path, thresholds):
        calls.append(path)
        add_thresholds(path, thresholds)

    monkeypatch.setattr("visdet.engine.hooks.checkpoint_hook.add_thresholds", noted)
    options = {"default_hooks__checkpoint__interval": 150, "default_hooks__checkpoint__save_best": save_best}
    runner = train(
        tmp_path, val_evaluator=metrics, train_cfg__max_iters=150, train_cfg__val_interval=150, **options
    )
    measured = thresholds_of(runner.val_evaluator.metrics)
    assert len(calls) == rewritten and bool(measured) == (metrics is METRICS)
    assert read_checkpoint(tmp_path / "last.pth")["meta"]["score_thresholds"] == measured


def test_a_file_that_another_process_has_put_there_stays(tmp_path, monkeypatch):
    def measured(metrics):
        (tmp_path / "iter_20.pth").write_bytes(b"another's")
        return {"dark": 0.5}

    monkeypatch.setattr("visdet.engine.hooks.checkpoint_hook.thresholds_of", measured)
    options = {"default_hooks__checkpoint__interval": 20, "default_hooks__checkpoint__save_best": None}
    train(tmp_path, val_evaluator=METRICS, train_cfg__max_iters=20, train_cfg__val_interval=20, **options)
    assert (tmp_path / "iter_20.pth").read_bytes() == b"another's"


def test_a_checkpoint_of_an_epoch_holds_its_thresholds(tmp_path):
    options = {
        "train_cfg__val_interval": 1,
        "param_scheduler": None,
        "default_hooks__checkpoint__by_epoch": True,
    }
    options["train_cfg"] = {
        "_delete_": True,
        "type": "EpochBasedTrainLoop",
        "max_epochs": 15,
        "val_interval": 15,
    }
    runner = train(tmp_path, val_evaluator=METRICS, **options)
    measured = thresholds_of(runner.val_evaluator.metrics)
    assert measured, "the last validation has found something"
    meta = read_checkpoint(tmp_path / "last.pth")["meta"]
    assert meta["score_thresholds"] == measured and meta["iter"] == runner.iter


def test_a_test_draws_the_curves_and_uses_the_thresholds_of_the_checkpoint(folder, tmp_path, monkeypatch):
    cfg = toy_config(tmp_path / "test", load_from=str(folder / "iter_150.pth"), test_evaluator=METRICS)
    cfg.visualizer = {"type": "DetLocalVisualizer"}
    cfg.default_hooks.visualization = {
        "type": "DetVisualizationHook",
        "test_out_dir": str(tmp_path / "drawn"),
    }
    used = []
    runner = build_runner(cfg)
    monkeypatch.setattr(
        runner.visualizer, "add_datasample", lambda *a, pred_score_thr, **k: used.append(pred_score_thr)
    )
    monkeypatch.setattr("visdet.engine.hooks.visualization_hook.image_of", lambda *a: None)
    runner.test()
    names = names_in(tmp_path / "test")
    assert {"coco_confusion_matrix.png", "coco_precision_recall.png", "precision_recall.json"} <= set(names)
    kept = read_checkpoint(folder / "iter_150.pth")["meta"]["score_thresholds"]
    assert used and all(given == kept for given in used)


@pytest.mark.parametrize(
    ("threshold", "drawn"),
    [(0.3, 2), ({"dark": 0.7}, 1), ({"dark": 0.5, "bright": 0.95}, 1), ({"other": 0.9}, 2)],
)
def test_pictures_have_a_threshold_for_each_class(threshold, drawn, monkeypatch):
    visualizer = VISUALIZERS.build(
        {"type": "DetLocalVisualizer", "vis_backends": None, "name": f"{threshold}"}
    )
    visualizer.dataset_meta = {"classes": ("dark", "bright")}
    shown = []
    monkeypatch.setattr(
        visualizer, "_draw", lambda canvas, instances, *_: shown.append(len(instances)) or canvas
    )
    sample = DetDataSample()
    sample.pred_instances = InstanceData(
        bboxes=torch.zeros(2, 4), scores=torch.tensor([0.6, 0.9]), labels=torch.tensor([0, 1])
    )
    visualizer.draw_sample(np.zeros((8, 8, 3), np.uint8), sample, pred_score_thr=threshold)
    assert shown == [drawn]


def test_train_and_evaluate_return_what_they_measured(tmp_path):
    cfg, run, found = toy_config(tmp_path), tmp_path / "run", tmp_path / "found.json"
    result = visdet.train(cfg, {"train_cfg.max_iters": 10}, work_dir=run, randomness={"seed": 1})
    assert result.work_dir == str(run) and result.last_checkpoint.endswith("iter_10.pth")
    assert "toy/accuracy" in result.metrics and "toy_accuracy" in result.best_checkpoint
    cfg.work_dir, before = result.work_dir, sorted(run.iterdir())
    for folder in ("run_test", "run_test_2"):
        cfg.experiment_name = folder  # Runs of one name that begin in the same second share a log.
        metrics = visdet.evaluate(cfg, result.last_checkpoint, out=found)
        assert list((tmp_path / folder).glob("*/*.log"))
    assert sorted(run.iterdir()) == before, "a test writes nothing into the run"
    assert metrics["toy/images"] == 13 and len(read_json(found)) == 13
    assert cfg.train_cfg.max_iters == 20 and cfg.get("load_from") is None, "the config is not changed"
    with pytest.raises(UserError, match=r"checkpoint must be .* got None"):
        visdet.evaluate(cfg, None)
    with pytest.raises(UserError, match="unknown key 'train_cgf'"):
        visdet.train(cfg, train_cgf={"max_iters": 3})
    with pytest.raises(UserError, match="config must be a path"):
        visdet.train(None)
