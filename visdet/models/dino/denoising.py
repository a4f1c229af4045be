"""Contrastive denoising: queries made of ground truth with little noise, and with so much that they are background."""

from typing import Any

import torch
from mmengine.model import BaseModule
from torch import Tensor, nn

from visdet.checks.arguments import AtLeast0
from visdet.errors import InvalidInputError
from visdet.registry import MODELS

from ..boxes import inverse_sigmoid, xyxy_to_cxcywh
from ..deformable_detr.decoder_start import DenoisingQueries
from ..matching.padded_targets import PaddedTargets


@MODELS.register_module()
class CdnQueryGenerator(BaseModule):
    """Makes denoising queries of the ground truth of a batch.

    If M is the greatest number of boxes of an image, a group is M positive queries, which shall find the box that they
    were made of, and M negative ones, which shall find nothing. Images with fewer boxes get queries of zeros in the
    middle of the image, which shall find nothing either. Groups do not see each other. So that a step can be captured
    as a CUDA graph, there is the same room whatever M is. Queries that are only room are not seen and get no loss.

    Args:
        num_classes: number of classes. embed_dims: channels of the queries.
        label_noise_scale: twice the share of labels that are replaced by a class at random.
        box_noise_scale: how far a side of a positive box is moved at most, in halves of the box's width or height.
            A side of a negative box is moved by one to two times as much.
        group_cfg: ``dict(dynamic=True, num_dn_queries=100)``, by which there are num_dn_queries // M groups, but at
            least one, or ``dict(dynamic=False, num_groups=...)``.

    Source: Zhang et al., DINO, ICLR 2023; names and defaults are mmdet's.
    """

    def __init__(
        self,
        num_classes: int,
        embed_dims: int,
        label_noise_scale: AtLeast0 = 0.5,
        box_noise_scale: AtLeast0 = 1.0,
        group_cfg: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        group_cfg = {"dynamic": True, "num_dn_queries": 100, "num_groups": None, **(group_cfg or {})}
        self.is_dynamic = group_cfg["dynamic"]
        self.limit = group_cfg["num_dn_queries" if self.is_dynamic else "num_groups"]
        if len(group_cfg) > 3 or not isinstance(self.limit, int) or self.limit < 1:
            raise InvalidInputError(
                "CdnQueryGenerator: group_cfg must have dynamic=True and num_dn_queries >= 1, or dynamic=False and "
                f"num_groups >= 1, got {group_cfg}"
            )
        self.num_classes = num_classes
        self.label_noise_scale = label_noise_scale
        self.box_noise_scale = box_noise_scale
        self.label_embedding = nn.Embedding(num_classes, embed_dims)

    def num_groups(self, most_boxes: int) -> int:
        """Return the number of groups for a batch whose images have at most ``most_boxes`` boxes."""
        return max(self.limit // max(most_boxes, 1), 1) if self.is_dynamic else self.limit

    def room(self, most_boxes: int) -> int:
        """Return a number of queries that suffices for all batches whose images have at most ``most_boxes`` boxes."""
        return 2 * (max(self.limit, most_boxes) if self.is_dynamic else self.limit * most_boxes)

    def draw(self, batch_size: int, room: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return random chances [B, P] in 0..1, labels [B, P], signs [B, P, 4] and sizes [B, P, 4] in 0..1.

        A label replaces the true one if the chance is small. Signs and sizes shift the sides of the boxes.
        """
        shape, sides = (batch_size, room), (batch_size, room, 4)
        signs = torch.randint(2, sides, device=device) * 2.0 - 1.0
        labels = torch.randint(self.num_classes, shape, device=device)
        return torch.rand(shape, device=device), labels, signs, torch.rand(sides, device=device)

    def forward(self, targets: PaddedTargets, counts: Tensor) -> DenoisingQueries:
        """Return the queries. All work runs on the device.

        Args:
            targets: the ground truth of B images. counts: [B] int64, the number of boxes of each image.
        """
        B, N = targets.labels.shape
        room = self.room(N)
        chance, other, sign, size = self.draw(B, room, counts.device)
        most = counts.max()
        per_group = 2 * most.clamp(min=1)
        num_groups = (2 * self.limit // per_group).clamp(min=1) if self.is_dynamic else self.limit
        slot = torch.arange(room, device=counts.device)
        is_counted = slot < 2 * most * num_groups
        is_negative = slot % per_group >= most
        target = (slot % per_group % most.clamp(min=1)).expand(B, room)
        is_made = is_counted & (target < counts.unsqueeze(1))

        labels = targets.labels.gather(1, target)
        labels = torch.where(chance < self.label_noise_scale * 0.5, other, labels)
        boxes = (targets.boxes_xyxy / targets.image_whwh).gather(1, target.unsqueeze(-1).expand(-1, -1, 4))
        shift = (size + is_negative.unsqueeze(-1)) * sign
        sides = (boxes[..., 2:] - boxes[..., :2]).repeat(1, 1, 2)
        noisy = (boxes + shift * sides * self.box_noise_scale / 2).clamp(min=0.0, max=1.0)
        logits = inverse_sigmoid(xyxy_to_cxcywh(noisy), eps=1e-3)
        return DenoisingQueries(
            query=self.label_embedding(labels) * is_made.unsqueeze(-1),
            references=torch.where(is_made.unsqueeze(-1), logits, 0.0).sigmoid(),
            targets=torch.where(is_made & ~is_negative, target, N),
            is_counted=is_counted,
            groups=torch.where(is_counted, slot // per_group, room + slot),
        )
