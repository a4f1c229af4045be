"""The images, or the points, that a sample's predictions are drawn on."""

import numpy as np
from mmengine.config import Config
from mmengine.structures import BaseDataElement
from torch import Tensor

from visdet.registry import TRANSFORMS
from visdet.structures import DetDataSample

__all__ = ["image_file_of", "image_of", "image_of_inputs", "is_bgr"]


def image_of(sample: BaseDataElement, inputs: Tensor, is_bgr: bool) -> np.ndarray:
    """Return what a sample is drawn on: a DetDataSample's image file in RGB, for others the inputs.

    Args:
        sample: with ``img_path`` if it is a DetDataSample. inputs, is_bgr: see :func:`image_of_inputs`.
    """
    return image_file_of(sample) if isinstance(sample, DetDataSample) else image_of_inputs(inputs, is_bgr)


def image_of_inputs(inputs: Tensor, is_bgr: bool) -> np.ndarray:
    """Return ``inputs`` [..., 3, H, W] of the pipeline as RGB images [..., H, W, 3], and points [n, 3] as they are.

    Args:
        is_bgr: whether the channels of ``inputs`` are blue, green, red.
    """
    if inputs.dim() == 2:
        return inputs.cpu().numpy()
    channels = inputs.flip(-3) if is_bgr else inputs
    return channels.movedim(-3, -1).contiguous().cpu().numpy()


def image_file_of(sample: DetDataSample) -> np.ndarray:
    """Return the image file of a sample, [H, W, 3] uint8 RGB, as the pipeline reads it before any resizing."""
    height, width = sample.metainfo.get("ori_shape", (None, None))[:2]
    read = TRANSFORMS.build({"type": "LoadImageFromFile", "channel_order": "rgb"})
    image = read({"img_path": sample.img_path, "height": height, "width": width})["img"]
    return image.permute(1, 2, 0).contiguous().numpy()


def is_bgr(cfg: Config) -> bool:
    """Return whether the config's model takes blue for the first channel of its inputs.

    A wrong channel order shows as wrong colours in the pictures.
    """
    preprocessor = cfg.get("model", {}).get("data_preprocessor") or cfg.get("data_preprocessor") or {}
    return bool(preprocessor.get("bgr_to_rgb", False))
