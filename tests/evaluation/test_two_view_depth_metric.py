"""TwoViewDepthMetric by hand."""

import pytest
import torch

from visdet.evaluation import TwoViewDepthMetric


def sample(predicted, truth):
    return {"pred_depth": torch.tensor(predicted), "gt_depth": torch.tensor(truth)}


def test_by_hand():
    metric = TwoViewDepthMetric()
    # Relative errors 0.5, 0, 0.05 and, the last pixel being unknown, no more.
    metric.process({}, [sample([[3.0, 4.0]], [[2.0, 4.0]]), sample([[5.25, 9.0]], [[5.0, float("inf")]])])
    found = metric.evaluate(2)
    assert found["two_view/abs_rel"] == pytest.approx((0.5 + 0 + 0.05) / 3)
    assert found["two_view/inverse_error"] == pytest.approx((1 / 2 - 1 / 3 + 0 + 1 / 5 - 1 / 5.25) / 3)
    assert found["two_view/within_10_percent"] == pytest.approx(2 / 3)
    # The constant is 4, whose inverse is the median.
    assert found["two_view/inverse_error_constant"] == pytest.approx((1 / 4 + 0 + 1 / 20) / 3)
    assert found["two_view/within_10_percent_constant"] == pytest.approx(1 / 3)
