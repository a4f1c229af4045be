"""Small models to export, and what tests of a format need."""

import importlib.util

import pytest
import torch
from mmengine.registry import init_default_scope

from visdet.engine.config.build_errors import build_model
from visdet.engine.config.load import complete_config, load_config

__all__ = ["DEFORMABLE_DETR", "FIXED", "FORMATS", "IN_ONNX", "IN_OPENVINO", "SMALL", "built", "needs"]

DEFORMABLE_DETR = "deformable_detr/deformable-detr_shapes"
SMALL = {
    "model.num_feature_levels": 2,
    "model.backbone.base_channels": 8,
    "model.backbone.out_indices": (2, 3),
    "model.neck.in_channels": [32, 64],
    "model.encoder.num_layers": 1,
    "model.encoder.layer_cfg.self_attn_cfg.num_levels": 2,
    "model.decoder.num_layers": 1,
    "model.decoder.layer_cfg.cross_attn_cfg.num_levels": 2,
}
FIXED = {"shape": (96, 128), "batch": 2}  # An export of sizes that may change takes three times as long.


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


IN_ONNX = needs("onnx", "onnxscript", "onnxruntime")
IN_OPENVINO = needs("onnx", "onnxscript", "onnxruntime", "openvino")
FORMATS = [
    "pt2",
    pytest.param("onnx", marks=IN_ONNX),
    pytest.param("openvino", marks=IN_OPENVINO),
]
