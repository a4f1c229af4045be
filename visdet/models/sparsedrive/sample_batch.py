"""The frames of a batch, one tensor for each thing known of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from visdet.errors import InvalidInputError
from visdet.execution.tensor_tree import ON_HOST
from visdet.structures import DrivingDataSample

from .boxes.box3d_target import DenoisingQueries
from .temporal.frame_clock import FrameClock

# These fields become one tensor for the batch. Other tensors stay lists with one tensor per sample.
_STACKED = (
    "projection_mat",
    "image_wh",
    "focal",
    "gt_ego_fut_trajs",
    "gt_ego_fut_masks",
    "gt_ego_fut_cmd",
    "ego_status",
)
_READ_IN_EVALUATION = ("projection_mat", "image_wh", "gt_ego_fut_cmd")


@dataclass(frozen=True)
class DrivingBatch:
    """Frames and all that the device must know of them.

    Attributes:
        images: [B, V, 3, H, W] normalised.
        metas: tensors that ``batch_of`` stacks, and ``gt_depth`` in training. Their shapes do not depend on the scene.
        state: the temporal state of the head, which has entered the frame.
        clock: when and where the frames were taken. It is None if the head keeps nothing from frame to frame.
        denoising: the denoising queries. They are None in evaluation and if there are none.
        truth: the padded ground truth of the tasks. It is empty in evaluation.
        data: the result of ``batch_of``.
    """

    images: Tensor
    metas: dict[str, Any]
    state: Any
    clock: FrameClock | None = field(default=None, metadata=ON_HOST)
    denoising: DenoisingQueries | None = None
    truth: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict, metadata=ON_HOST)

    @classmethod
    def of(cls, images: Tensor, data: dict[str, Any], state: Any, **others: Any) -> "DrivingBatch":
        """Return a batch, given the result of ``batch_of``. ``others`` are the remaining attributes."""
        metas = {name: data[name] for name in (*_STACKED, "gt_depth") if name in data}
        return cls(images, metas, state, data=data, **others)


def batch_of(data_samples: Sequence[DrivingDataSample], evaluates: bool = False) -> dict[str, Any]:
    """Return what the heads read of a batch of frames, by the names of the samples' fields.

    ``projection_mat`` [B, V, 4, 4], ``image_wh`` [B, V, 2], ``focal`` [B, V], ``gt_ego_fut_*`` and ``ego_status`` are
    stacked. ``gt_depth`` is a list of [B, V, h, w]. Other fields are lists with one value per sample. ``timestamp``
    float64 [B] (seconds) and ``img_metas``, one dict per sample, are on the host. Predictions are left out.

    Args:
        data_samples: one sample per frame.
        evaluates: whether ground truth is left out, but for the command that the vehicle gets.

    Raises:
        InvalidInputError: some samples lack a field that others have, or have it in another shape.
    """
    names: dict[str, None] = {}
    for sample in data_samples:
        for name, _ in sample.items():
            if name in _READ_IN_EVALUATION if evaluates else not name.startswith("pred_"):
                names[name] = None
    batch: dict[str, Any] = {}
    for name in names:
        lacking = [sample.get("token") for sample in data_samples if name not in sample]
        if lacking:
            raise InvalidInputError(f"data_samples must all have {name}; frames {lacking} do not")
        values = [sample.get(name) for sample in data_samples]
        if name in _STACKED:
            batch[name] = torch.stack(values)
        elif name == "gt_depth":
            batch[name] = [torch.stack(levels) for levels in zip(*values, strict=True)]
        else:
            batch[name] = values
    if all("timestamp" in sample for sample in data_samples):
        batch["timestamp"] = torch.tensor([sample.timestamp for sample in data_samples], dtype=torch.float64)
    batch["img_metas"] = [sample.metainfo for sample in data_samples]
    return batch


def last_of(output: dict[str, Any], name: str) -> Tensor:
    """Return what the last layer of a head predicts, in float32."""
    return output[name][-1].float()


def probabilities_of(output: dict[str, Any]) -> Tensor:
    """Return the probabilities [B, N, classes or modes] that the last layer of a head predicts, in float32."""
    return last_of(output, "classification").sigmoid()


def index_of_command(data: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the index [B], [B] of each sample's command among plans [B, 3, ...]; see ``field_of``."""
    command = field_of(data, "gt_ego_fut_cmd").argmax(-1)
    return torch.arange(command.shape[0], device=command.device), command


def field_of(data: dict[str, Any], name: str) -> Any:
    """Return a field of a batch that a head needs.

    Raises:
        InvalidInputError: the samples do not have it.
    """
    if name not in data:
        tokens = [frame.get("token") for frame in data.get("img_metas", ())]
        raise InvalidInputError(
            f"data_samples must have {name}, which the model needs; they have {sorted(data)} in frames {tokens}. Leave "
            "frames without it out of the info file"
        )
    return data[name]
