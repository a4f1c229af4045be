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
from visdet.export import ExportError


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


def test_a_model_without_a_family_is_refused(tmp_path):
    with pytest.raises(ExportError, match="Linear"):
        visdet.export(torch.nn.Linear(1, 1), tmp_path)
