"""The last step of a pipeline, which packs the inputs of the model."""

from typing import Any

import cv2
import numpy as np
import torch
from mmengine.structures import InstanceData
from torch import Tensor

from visdet.checks.arguments import Names
from visdet.registry import TRANSFORMS
from visdet.structures import DetDataSample
from visdet.structures.rotated_boxes import polygons_to_boxes

from .base import BaseTransform

_DTYPES = (torch.uint8, torch.float32)
_MOST_CHANNELS = 4


def split_channels(image: Tensor) -> Tensor:
    """Return an image [C, H, W] as a contiguous tensor."""
    C, H, W = image.shape
    is_interleaved = 1 < C <= _MOST_CHANNELS and image.stride(0) == 1 and image.stride(2) == C
    if not is_interleaved or image.dtype not in _DTYPES or min(H, W) == 0 or image.device.type != "cpu":
        return image.contiguous()
    pixels = image.as_subclass(Tensor).permute(1, 2, 0).numpy()
    channels = np.empty(image.shape, pixels.dtype)
    cv2.split(pixels, list(channels))  # writes into these arrays, since they have the right sizes
    return torch.from_numpy(channels)


@TRANSFORMS.register_module()
class PackDetInputs(BaseTransform):
    """Packs the results as ``dict(inputs=uint8 tensor [3, H, W], data_samples=DetDataSample)``.

    ``gt_instances`` gets the boxes to train on, and ``ignored_instances`` the crowd regions. Both have ``bboxes`` (a
    plain float32 tensor [N, 4] (x1, y1, x2, y2) in pixels of ``img_shape``), ``labels`` (int64 [N]) and, from a data
    set in ``test_mode``, ``areas`` (float64 [N], in pixels of the file). Turned boxes are [N, 5] (cx, cy, w, h, angle),
    see :func:`visdet.structures.rotated_boxes.boxes_to_polygons`, and have ``polygons``, too, in ``test_mode``.

    Args:
        meta_keys: the results that become meta information. Those that the pipeline has not set are left out.

    Source: mmdet's PackDetInputs.
    """

    keeps_size = True

    def __init__(
        self,
        meta_keys: Names = (
            "img_id",
            "img_path",
            "ori_shape",
            "img_shape",
            "scale_factor",
            "flip",
            "flip_direction",
        ),
    ) -> None:
        self.meta_keys = meta_keys

    def transform(self, results: dict) -> dict:
        sample = DetDataSample(metainfo={key: results[key] for key in self.meta_keys if key in results})
        names = {
            "bboxes": "gt_bboxes",
            "labels": "gt_bboxes_labels",
            "areas": "gt_areas",
            "polygons": "gt_polygons",
        }
        fields = {
            key: results[name].as_subclass(torch.Tensor) for key, name in names.items() if name in results
        }
        if "bboxes" in fields and "angle_version" in results:
            fields["bboxes"] = polygons_to_boxes(fields["bboxes"], results["angle_version"])
        if fields:
            instances = InstanceData(**fields)
            is_ignored: Any = results.get("gt_ignore_flags")
            has_ignored = is_ignored is not None and is_ignored.any()
            sample.gt_instances = instances[~is_ignored] if has_ignored else instances
            sample.ignored_instances = instances[is_ignored] if has_ignored else instances[:0]
        return {"inputs": split_channels(results["img"].as_subclass(torch.Tensor)), "data_samples": sample}
