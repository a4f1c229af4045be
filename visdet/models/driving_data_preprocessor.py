"""The data preprocessor of driving frames, which turns collated frames into a batch on the device."""

from collections.abc import Sequence
from typing import Any

import torch
from mmengine.model import BaseDataPreprocessor
from torch import Tensor

from visdet.checks.arguments import Above0
from visdet.errors import InvalidInputError
from visdet.registry import MODELS
from visdet.structures import DrivingDataSample

from .data_preprocessor import check_packed


@MODELS.register_module()
class DrivingDataPreprocessor(BaseDataPreprocessor):
    """Moves frames to the device, stacks them and normalises the images there.

    It takes the items of PackDrivingInputs as ``pseudo_collate`` collates them: a list of ``inputs`` [V, 3, H, W] and
    a list of DrivingDataSamples. It returns ``dict(inputs=..., data_samples=...)`` on the device, with ``inputs``
    float32 [B, V, 3, H, W] and the same samples. The true boxes, lines and trajectories of the samples stay on the
    host, where the model pads those of a batch and moves them together.

    Args:
        mean, std: the mean and the standard deviation of each channel, in the order after the channels have been
            reversed. Give both or neither.
        bgr_to_rgb: reverse the channels before the normalisation.
        non_blocking: copy to the device without waiting.

    Raises:
        ValueError: only one of mean and std is given, or the images of a batch differ in number, size or dtype.
    """

    def __init__(
        self,
        mean: Sequence[float] | None = None,
        std: Sequence[Above0] | None = None,
        bgr_to_rgb: bool = False,
        non_blocking: bool = True,
    ) -> None:
        super().__init__(non_blocking=non_blocking)
        if (mean is None) != (std is None):
            raise InvalidInputError(
                f"DrivingDataPreprocessor: mean and std must be given together, got {mean}, {std}"
            )
        self.bgr_to_rgb = bgr_to_rgb
        self._has_statistics = mean is not None
        if mean is not None and std is not None:
            # This computes x * scale + shift in one pass over the images.
            scale = 1 / torch.tensor(std, dtype=torch.float64)
            shift = -torch.tensor(mean, dtype=torch.float64) * scale
            self.register_buffer("_scale", scale.float().view(-1, 1, 1), persistent=False)
            self.register_buffer("_shift", shift.float().view(-1, 1, 1), persistent=False)

    def forward(self, data: dict[str, Any], training: bool = False) -> dict[str, Any]:
        """Return the batch on the device; see the class."""
        check_packed(data)
        # Each frame goes to the device from the memory that the loader has pinned. A stack on the host would not be
        # pinned, and its copy would wait for all work that the device has.
        images = self.cast_data(data["inputs"])
        images = images if isinstance(images, Tensor) else torch.stack(images)
        samples = data.get("data_samples")
        if samples is not None:
            samples = [
                sample.with_inputs_on(self.device, self._non_blocking)
                if isinstance(sample, DrivingDataSample)
                else self.cast_data(sample)
                for sample in samples
            ]
        images = (images.flip(2) if self.bgr_to_rgb else images).float()
        if self._has_statistics:
            images = torch.addcmul(self._shift, images, self._scale)
        return {"inputs": images, "data_samples": samples}
