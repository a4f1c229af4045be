"""The data preprocessors, which turn collated samples into a padded or stacked and normalised batch."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from mmengine.model import ImgDataPreprocessor
from torch import Tensor

from visdet.checks.arguments import Above0, Positive, also_takes
from visdet.errors import InvalidInputError
from visdet.registry import MODELS
from visdet.structures import DrivingDataSample


class FollowsModel(ImgDataPreprocessor):
    """A data preprocessor whose images have the type to which the model is cast, as by ``model.to(torch.bfloat16)``.

    Images are normalised in float32 or better. A mean of 123.675 would be 123.5 in bfloat16.
    """

    image_dtype = torch.float32
    reverses_channels = False

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        exact = dict(self.named_buffers())
        super()._apply(fn, recurse)
        self.image_dtype = fn(torch.zeros((), dtype=self.image_dtype)).dtype
        for name, buffer in exact.items():
            moved = self.get_buffer(name)
            if moved.element_size() < buffer.element_size():
                setattr(self, name, buffer.to(moved.device))
        return self

    def normalized(self, images: Tensor) -> Tensor:
        """Return images [..., C, H, W] in float32, whose channels are reversed and normalised as the config says."""
        images = (images.flip(-3) if self.reverses_channels else images).float()
        if not hasattr(self, "mean"):
            return images
        if images.shape[-3] != len(self.mean) > 1:
            raise InvalidInputError(f"inputs must have 3 channels, as mean has, got {tuple(images.shape)}")
        return (images - self.mean).div_(self.std)


@MODELS.register_module()
class DetDataPreprocessor(FollowsModel):
    """Normalises images, pads them at the bottom and right to the size of the largest, and stacks them.

    Images of a planned batch (see docs/batches.md) are padded to the ``batch_input_shape`` that the samples have. The
    metainfo of each sample gets ``batch_input_shape``, the (height, width) of the batch, and ``pad_shape``, the
    size of the image rounded up to a multiple of ``pad_size_divisor``. It also gets ``img_shape`` if the pipeline has
    not set it, and outside training ``batch_is_padded``, whether an image is padded, if the batch was not planned.

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

    @also_takes(pad_seg=False, batch_augments=None, mask_pad_value=..., seg_pad_value=...)
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
        self.reverses_channels = bgr_to_rgb or rgb_to_bgr

    def forward(self, data: dict[str, Any], training: bool = False) -> dict[str, Any]:
        """Return ``dict(inputs=[B, C, H, W], data_samples=...)`` on the model's device and in its type.

        Args:
            data: ``inputs``, a list of [C, h, w] images or one [B, C, h, w] tensor, and ``data_samples``, a list or
                None.
        """
        check_packed(data)
        data = self.cast_data(data)
        images = data["inputs"]
        data_samples = data.get("data_samples")
        image_sizes = [image.shape[-2:] for image in images]
        planned = data_samples[0].metainfo.get("batch_input_shape", (0, 0)) if data_samples else (0, 0)
        batch_size = self._rounded_up([max(lengths) for lengths in zip(planned, *image_sizes, strict=True)])
        is_padded = any(size != batch_size for size in image_sizes)
        for sample, size in zip(data_samples, image_sizes, strict=True) if data_samples else ():
            known = sample.metainfo
            sizes = {
                "batch_input_shape": batch_size,
                "pad_shape": self._rounded_up(size),
                "img_shape": tuple(known.get("img_shape", size)),
            }
            if not training:
                # Each image is predicted as if it were a batch of its own, so that no metric depends on the batch.
                sizes["batch_is_padded"] = known.get("batch_is_padded", is_padded)
            sample.set_metainfo(sizes)
            for field in ("gt_instances", "ignored_instances"):
                boxes = sample.get(field, {}).get("bboxes")
                if hasattr(boxes, "tensor"):
                    sample.get(field).bboxes = boxes.tensor
        height, width = batch_size
        padded = [
            F.pad(self.normalized(image), (0, width - w, 0, height - h), value=self.pad_value)
            for image, (h, w) in zip(images, image_sizes, strict=True)
        ]
        return {"inputs": torch.stack(padded).to(self.image_dtype), "data_samples": data_samples}

    def _rounded_up(self, size: Sequence[int]) -> tuple[int, ...]:
        return tuple(-(-length // self.pad_size_divisor) * self.pad_size_divisor for length in size)


def check_packed(batch: Any) -> None:
    """Raise an InvalidInputError unless a pipeline has returned a dict with the inputs of the model."""
    if not isinstance(batch, dict) or "inputs" not in batch:
        given = sorted(map(str, batch)) if isinstance(batch, dict) else type(batch).__name__
        raise InvalidInputError(
            f"a pipeline must end with a transform such as PackDetInputs, which gives 'inputs'; got {given}"
        )


@MODELS.register_module()
class DrivingDataPreprocessor(FollowsModel):
    """Moves frames to the device, stacks them and normalises the images there.

    It takes the items of PackDrivingInputs as ``pseudo_collate`` collates them: a list of ``inputs`` [V, 3, H, W] and
    a list of DrivingDataSamples. It returns ``dict(inputs=..., data_samples=...)`` on the device, with ``inputs``
    [B, V, 3, H, W] in the type of the model and the same samples. The true boxes, lines and trajectories of the samples
    stay on the host, where the model pads those of a batch and moves them together.

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
        if (mean is None) != (std is None):
            raise InvalidInputError(
                f"DrivingDataPreprocessor: mean and std must be given together, got {mean}, {std}"
            )
        super().__init__(mean, std, bgr_to_rgb=bgr_to_rgb, non_blocking=non_blocking)
        self.reverses_channels = bgr_to_rgb

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
        return {"inputs": self.normalized(images).to(self.image_dtype), "data_samples": samples}
