"""FieldMetric: by hand, and in parts."""

import math

import pytest
import torch

from visdet.registry import METRICS


def evaluate(*batches):
    metric = METRICS.build(dict(type="FieldMetric"))
    for prediction, target in batches:
        metric.process(None, [{"pred_field": prediction, "gt_field": target}])
    return metric.evaluate(0)


def test_by_hand():
    metrics = evaluate((torch.tensor([0.0, 1.0, 2.0, 5.0]), torch.tensor([0.0, 1.0, 3.0, 4.0])))
    assert metrics["field/mse"] == 0.5
    assert metrics["field/psnr"] == pytest.approx(10 * math.log10(16 / 0.5))
    assert metrics["field/r2"] == pytest.approx(1 - 0.5 / 2.5)  # variance of 0 1 3 4


def test_parts_add_up_far_from_zero():
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(1000, generator=generator, dtype=torch.float64) + 1e6
    prediction = target + 0.1 * torch.randn(1000, generator=generator, dtype=torch.float64)
    whole = evaluate((prediction, target))
    parts = evaluate(*zip(prediction.split([1, 400, 599]), target.split([1, 400, 599]), strict=True))
    assert parts == pytest.approx(whole, rel=1e-9)
    assert whole["field/r2"] == pytest.approx(
        1 - float((prediction - target).square().mean() / target.var(correction=0))
    )


def test_perfect_constant_and_empty():
    target = torch.tensor([1.0, 2.0])
    assert evaluate((target, target)) == {"field/mse": 0.0, "field/psnr": math.inf, "field/r2": 1.0}
    assert math.isnan(evaluate((target, torch.ones(2)))["field/r2"])
    with pytest.raises(ValueError, match="no point was evaluated"):
        evaluate((target[:0], target[:0]))
