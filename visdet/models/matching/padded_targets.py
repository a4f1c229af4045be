"""Ground truth of a batch in one tensor each."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from visdet.errors import InvalidInputError
from visdet.structures import DetDataSample

from ..transfer import to_device

__all__ = ["PaddedTargets"]


@dataclass(frozen=True)
class PaddedTargets:
    """Boxes of several images, padded to the longest list with empty boxes of class 0.

    Attributes:
        boxes_xyxy: [..., N, 4] in pixels of the image without padding.
        labels: [..., N] int64.
        image_whwh: [..., 1, 4], (width, height, width, height) of each image in pixels.
        counts: number of true boxes of each image.
    """

    boxes_xyxy: Tensor
    labels: Tensor
    image_whwh: Tensor
    counts: list[int]

    @classmethod
    def from_samples(
        cls, samples: Sequence[DetDataSample], image_sizes: Sequence[tuple[int, int]], device: torch.device
    ) -> "PaddedTargets":
        """Return the ``gt_instances`` of a batch; ``image_sizes`` are (height, width).

        Raises:
            ValueError: a sample without ``gt_instances``, or boxes that are not [N, 4] with labels [N].
        """
        boxes, labels = [], []
        for index, sample in enumerate(samples):
            if "gt_instances" not in sample:
                raise InvalidInputError(f"loss: data_samples[{index}] has no gt_instances")
            instances = sample.gt_instances
            boxes.append(torch.as_tensor(instances.bboxes, dtype=torch.float32, device=device))
            labels.append(torch.as_tensor(instances.labels, dtype=torch.int64, device=device))
            if boxes[-1].shape != (len(labels[-1]), 4):
                raise InvalidInputError(
                    f"loss: data_samples[{index}].gt_instances must have bboxes [N, 4] and labels [N], "
                    f"got {tuple(boxes[-1].shape)} and {tuple(labels[-1].shape)}"
                )
        whwh = to_device([[w, h, w, h] for h, w in image_sizes], device, torch.float32)
        return cls(
            boxes_xyxy=pad_sequence(boxes, batch_first=True),
            labels=pad_sequence(labels, batch_first=True),
            image_whwh=whwh.unsqueeze(1),
            counts=[len(image_labels) for image_labels in labels],
        )

    def with_labels_below(self, num_classes: int) -> tuple["PaddedTargets", Tensor]:
        """Return targets with labels forced into 0..num_classes-1, and whether any was outside (bool scalar tensor)."""
        clamped = self.labels.clamp(0, num_classes - 1)
        return replace(self, labels=clamped), (clamped != self.labels).any()

    def without_classes(self) -> "PaddedTargets":
        """Return the same boxes, all of class 0: objects of any kind."""
        return replace(self, labels=torch.zeros_like(self.labels))
