"""The image and the boxes in the results of a detection pipeline, which are torchvision's tv_tensors."""

import torch
from torchvision import tv_tensors


def set_image(results: dict, image: torch.Tensor) -> None:
    """Store ``image`` [3, H, W] and its shape (height, width)."""
    results["img"] = tv_tensors.Image(image)
    results["img_shape"] = tuple(image.shape[-2:])


PER_BOX = ("gt_bboxes_labels", "gt_ignore_flags", "gt_areas")


def set_large_boxes(results: dict, boxes: torch.Tensor) -> None:
    """Store those of the ``boxes`` [N, 4] that are at least one pixel wide and high."""
    set_boxes(results, boxes, keep=(boxes[:, 2:] - boxes[:, :2] >= 1).all(dim=1))


def set_boxes(results: dict, boxes: torch.Tensor, keep: torch.Tensor | None = None) -> None:
    """Store ``boxes`` [N, 4] (x1, y1, x2, y2) in the results, or only those where ``keep`` [N] is True."""
    if keep is not None:
        boxes = boxes[keep]
        for key in PER_BOX:
            if key in results:
                results[key] = results[key][keep]
    plain = boxes.as_subclass(torch.Tensor)
    results["gt_bboxes"] = tv_tensors.BoundingBoxes(plain, format="XYXY", canvas_size=results["img_shape"])
