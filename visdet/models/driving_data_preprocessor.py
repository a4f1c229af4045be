"""From collated driving frames to a batch on the device."""

from collections.abc import Sequence
from typing import Any

import torch
from mmengine.model import BaseDataPreprocessor
from torch import Tensor

from visdet.errors import InvalidInputError
from visdet.registry import MODELS

__all__ = ["DrivingDataPreprocessor"]

# One tensor for the batch; other tensors stay lists of one tensor per sample.
_STACKED = (
    "projection_mat",
    "image_wh",
    "focal",
    "gt_ego_fut_trajs",
    "gt_ego_fut_masks",
    "gt_ego_fut_cmd",
    "ego_status",
)


@MODELS.register_module()
class DrivingDataPreprocessor(BaseDataPreprocessor):
    """Moves frames to the device, stacks them and normalises the images there.

    Takes what ``pseudo_collate`` makes of PackDrivingInputs' items and returns ``dict(inputs=..., data_samples=...)``:
    ``inputs`` float32 [B, V, 3, H, W]; ``data_samples`` a dict with ``projection_mat`` [B, V, 4, 4], ``image_wh``
    [B, V, 2], ``focal`` [B, V], ``timestamp`` float64 [B] (seconds), ``gt_depth`` a list of [B, V, h, w],
    ``gt_ego_fut_*`` and ``ego_status`` stacked, ``gt_bboxes_3d``, ``gt_labels_3d``, ``gt_map_*`` and
    ``gt_agent_fut_*`` lists of one tensor per sample, and ``img_metas``, a list of one dict per sample (on the host).

    Args:
        mean, std: of each channel, in the order after the channel conversion; both or neither.
        bgr_to_rgb: reverse the channels first.
        non_blocking: copy to the device without waiting.

    Raises:
        ValueError: images of a batch differ in size or number, or in type.
    """

    def __init__(
        self,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
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
            # x * scale + shift, one pass over the images.
            scale = 1 / torch.tensor(std, dtype=torch.float64)
            shift = -torch.tensor(mean, dtype=torch.float64) * scale
            self.register_buffer("_scale", scale.float().view(-1, 1, 1), persistent=False)
            self.register_buffer("_shift", shift.float().view(-1, 1, 1), persistent=False)

    def forward(self, data: dict[str, Any], training: bool = False) -> dict[str, Any]:
        """Return the batch on the device; see the class."""
        images = data["inputs"]["img"]
        samples = _restore_samples(data.get("data_samples") or {})
        moved = self.cast_data({"img": _stack("img", images), "data_samples": samples})
        return {"inputs": self._normalise(moved["img"]), "data_samples": moved["data_samples"]}

    def _normalise(self, images: Tensor) -> Tensor:
        if self.bgr_to_rgb:
            images = images.flip(2)
        images = images.float()
        return torch.addcmul(self._shift, images, self._scale) if self._has_statistics else images


def _restore_samples(collated: dict[str, Any]) -> dict[str, Any]:
    """Return the data samples with stacked tensors, and the metas as one dict per sample."""
    samples = dict(collated)
    for key in _STACKED:
        if key in samples:
            samples[key] = _stack(key, samples[key])
    if "timestamp" in samples:
        samples["timestamp"] = torch.as_tensor(samples["timestamp"], dtype=torch.float64)
    if "gt_depth" in samples:
        samples["gt_depth"] = [_stack("gt_depth", level) for level in samples["gt_depth"]]
    metas = samples.get("img_metas")
    if isinstance(metas, dict):
        size = len(next(iter(metas.values()), ()))
        samples["img_metas"] = [{key: values[i] for key, values in metas.items()} for i in range(size)]
    return samples


def _stack(name: str, tensors: Tensor | Sequence[Tensor]) -> Tensor:
    if isinstance(tensors, Tensor):
        return tensors
    shapes = sorted({tuple(tensor.shape) for tensor in tensors})
    if len(shapes) != 1:
        raise InvalidInputError(
            f"DrivingDataPreprocessor: {name} of all samples must be of one shape, got {shapes}"
        )
    dtypes = sorted({str(tensor.dtype) for tensor in tensors})
    if len(dtypes) != 1:
        raise InvalidInputError(
            f"DrivingDataPreprocessor: {name} of all samples must be of one type, got {dtypes}"
        )
    return torch.stack(list(tensors))
