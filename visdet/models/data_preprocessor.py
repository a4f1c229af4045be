"""The data preprocessor, which turns collated samples into a padded and normalised batch."""

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from mmengine.model import ImgDataPreprocessor
from torch import Tensor

from visdet.checks.arguments import Above0, Positive
from visdet.errors import InvalidInputError
from visdet.registry import MODELS
from visdet.structures import DetDataSample


@MODELS.register_module()
class DetDataPreprocessor(ImgDataPreprocessor):
    """Normalises images, pads them at the bottom and right to the size of the largest, and stacks them.

    Images of a planned batch (see docs/batches.md) are padded to the ``batch_input_shape`` that the samples have. The
    metainfo of each sample gets ``batch_input_shape``, the (height, width) of the batch, and ``pad_shape``, the
    size of the image rounded up to a multiple of ``pad_size_divisor``. It also gets ``img_shape`` if the pipeline has
    not set it.

    Args:
        mean, std: the mean and the standard deviation of each channel, in the order after the channels have been
            reversed. Give both or neither.
        pad_size_divisor: the height and the width of the batch are multiples of this number.
        pad_value: the value of padded pixels after normalisation.
        pad_mask, boxtype2tensor: accepted for compatibility. No model of visdet reads masks, and box containers in the
            samples are always replaced by their plain tensors.
        bgr_to_rgb, rgb_to_bgr: reverse the channels. At most one of them may be True.
        non_blocking: copy to the device without waiting for the work that it has (mmdet's default is False).

    Source: names and defaults are mmdet's.
    """

    def __init__(
        self,
        mean: Sequence[float] | None = None,
        std: Sequence[Above0] | None = None,
        pad_size_divisor: Positive = 1,
        pad_value: float = 0,
        pad_mask: bool = False,
        bgr_to_rgb: bool = False,
        rgb_to_bgr: bool = False,
        boxtype2tensor: bool = True,
        non_blocking: bool | None = True,
    ) -> None:
        super().__init__(mean, std, pad_size_divisor, pad_value, bgr_to_rgb, rgb_to_bgr, non_blocking)

    def forward(self, data: dict[str, Any], training: bool = False) -> dict[str, Any]:
        """Return ``dict(inputs=[B, C, H, W] float32, data_samples=...)`` on the model's device.

        Args:
            data: ``inputs``, a list of [C, h, w] images or one [B, C, h, w] tensor, and ``data_samples``, a list or
                None.
        """
        check_packed(data)
        image_sizes = [tuple(image.shape[-2:]) for image in data["inputs"]]
        data = super().forward(data, training)
        inputs, data_samples = data["inputs"], data["data_samples"]
        if data_samples:
            height, width = inputs.shape[-2:]
            planned = self._rounded_up(data_samples[0].metainfo.get("batch_input_shape", (0, 0)))
            missing = (max(planned[0] - height, 0), max(planned[1] - width, 0))
            if any(missing):
                inputs = F.pad(inputs, (0, missing[1], 0, missing[0]), value=self.pad_value)
            for sample, size in zip(data_samples, image_sizes, strict=True):
                self._complete(sample, size, tuple(inputs.shape[-2:]))
        return {"inputs": inputs, "data_samples": data_samples}

    def _rounded_up(self, size: Sequence[int]) -> tuple[int, ...]:
        return tuple(-(-length // self.pad_size_divisor) * self.pad_size_divisor for length in size)

    def _complete(self, sample: DetDataSample, size: tuple[int, int], batch_size: tuple[int, int]) -> None:
        """Write the sizes into a sample's metainfo, and unwrap its boxes."""
        sample.set_metainfo(
            {
                "batch_input_shape": batch_size,
                "pad_shape": self._rounded_up(size),
                "img_shape": tuple(sample.metainfo.get("img_shape", size)),
            }
        )
        for field in ("gt_instances", "ignored_instances"):
            boxes = sample.get(field, {}).get("bboxes")
            if boxes is not None and not isinstance(boxes, Tensor):
                sample.get(field).bboxes = boxes.tensor


def check_packed(batch: Any) -> None:
    """Raise an InvalidInputError unless a pipeline has returned a dict with the inputs of the model."""
    if not isinstance(batch, dict) or "inputs" not in batch:
        given = sorted(map(str, batch)) if isinstance(batch, dict) else type(batch).__name__
        raise InvalidInputError(
            f"a pipeline must end with a transform such as PackDetInputs, which gives 'inputs'; got {given}"
        )
