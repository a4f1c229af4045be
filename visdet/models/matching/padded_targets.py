"""Ground truth of a batch in one tensor each."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from visdet.errors import InvalidInputError
from visdet.structures import DetDataSample
from visdet.structures.tensor_tree import ON_HOST

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
        has_unknown_label: whether a label was no class (bool scalar), as far as ``with_labels_below`` asked.
    """

    boxes_xyxy: Tensor
    labels: Tensor
    image_whwh: Tensor
    counts: list[int] = field(metadata=ON_HOST)
    has_unknown_label: Tensor | None = None

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

    def padded_to(self, number: int) -> "PaddedTargets":
        """Return the same targets with ``number`` boxes an image, or as many as there are."""
        missing = max(number - self.labels.shape[-1], 0)
        boxes, labels = F.pad(self.boxes_xyxy, (0, 0, 0, missing)), F.pad(self.labels, (0, missing))
        return replace(self, boxes_xyxy=boxes, labels=labels)

    def with_labels_below(self, num_classes: int) -> "PaddedTargets":
        """Return targets with labels forced into 0..num_classes-1, that know whether any was outside."""
        clamped = self.labels.clamp(0, num_classes - 1)
        return replace(self, labels=clamped, has_unknown_label=(clamped != self.labels).any())

    def of_predictions(self, index: Tensor, background: int) -> tuple[Tensor, Tensor]:
        """Return class [..., B, Q] and box [..., B, Q, 4] (pixels) of the target of each prediction.

        Args:
            index: [..., B, Q], as ``HungarianAssigner.solve`` returns it: N for none, which has an empty box.
            background: class of predictions without a target.
        """
        labels = F.pad(self.labels, (0, 1), value=background).expand(*index.shape[:-1], -1)
        boxes = F.pad(self.boxes_xyxy, (0, 0, 0, 1)).expand(*index.shape[:-1], -1, -1)
        return labels.gather(-1, index), boxes.gather(-2, index.unsqueeze(-1).expand(*index.shape, 4))

    def without_classes(self) -> "PaddedTargets":
        """Return the same boxes, all of class 0: objects of any kind."""
        return replace(self, labels=torch.zeros_like(self.labels))
