"""The data preprocessor, which turns collated samples into a padded and normalised batch."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from mmengine.model import ImgDataPreprocessor
from mmengine.structures import PixelData
from torch import Tensor, nn

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
        pad_mask: pad ``gt_instances.masks`` to the size of the batch in training. mask_pad_value: the padding value.
        pad_seg: pad ``gt_sem_seg.sem_seg`` to the size of the batch in training. seg_pad_value: the padding value.
        bgr_to_rgb, rgb_to_bgr: reverse the channels. At most one of them may be True.
        boxtype2tensor: replace box containers in the samples by their plain tensors.
        non_blocking: copy to the device without waiting for the work that it has (mmdet's default is False).
        batch_augments: configs of modules that are called as (inputs, data_samples) -> (inputs, data_samples) in
            training.

    Raises:
        ValueError: both channel conversions are asked for, only one of mean and std is given, or the divisor is
            less than 1.

    Source: names and defaults are mmdet's.
    """

    def __init__(
        self,
        mean: Sequence[float] | None = None,
        std: Sequence[Above0] | None = None,
        pad_size_divisor: Positive = 1,
        pad_value: float = 0,
        pad_mask: bool = False,
        mask_pad_value: int = 0,
        pad_seg: bool = False,
        seg_pad_value: int = 255,
        bgr_to_rgb: bool = False,
        rgb_to_bgr: bool = False,
        boxtype2tensor: bool = True,
        non_blocking: bool | None = True,
        batch_augments: list[dict[str, Any]] | None = None,
    ) -> None:
        if bgr_to_rgb and rgb_to_bgr:
            raise InvalidInputError("DetDataPreprocessor: bgr_to_rgb and rgb_to_bgr must not both be True")
        if (mean is None) != (std is None):
            raise InvalidInputError(
                f"DetDataPreprocessor: mean and std must be given together, got mean={mean}, std={std}"
            )
        super().__init__(mean, std, pad_size_divisor, pad_value, bgr_to_rgb, rgb_to_bgr, non_blocking)
        self.pad_mask = pad_mask
        self.mask_pad_value = mask_pad_value
        self.pad_seg = pad_seg
        self.seg_pad_value = seg_pad_value
        self.boxtype2tensor = boxtype2tensor
        self.batch_augments = nn.ModuleList(MODELS.build(config) for config in batch_augments or [])

    def forward(self, data: dict[str, Any], training: bool = False) -> dict[str, Any]:
        """Return ``dict(inputs=[B, C, H, W] float32, data_samples=...)`` on the model's device.

        Args:
            data: ``inputs``, a list of [C, h, w] images or one [B, C, h, w] tensor, and ``data_samples``, a list or
                None.
            training: whether to pad masks and run ``batch_augments``.
        """
        check_packed(data)
        image_sizes = [tuple(image.shape[-2:]) for image in data["inputs"]]
        data = super().forward(data, training)
        inputs, data_samples = data["inputs"], data["data_samples"]
        if data_samples is not None:
            planned = data_samples[0].metainfo.get("batch_input_shape") if data_samples else None
            if planned is not None:
                divisor = self.pad_size_divisor
                sides = zip(planned, inputs.shape[-2:], strict=True)
                padded = [max(-(-side // divisor) * divisor, given) for side, given in sides]
                if padded != list(inputs.shape[-2:]):
                    inputs = _pad_to(inputs, padded, self.pad_value)
            batch_size = tuple(inputs.shape[-2:])
            for sample, size in zip(data_samples, image_sizes, strict=True):
                self._complete(sample, size, batch_size, training)
        if training:
            for augment in self.batch_augments:
                inputs, data_samples = augment(inputs, data_samples)
        return {"inputs": inputs, "data_samples": data_samples}

    def _complete(
        self, sample: DetDataSample, size: tuple[int, int], batch_size: tuple[int, int], training: bool
    ) -> None:
        """Write the sizes into a sample's metainfo, unwrap its boxes, and pad its masks."""
        divisor = self.pad_size_divisor
        sample.set_metainfo(
            {
                "batch_input_shape": batch_size,
                "pad_shape": tuple(-(-length // divisor) * divisor for length in size),
                "img_shape": tuple(sample.metainfo.get("img_shape", size)),
            }
        )
        if self.boxtype2tensor:
            for field in ("gt_instances", "ignored_instances"):
                instances = sample.get(field)
                boxes = instances.get("bboxes") if instances is not None else None
                if boxes is not None and not isinstance(boxes, Tensor):
                    instances.bboxes = boxes.tensor
        if training and self.pad_mask and "gt_instances" in sample and "masks" in sample.gt_instances:
            masks = sample.gt_instances.masks
            sample.gt_instances.masks = _pad_to(masks, batch_size, self.mask_pad_value)
        if training and self.pad_seg and "gt_sem_seg" in sample:
            segmentation = _pad_to(sample.gt_sem_seg.sem_seg, batch_size, self.seg_pad_value)
            sample.gt_sem_seg = PixelData(sem_seg=segmentation)


def check_packed(batch: Any) -> None:
    """Raise an InvalidInputError unless a pipeline has returned a dict with the inputs of the model."""
    if not isinstance(batch, dict) or "inputs" not in batch:
        given = sorted(map(str, batch)) if isinstance(batch, dict) else type(batch).__name__
        raise InvalidInputError(
            f"a pipeline must end with a transform such as PackDetInputs, which gives 'inputs'; got {given}"
        )


def _pad_to(maps: Any, size: Sequence[int], value: float) -> Any:
    """Return maps [..., h, w] padded at the bottom and on the right to ``size``. Mask containers pad themselves."""
    if not isinstance(maps, torch.Tensor):
        return maps.pad(size, pad_val=value)
    height, width = maps.shape[-2:]
    return F.pad(maps, (0, size[1] - width, 0, size[0] - height), value=value)
