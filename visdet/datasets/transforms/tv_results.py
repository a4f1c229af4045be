"""The image and the boxes in the results of a detection pipeline, which are torchvision's tv_tensors."""

import torch
from torchvision import tv_tensors


def set_image(results: dict, image: torch.Tensor) -> None:
    """Store ``image`` [3, H, W] and its shape (height, width)."""
    results["img"] = tv_tensors.Image(image)
    results["img_shape"] = tuple(image.shape[-2:])


def set_boxes(results: dict, boxes: torch.Tensor, keep: torch.Tensor | None = None) -> None:
    """Store ``boxes`` [N, 4] (x1, y1, x2, y2) in the results, or only those where ``keep`` [N] is True."""
    if keep is not None:
        boxes = boxes[keep]
        for key in ("gt_bboxes_labels", "gt_ignore_flags", "gt_areas"):
            if key in results:
                results[key] = results[key][keep]
    plain = boxes.as_subclass(torch.Tensor)
    results["gt_bboxes"] = tv_tensors.BoundingBoxes(plain, format="XYXY", canvas_size=results["img_shape"])
