"""The errors of predicted depth maps, beside the errors of a constant depth."""

from collections.abc import Sequence

import numpy as np
from mmengine.evaluator import BaseMetric

from visdet.checks.finite import DIVERGED, check_finite
from visdet.errors import InvalidInputError
from visdet.registry import METRICS


@METRICS.register_module()
class TwoViewDepthMetric(BaseMetric):
    """Errors of depth maps, and of the best constant depth, over all pixels of all pairs.

    * ``abs_rel`` is the mean of abs(predicted - true) / true.
    * ``inverse_error`` is the mean of abs(1 / predicted - 1 / true). ``inverse_error_constant`` is the same for the
      constant depth that minimises it, whose inverse is the median of the true inverse depths.
    * ``within_10_percent`` is the fraction of pixels with abs(predicted - true) < 0.1 true, and
      ``within_10_percent_constant`` is the same for that constant depth.

    Samples are dicts with ``pred_depth`` and ``gt_depth`` of equal shape. Only pixels whose true depth is positive and
    finite count.
    """

    default_prefix = "two_view"
    metric_names = ("abs_rel", "inverse_error*", "within_10_percent*")

    def process(self, data_batch: dict, data_samples: Sequence[dict]) -> None:
        """Keep the depths of a batch."""
        for sample in data_samples:
            predicted = sample["pred_depth"].double().cpu().numpy()
            truth = sample["gt_depth"].double().cpu().numpy()
            if predicted.shape != truth.shape:
                raise InvalidInputError(
                    f"TwoViewDepthMetric: pred_depth must have gt_depth's shape {truth.shape}, got {predicted.shape}"
                )
            check_finite(f"TwoViewDepthMetric: pair {sample.get('pair')}", DIVERGED, pred_depth=predicted)
            known = np.isfinite(truth) & (truth > 0)
            self.results.append((predicted[known], truth[known]))

    def compute_metrics(self, results: list[tuple[np.ndarray, np.ndarray]]) -> dict[str, float]:
        """Return the metrics of all pairs."""
        predicted = np.concatenate([np.zeros(0), *(pair[0] for pair in results)])
        truth = np.concatenate([np.zeros(0), *(pair[1] for pair in results)])
        if not truth.size:
            raise InvalidInputError("TwoViewDepthMetric: no pixel has a positive, finite true depth")
        constant = 1 / np.median(1 / truth)
        return {
            "abs_rel": float(np.mean(np.abs(predicted - truth) / truth)),
            "inverse_error": float(np.mean(np.abs(1 / predicted - 1 / truth))),
            "inverse_error_constant": float(np.mean(np.abs(1 / constant - 1 / truth))),
            "within_10_percent": float(np.mean(np.abs(predicted - truth) < 0.1 * truth)),
            "within_10_percent_constant": float(np.mean(np.abs(constant - truth) < 0.1 * truth)),
        }
