"""Large pictures as tiles that overlap, and the detections in them as those of one picture."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from mmengine.structures import InstanceData

from visdet.structures import DetDataSample

from .detections import Detections
from .given_images import GivenImage

__all__ = ["joined", "windows_of"]

Window = tuple[int, int, int, int]  # (x1, y1, x2, y2) in pixels of the picture
_EDGE = 0.01  # of a tile: a box that ends so near to its edge may be cut there


def windows_of(height: int, width: int, side: int, overlap: float) -> list[Window]:
    """Return the tiles of a picture, and the whole picture as the last window if there are several.

    Args:
        height, width: the size of the picture.
        side: the sides of a tile. A picture that is not larger is one window.
        overlap: the share of its side that a tile has in common with the next one, at least.
    """
    rows = _starts(height, side, overlap)
    columns = _starts(width, side, overlap)
    windows = []
    for y in rows:
        for x in columns:
            windows.append((x, y, min(x + side, width), min(y + side, height)))
    return windows + [(0, 0, width, height)] * (len(windows) > 1)


def _starts(length: int, side: int, overlap: float) -> list[int]:
    last = max(length - side, 0)
    count = 1 + math.ceil(last / (side * (1 - overlap)))
    return np.linspace(0, last, count).round().astype(int).tolist()


def joined(
    parts: Sequence[Detections],
    windows: Sequence[Window],
    image: GivenImage,
    shape: tuple[int, int],
    shared: float,
    iou_threshold: float,
) -> Detections:
    """Return the detections in the windows of a picture as those of the picture.

    A box that ends at an inner edge of its tile or beyond, and is so small that another tile shows it whole, is left
    out. Of boxes of a class that overlap by more than a threshold, the best one is kept.

    Args:
        parts: the detections in each window. windows: the result of :func:`windows_of`.
        image: the picture. shape: its (height, width).
        shared: the pixels that neighbouring tiles share, at least.
        iou_threshold: the greatest IoU of two detections of a class.
    """
    height, width = shape
    found = []
    for part, (x1, y1, x2, y2) in zip(parts, windows, strict=True):
        rows, columns = part.shape
        margin = _EDGE * max(columns, rows)
        own = part.enclosing_boxes
        starts, ends = own.split(2, dim=1)
        inner = torch.tensor([x1 > 0, y1 > 0, x2 < width, y2 < height])
        reaches = torch.cat([starts < margin, ends > own.new_tensor([columns, rows]) - margin], 1)
        is_cut = inner & reaches & (ends - starts < shared - margin).repeat(1, 2)
        instances = part.sample.pred_instances[~is_cut.any(dim=1)]
        moved = [x1, y1, 0, 0, 0] if part.are_turned else [x1, y1, x1, y1]
        instances.bboxes = instances.bboxes + torch.tensor(moved)
        found.append(instances)
    path, pixels, frame, time = image
    sample = DetDataSample(metainfo={"ori_shape": shape, "img_path": path})
    sample.pred_instances = InstanceData.cat(found)
    first = parts[0]
    options = (pixels, first.drawing, frame, time, first.category_ids)
    return Detections(sample, first.classes, 0.0, *options).nms(iou_threshold)
