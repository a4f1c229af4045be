"""Samples of detection."""

from typing import Any

from mmengine.structures import BaseDataElement, InstanceData
from torch import Tensor


def _instances(name: str) -> Any:
    """Return the property of a sample whose value is the field ``name``."""
    return property(
        lambda sample: getattr(sample, name),
        lambda sample, value: sample.set_field(value, name, dtype=InstanceData),
        lambda sample: delattr(sample, name),
    )


class DetDataSample(BaseDataElement):
    """Ground truth, predictions and meta information of one image.

    The meta information (``set_metainfo``) consists of ``img_id``, ``img_path``, ``flip``, ``flip_direction``, the
    (height, width) of the image in its file (``ori_shape``), in the batch without padding (``img_shape``) and with it
    (``batch_input_shape``), and ``scale_factor``, the factors by which its (width, height) were multiplied.

    Attributes:
        gt_instances: ``bboxes`` [N, 4] (x1, y1, x2, y2) in pixels of ``img_shape``, and ``labels`` [N] int64. Turned
            boxes are [N, 5] (cx, cy, w, h, angle), see :mod:`visdet.structures.rotated_boxes`.
        ignored_instances: the same for crowd regions, which are not trained on and do not count as missed.
        pred_instances: ``bboxes`` [N, 4] (x1, y1, x2, y2) or [N, 5] in pixels, ``scores`` [N] and ``labels`` [N].

    Source: the field names are mmdet's.
    """

    gt_instances = _instances("_gt_instances")
    ignored_instances = _instances("_ignored_instances")
    pred_instances = _instances("_pred_instances")

    def pin_memory(self) -> "DetDataSample":
        """Move the tensors to pinned memory, whose copy to a GPU need not wait for it. Data loaders call this."""
        for instances in self.values():
            for name, value in instances.items() if isinstance(instances, InstanceData) else ():
                if isinstance(value, Tensor):
                    instances[name] = value.pin_memory()
        return self
