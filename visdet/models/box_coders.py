"""What a box is: how many numbers it has, and what they are in the network and in pixels."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from visdet.checks.arguments import AtLeast0
from visdet.registry import TASK_UTILS
from visdet.structures.rotated_boxes import parts_of, periodic, regularized, turned

from .boxes import cxcywh_to_xyxy, diagonals, xyxy_to_cxcywh

if TYPE_CHECKING:
    from .deformable_detr.flat_pyramid import FlatPyramid

Logit = Callable[[Tensor], Tensor]


@TASK_UTILS.register_module()
class UprightBoxCoder:
    """Boxes (x1, y1, x2, y2) in pixels, which are (cx, cy, w, h) in 0..1 of the image in the network.

    Attributes:
        box_dim: the numbers of a box. num_positions: see ``positions``.
    """

    box_dim: ClassVar[int] = 4
    num_positions: ClassVar[int] = 4

    def to_unit(self, boxes_px: Tensor, image_whwh: Tensor) -> Tensor:
        """Return the network's boxes of boxes in pixels, for images of sizes [B, 1, 4] (w, h, w, h) in pixels."""
        return xyxy_to_cxcywh(boxes_px / image_whwh)

    def to_pixels(self, boxes: Tensor, image_whwh: Tensor) -> Tensor:
        """Return the boxes in pixels of the network's boxes."""
        return cxcywh_to_xyxy(boxes) * image_whwh

    def detected(self, boxes: Tensor, limit: Tensor, scale: Tensor) -> Tensor:
        """Return the network's boxes in pixels of the original images; see ``PredictionBatch``."""
        return self.divided(torch.minimum(self.to_pixels(boxes, limit).clamp(min=0), limit), scale)

    def divided(self, boxes_px: Tensor, scale: Tensor) -> Tensor:
        """Return boxes whose coordinates are divided by a scale [..., 4] (x, y, x, y)."""
        return boxes_px / scale

    def encoded(self, boxes: Tensor, logit: Logit) -> Tensor:
        """Return what the network adds its predictions to, given the network's boxes or points (x, y)."""
        return self._of_lengths(logit, boxes)

    def decoded(self, encoded: Tensor) -> Tensor:
        """Return the boxes of which ``encoded`` has made the numbers."""
        return self._of_lengths(torch.sigmoid, encoded)

    def _of_lengths(self, function: Logit, boxes: Tensor) -> Tensor:
        """Return boxes after a function of the numbers that are in 0..1 of the image."""
        return function(boxes)

    def filled(self, encoded: Tensor) -> Tensor:
        """Return encoded points or upright boxes with zeros for the numbers that they do not have."""
        missing = self.box_dim - encoded.shape[-1]
        return F.pad(encoded, (0, missing)) if missing else encoded

    def refined(self, deltas: Tensor, references: Tensor, logit: Logit) -> Tensor:
        """Return boxes [..., box_dim], which are references [..., box_dim] or [..., 2] moved by deltas."""
        return self.decoded(deltas + self.filled(self.encoded(references, logit)))

    def positions(self, boxes: Tensor) -> Tensor:
        """Return the numbers [..., num_positions] in 0..1 that are embedded as the position of a box."""
        return boxes

    def on_levels(self, references: Tensor, pyramid: "FlatPyramid") -> Tensor:
        """Return references [B, Q, 2 or box_dim] as [B, Q, L, 2 or box_dim] in 0..1 of each padded level."""
        return pyramid.on_levels(references)

    def jittered(self, boxes_px: Tensor, shift: Tensor, image_whwh: Tensor) -> Tensor:
        """Return the network's boxes of boxes in pixels, whose numbers are moved.

        Args:
            boxes_px: [B, P, box_dim]. image_whwh: as in ``to_unit``.
            shift: [B, P, box_dim]. The sides x1, y1, x2 and y2 are moved by this times the width or height.
        """
        boxes = boxes_px / image_whwh
        sides = (boxes[..., 2:] - boxes[..., :2]).repeat(1, 1, 2)
        return xyxy_to_cxcywh((boxes + shift * sides).clamp(min=0.0, max=1.0))


@TASK_UTILS.register_module()
class RotatedBoxCoder(UprightBoxCoder):
    """Rotated boxes (cx, cy, w, h, angle) in pixels and radians, as ``visdet.ops.box_iou_rotated`` takes them.

    In the network, the centre is in 0..1 of the image, the sides are in 0..1 of the image's diagonal, and the angle is
    any number of radians, because predictions are added to it. So no angle is at a border. Predictions have angles in
    the range of ``angle_version``, and are not clipped.

    Args:
        angle_version: the range of predicted angles; see ``visdet.structures.rotated_boxes.regularized``.
        angle_noise: how far the angle of a denoising query is moved at most, in radians, where its sides are moved by
            half the width or height.
    """

    box_dim = 5
    num_positions = 6

    def __init__(
        self, angle_version: Literal["le90", "le135", "oc"] = "le90", angle_noise: AtLeast0 = math.pi / 8
    ) -> None:
        self.angle_version = angle_version
        self.angle_noise = angle_noise

    def to_unit(self, boxes_px: Tensor, image_whwh: Tensor) -> Tensor:
        return boxes_px / _extent(image_whwh)

    def to_pixels(self, boxes: Tensor, image_whwh: Tensor) -> Tensor:
        return boxes * _extent(image_whwh)

    def detected(self, boxes: Tensor, limit: Tensor, scale: Tensor) -> Tensor:
        return self.divided(self.to_pixels(boxes, limit), scale)

    def divided(self, boxes_px: Tensor, scale: Tensor) -> Tensor:
        """Return boxes that have the lengths and the direction of the sides w of the divided boxes."""
        center, sides, angle = parts_of(boxes_px)
        scale = scale[..., :2]
        cos = angle.cos()
        sin = angle.sin()
        along = torch.cat((cos, sin), dim=-1) / scale
        across = torch.cat((sin, cos), dim=-1) / scale
        lengths = torch.stack((diagonals(along), diagonals(across)), dim=-1)
        x, y = along.split(1, dim=-1)
        boxes = torch.cat((center / scale, sides * lengths, torch.atan2(y, x)), dim=-1)
        return regularized(boxes, self.angle_version)

    def _of_lengths(self, function: Logit, boxes: Tensor) -> Tensor:
        return torch.cat((function(boxes[..., :4]), boxes[..., 4:]), dim=-1)

    def positions(self, boxes: Tensor) -> Tensor:
        """Return the four numbers of the upright box, and those of its angle, which are the same after half a turn."""
        return torch.cat((boxes[..., :4], 0.5 + 0.5 * periodic(boxes[..., 4:])), dim=-1)

    def on_levels(self, references: Tensor, pyramid: "FlatPyramid") -> Tensor:
        sizes = pyramid.level_shapes.flip(-1).to(references.dtype)
        ratios = _extent(pyramid.valid_ratios * sizes) / _extent(sizes)  # [B or 1, L, 5]
        return references.unsqueeze(-2) * ratios[:, None, :, : references.shape[-1]]

    def jittered(self, boxes_px: Tensor, shift: Tensor, image_whwh: Tensor) -> Tensor:
        """Return boxes whose sides are moved in the direction in which each box is turned."""
        center, sides, angle = parts_of(boxes_px)
        low, high, turn = parts_of(shift)
        center = center + turned(0.5 * (low + high) * sides, angle)
        angle = angle + turn * (2 * self.angle_noise)
        return self.to_unit(torch.cat((center, sides * (1 + high - low), angle), dim=-1), image_whwh)


def _extent(image_whwh: Tensor) -> Tensor:
    """Return the units [..., 5] of the network's rotated boxes, given the sizes [..., 2 or 4] of images in pixels."""
    size = image_whwh[..., :2]
    diagonal = diagonals(size).unsqueeze(-1)
    return torch.cat((size, diagonal, diagonal, torch.ones_like(diagonal)), dim=-1)
