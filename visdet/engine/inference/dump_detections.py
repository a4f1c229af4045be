"""A metric that writes the predictions of a test to a JSON file."""

from collections.abc import Sequence

from mmengine.evaluator import BaseMetric
from mmengine.logging import print_log

from visdet.registry import METRICS

from .detect_files import write_detections_file
from .sample_json import record_of


@METRICS.register_module()
class DumpDetections(BaseMetric):
    """Writes the predictions for every sample of a test, gathered from all processes, to a JSON file.

    :func:`record_of` describes the record of a sample. Detections in images have the layout of ``visdet infer``.

    Args:
        out_file: the JSON file.
        collect_device: the device that the predictions of all processes are gathered on, 'cpu' or 'gpu'.
    """

    default_prefix = "detections"
    metric_names = ()

    def __init__(self, out_file: str, collect_device: str = "cpu") -> None:
        super().__init__(collect_device=collect_device)
        self.out_file = out_file

    def process(self, data_batch: dict, data_samples: Sequence[dict]) -> None:
        """Keep the predictions for the samples of a batch."""
        self.results.extend(record_of(sample, self.dataset_meta) for sample in data_samples)

    def compute_metrics(self, results: list[dict]) -> dict:
        """Write the file and return no metrics."""
        write_detections_file(self.out_file, results)
        print_log(f"the predictions for {len(results)} samples are in {self.out_file}", logger="current")
        return {}
