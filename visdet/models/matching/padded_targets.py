"""The ground truth of a batch as padded tensors."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from visdet.errors import InvalidInputError
from visdet.execution.host_copy import HostCopy
from visdet.execution.tensor_tree import ON_HOST
from visdet.structures import DetDataSample

from ..rows import labels_at, rows_or_zeros
from ..transfer import to_device


def room_for(count: int, least: int) -> int:
    """Return the number of rows to which ``count`` are padded, so that there are few shapes: a power of two."""
    return 1 << max(count - 1, least - 1).bit_length()


@dataclass(frozen=True, kw_only=True)
class Counted:
    """The ground truth of several images, which is padded to a common number.

    Attributes:
        labels: [..., N] int64.
        counts: the number of instances of each image, without padding. lengths: [B] int64, the same on the device.
    """

    labels: Tensor
    counts: list[int] = field(metadata=ON_HOST)
    lengths: Tensor = None  # type: ignore[assignment]  # It follows from the counts.

    def __post_init__(self) -> None:
        if self.lengths is None:
            object.__setattr__(self, "lengths", to_device(self.counts, self.labels.device, torch.int64))


@dataclass(frozen=True, kw_only=True)
class PaddedTargets(Counted):
    """The boxes of several images. Shorter lists are padded to a common length with empty boxes of class 0.

    Attributes:
        boxes_px: [..., N, 4] (x1, y1, x2, y2), or what the box coder says, in pixels of the image without padding.
        image_whwh: [..., 1, 4], the (width, height, width, height) of each image in pixels.
        unknown_label: a copy on the host of whether ``with_labels_below`` found a label that is not a class. It is
            None if that was not called.
    """

    boxes_px: Tensor
    image_whwh: Tensor
    unknown_label: HostCopy | None = field(default=None, metadata=ON_HOST)

    @property
    def has_unknown_label(self) -> bool:
        """Whether ``with_labels_below`` found a label that is not a class. The host waits for that alone."""
        return self.unknown_label is not None and any(self.unknown_label.read().values())

    @classmethod
    def from_samples(
        cls,
        samples: Sequence[DetDataSample],
        image_sizes: Sequence[tuple[int, int]],
        device: torch.device,
        box_dim: int = 4,
    ) -> "PaddedTargets":
        """Return the ``gt_instances`` of a batch.

        Args:
            samples: the samples of the images.
            image_sizes: the (height, width) of each image in pixels.
            device: the device of the targets. box_dim: the numbers of a box.

        Raises:
            ValueError: a sample has no ``gt_instances``, or they are not ``bboxes`` [N, box_dim] and ``labels`` [N].
        """
        boxes = []
        labels = []
        for index, sample in enumerate(samples):
            instances = sample.get("gt_instances", {})
            names = sorted(instances.keys())
            needs = f"loss: data_samples[{index}].gt_instances must have bboxes [N, {box_dim}] and labels [N], got"
            if not {"bboxes", "labels"} <= {*names}:
                raise InvalidInputError(
                    f"{needs} {names}; the pipeline needs LoadAnnotations with with_bbox=True"
                )
            own_boxes = torch.as_tensor(instances.bboxes, dtype=torch.float32, device=device)
            own_labels = torch.as_tensor(instances.labels, dtype=torch.int64, device=device)
            if own_boxes.shape != (len(own_labels), box_dim):
                raise InvalidInputError(f"{needs} {tuple(own_boxes.shape)} and {tuple(own_labels.shape)}")
            boxes.append(own_boxes)
            labels.append(own_labels)
        whwh = to_device([[w, h, w, h] for h, w in image_sizes], device, torch.float32)
        return cls(
            boxes_px=pad_sequence(boxes, batch_first=True),
            labels=pad_sequence(labels, batch_first=True),
            image_whwh=whwh.unsqueeze(1),
            counts=[len(image_labels) for image_labels in labels],
        )

    def padded_to(self, number: int) -> "PaddedTargets":
        """Return the same targets, padded to ``number`` boxes per image. Longer targets stay as they are."""
        missing = max(number - self.labels.shape[-1], 0)
        boxes = F.pad(self.boxes_px, (0, 0, 0, missing))
        return replace(self, boxes_px=boxes, labels=F.pad(self.labels, (0, missing)))

    def with_labels_below(self, num_classes: int) -> "PaddedTargets":
        """Return targets with labels clamped to 0..num_classes-1, which know of labels that are not classes."""
        clamped = self.labels.clamp(0, num_classes - 1)
        unknown = HostCopy({"unknown label": (clamped != self.labels).any()})
        return replace(self, labels=clamped, unknown_label=unknown)

    def of_predictions(self, index: Tensor, background: int) -> tuple[Tensor, Tensor]:
        """Return the class [..., B, Q] and the box [..., B, Q, box_dim], in pixels, of the target of each prediction.

        Args:
            index: [..., B, Q], the result of ``solve_padded``. N stands for no target and gives an empty
                box.
            background: the class of predictions without a target.
        """
        return labels_at(self.labels, index, background), rows_or_zeros(self.boxes_px, index)
