"""Models exported to each format and run in its runtime."""

import importlib.util
import json

import numpy as np
import pytest
import torch
from mmengine.registry import init_default_scope

import visdet
from visdet.engine.config.build_errors import build_model
from visdet.engine.config.load import complete_config, load_config
from visdet.errors import MissingPackageError
from visdet.export import ExportError
from visdet.export.check import Differences
from visdet.models.gaussian_field import LearnableGaussianField


def built(name, **changes):
    """Return the model of a config with small random weights in every part."""
    cfg, _ = load_config(name, changes)
    complete_config(cfg)
    init_default_scope("visdet")
    torch.manual_seed(0)
    model = build_model(cfg, cfg.model)
    model.init_weights()
    for parameter in model.parameters():
        parameter.data.add_(0.02 * torch.randn_like(parameter))
    return model


def needs(*packages):
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{missing} not installed (extra export)")


def test_images_of_any_number_and_size_as_pt2(tmp_path):
    model = built("deformable_detr/deformable-detr_shapes")
    report = visdet.export(model, tmp_path, "pt2", classes=list("abcdef"))
    assert max(one["largest"] for one in report["differences"]["outputs"].values()) < 1e-5
    assert report["differences"]["inputs"] == 3
    described = json.loads((tmp_path / "model.json").read_text())
    assert described["inputs"]["images"]["shape"] == ["batch", 3, "height", "width"]
    assert described["classes"] == list("abcdef") and described["checked"]
    sample = np.load(tmp_path / "sample.npz")
    assert {"input.images", "input.image_sizes", "output.bboxes"} <= set(sample.files)


@pytest.mark.slow
@pytest.mark.parametrize(
    "format",
    [
        pytest.param("onnx", marks=needs("onnx", "onnxscript", "onnxruntime")),
        pytest.param("openvino", marks=needs("onnx", "onnxscript", "openvino")),
    ],
)
def test_standard_operators_alone(tmp_path, format):
    """The graph has no custom operator, and the runtime of the format computes what the model does."""
    model = built("deformable_detr/deformable-detr_shapes")
    report = visdet.export(model, tmp_path, format, shape=(96, 128))
    assert max(one["largest"] for one in report["differences"]["outputs"].values()) < 1e-4
    import onnx

    nodes = onnx.load(tmp_path / "model.onnx").graph.node
    assert not {node.domain for node in nodes} - {""}
    assert "GridSample" in {node.op_type for node in nodes} and "If" not in {node.op_type for node in nodes}


@pytest.mark.parametrize("format", ["pt2", "onnx"])
def test_the_field(tmp_path, format):
    if format == "onnx":
        pytest.importorskip("onnxruntime", reason="extra export")
    model = LearnableGaussianField(50, tolerance=1e-6)
    report = visdet.export(model, tmp_path, format)
    assert report["differences"]["outputs"]["field"]["largest"] < 1e-5
    assert json.loads((tmp_path / "model.json").read_text())["inputs"]["points"]["shape"] == ["batch", 3]


def test_differences_are_those_of_sets_of_detections():
    """Detections of equal score may change places, one beside the lowest score may be missing, another box is wrong."""
    scores = np.array([[0.9, 0.5, 0.5, 0.1]], np.float32)
    boxes = np.array([[[0, 0, 1, 1], [2, 2, 3, 3], [5, 5, 6, 6], [7, 7, 8, 8]]], np.float32)
    ours = {"bboxes": boxes, "scores": scores, "labels": np.array([[1, 2, 3, 1]])}
    rows = {"scores": ("bboxes", "scores", "labels")}
    order = [0, 2, 1, 3]
    theirs = {name: value[:, order].copy() for name, value in ours.items()}
    theirs["bboxes"][0, 3] = 1  # another one of the lowest score
    same = Differences()
    same.add(ours, theirs, rows, 1e-3)
    same.check(1e-3)
    theirs["bboxes"][0, 1] += 0.5
    other = Differences()
    other.add(ours, theirs, rows, 1e-3)
    with pytest.raises(ExportError, match="bboxes"):
        other.check(1e-3)


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match="onnxruntime"):
        visdet.export(LearnableGaussianField(5), tmp_path, "onnx")


def test_without_a_check_the_report_says_so(tmp_path):
    report = visdet.export(LearnableGaussianField(5), tmp_path, check=False)
    assert not report["checked"] and "not compared" in (tmp_path / "report.md").read_text()
    assert not json.loads((tmp_path / "model.json").read_text())["checked"]


def test_a_model_without_a_family_is_refused(tmp_path):
    with pytest.raises(ExportError, match="Linear"):
        visdet.export(torch.nn.Linear(1, 1), tmp_path)


def test_a_precision_that_loses_its_conversions_is_refused(tmp_path):
    with pytest.raises(ExportError, match="bfloat16"):
        visdet.export(LearnableGaussianField(5), tmp_path, precision="bfloat16")
