"""The errors of a field at points with known values."""

import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from mmengine.evaluator import BaseMetric

from visdet.checks.finite import DIVERGED, check_finite
from visdet.errors import InvalidInputError
from visdet.registry import METRICS


@METRICS.register_module()
class FieldMetric(BaseMetric):
    """MSE, PSNR and R2 over all points.

    ``psnr`` is 10 log10(range^2 / ``mse``) in dB, where the range is max - min of the target. ``r2`` is 1 - ``mse`` /
    variance of the target. Sums are computed in float64 and relative to the mean of each batch, so that an offset costs
    no precision. Each process keeps six numbers per batch. A perfect fit has an infinite PSNR. If all targets are
    equal, PSNR and R2 are NaN.
    """

    default_prefix = "field"
    metric_names = ("mse", "psnr", "r2")

    def process(self, data_batch: Any, data_samples: Sequence[dict]) -> None:
        """Keep the sums of a batch."""
        for sample in data_samples:
            target = torch.as_tensor(sample["gt_field"]).double().flatten()
            prediction = torch.as_tensor(sample["pred_field"]).double().flatten()
            if target.shape != prediction.shape:
                raise InvalidInputError(
                    f"FieldMetric: pred_field must have {len(target)} values like gt_field, got {len(prediction)}"
                )
            if len(target) == 0:
                continue
            check_finite("FieldMetric", DIVERGED, pred_field=prediction)
            check_finite("FieldMetric", gt_field=target)
            centre = target.mean()
            sums = (
                (prediction - target).square().sum(),
                centre,
                (target - centre).square().sum(),
                target.min(),
                target.max(),
            )
            self.results.append((len(target), *torch.stack(sums).tolist()))

    def evaluate(self, size: int) -> dict[str, Any]:
        """Return the metrics over the points of all processes. ``size`` is not used."""
        return super().evaluate(sys.maxsize)

    def compute_metrics(self, results: list[tuple[float, ...]]) -> dict[str, float]:
        """Return the metrics from the sums of all batches."""
        if not results:
            raise InvalidInputError("FieldMetric: no point was evaluated")
        counts, errors, centres, spreads, lows, highs = torch.tensor(results, dtype=torch.float64).unbind(1)
        count = counts.sum()
        mse = float(errors.sum() / count)
        centre = (counts * centres).sum() / count
        variance = float((spreads + counts * (centres - centre).square()).sum() / count)
        extent = float(highs.max() - lows.min())
        psnr = math.nan
        if extent > 0:
            psnr = math.inf if mse == 0 else 10 * math.log10(extent**2 / mse)
        return {"mse": mse, "psnr": psnr, "r2": 1 - mse / variance if variance > 0 else math.nan}
