"""Packaged detectors predict an image in a batch as they do alone, so that no metric depends on the batch."""

import warnings

import pytest
import torch
from programs import ROOT
from torch.testing import assert_close

from visdet.engine import load_config
from visdet.models.deformable_detr.base import CannotIgnorePadding
from visdet.registry import MODELS
from visdet.structures import DetDataSample

CONFIGS = ROOT / "configs"
DETECTORS = sorted(path for family in ("deformable_detr", "dino") for path in (CONFIGS / family).glob("*.py"))
SIZES = ((96, 131), (70, 101), (134, 70))  # The batch is no multiple of the strides.


def narrow_detector(path):
    """Return the detector of a config with few channels and queries, and random weights."""
    model = load_config(str(path))[0].model
    model.num_queries = 12
    model.backbone.init_cfg = None
    if model.backbone.type == "ResNet":
        expansion = 1 if model.backbone.depth < 50 else 4
        model.backbone.base_channels = 4
        model.neck.in_channels = [4 * 2**stage * expansion for stage in model.backbone.out_indices]
    else:
        model.backbone.embed_dims, model.backbone.num_heads, model.backbone.depths = (
            8,
            [1, 2, 2, 4],
            [1, 1, 1, 1],
        )
        model.neck.in_channels = [8 * 2**stage for stage in model.backbone.out_indices]
    torch.manual_seed(0)
    detector = MODELS.build(model).eval()
    for norm in detector.backbone.modules():
        if isinstance(norm, torch.nn.BatchNorm2d):  # The padding does not stay 0.
            torch.nn.init.normal_(norm.bias)
    return detector


@torch.no_grad()
@pytest.mark.parametrize("path", DETECTORS, ids=lambda path: path.stem)
def test_a_prediction_does_not_depend_on_the_batch(path):
    detector = narrow_detector(path)
    images = [torch.randint(0, 256, (3, *size), dtype=torch.uint8) for size in SIZES]

    def predict(chosen):
        return detector.test_step({"inputs": chosen, "data_samples": [DetDataSample() for _ in chosen]})

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CannotIgnorePadding)
        together = predict(images)
    if not detector.can_ignore_padding:
        assert "SwinTransformer" in str(caught[0].message) and "batch_size=1" in str(caught[0].message)
        return
    assert not caught
    for image, in_batch in zip(images, together, strict=True):
        (alone,) = predict([image])
        for name, expected in alone.pred_instances.items():
            assert_close(in_batch.pred_instances[name], expected, rtol=1e-3, atol=1e-3)
