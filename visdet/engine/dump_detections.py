"""The detections of a test, as a JSON file."""

from collections.abc import Sequence

from mmengine.evaluator import BaseMetric
from mmengine.logging import print_log

from visdet.registry import METRICS

from .inference import detections_of, write_detections_file

__all__ = ["DumpDetections"]


@METRICS.register_module()
class DumpDetections(BaseMetric):
    """Writes what was detected in every image, gathered from all processes, in the layout of ``tools/infer.py``.

    Args:
        out_file: the JSON file.
        collect_device: 'cpu' or 'gpu'.
    """

    default_prefix = "detections"

    def __init__(self, out_file: str, collect_device: str = "cpu") -> None:
        super().__init__(collect_device=collect_device)
        self.out_file = out_file

    def process(self, data_batch: dict, data_samples: Sequence[dict]) -> None:
        """Keep the detections of a batch."""
        classes = self.dataset_meta["classes"]
        self.results.extend(detections_of(sample, classes) for sample in data_samples)

    def compute_metrics(self, results: list[dict]) -> dict:
        """Write the file; there is nothing to measure."""
        write_detections_file(self.out_file, results)
        print_log(f"detections of {len(results)} images written to {self.out_file}", logger="current")
        return {}
