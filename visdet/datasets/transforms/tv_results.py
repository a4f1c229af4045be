"""The image and the boxes in the results of a detection pipeline, which are torchvision's tv_tensors."""

from functools import partial

import torch
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional as F

from .base import keep_rows


class Corners(tv_tensors.KeyPoints):
    """The corners [N, 4, 2] (x, y) of turned boxes, which move as the pixels do under every transform of torchvision.

    Pixel i covers i to i + 1 in the boxes of visdet, as in torchvision's own. Torchvision flips key points as if the
    pixel were at i, one pixel off, and makes rectangles of its turned boxes that are resized to other proportions.
    """


def _mirrored(axis: int, corners: Corners) -> Corners:
    size = corners.canvas_size  # (height, width)
    points = corners.as_subclass(torch.Tensor).clone()
    points[..., axis] = size[1 - axis] - points[..., axis]
    return Corners(points, canvas_size=size)


F.register_kernel(F.horizontal_flip, Corners)(partial(_mirrored, 0))
F.register_kernel(F.vertical_flip, Corners)(partial(_mirrored, 1))


def set_image(results: dict, image: torch.Tensor) -> None:
    """Store ``image`` [3, H, W] and its shape (height, width)."""
    results["img"] = tv_tensors.Image(image)
    results["img_shape"] = tuple(image.shape[-2:])


# Boxes are upright, [N, 4] (x1, y1, x2, y2), or turned, [N, 4, 2] (four corners (x, y)).
PER_BOX = ("gt_bboxes_labels", "gt_ignore_flags", "gt_areas", "gt_polygons")


def side_lengths(boxes: torch.Tensor) -> torch.Tensor:
    """Return the widths and heights [N, 2] of boxes."""
    if boxes.dim() == 3:
        return (boxes[:, 1:3] - boxes[:, :2]).norm(dim=2)
    return boxes[:, 2:] - boxes[:, :2]


def are_in(boxes: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Return whether upright boxes overlap an image of the (height, width) ``shape``, or turned ones have their centres
    in it, bool [N]."""
    if boxes.dim() == 3:
        boxes = boxes.mean(dim=1).repeat(1, 2)
    return (boxes[:, :2] < boxes.new_tensor(shape[::-1])).all(1) & (boxes[:, 2:] > 0).all(1)


def moved(boxes: torch.Tensor, x: float, y: float) -> torch.Tensor:
    """Return boxes moved by a number of pixels to the right and down."""
    plain = boxes.as_subclass(torch.Tensor)
    return (plain.reshape(-1, 2) + plain.new_tensor([x, y])).reshape(plain.shape)


def clipped(boxes: torch.Tensor) -> torch.Tensor:
    """Return upright boxes clipped to their image, and turned ones as they are."""
    return boxes if isinstance(boxes, Corners) else F.clamp_bounding_boxes(boxes)


def set_large_boxes(results: dict, boxes: torch.Tensor) -> None:
    """Store those of the ``boxes`` that are in the image and at least one pixel wide and high."""
    plain = boxes.as_subclass(torch.Tensor)
    large = (side_lengths(plain) >= 1).all(dim=1)
    set_boxes(results, plain, keep=large & are_in(plain, results["img_shape"]))


def set_boxes(results: dict, boxes: torch.Tensor, keep: torch.Tensor | None = None) -> None:
    """Store ``boxes`` in the results, or only those where ``keep`` [N] is True."""
    if keep is not None:
        boxes = boxes[keep]
        keep_rows(results, PER_BOX, keep)
    plain, shape = boxes.as_subclass(torch.Tensor), results["img_shape"]
    if plain.dim() == 3:
        results["gt_bboxes"] = Corners(plain, canvas_size=shape)
    else:
        results["gt_bboxes"] = tv_tensors.BoundingBoxes(plain, format="XYXY", canvas_size=shape)
