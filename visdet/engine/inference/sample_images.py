"""The images that a sample's predictions are drawn on."""

from typing import Any

import numpy as np
from mmengine.config import Config
from mmengine.structures import BaseDataElement
from torch import Tensor

from visdet.files.images import MAX_PIXELS
from visdet.registry import TRANSFORMS
from visdet.structures import DetDataSample

from ..config.checks import data_preprocessor_of


def image_of(sample: BaseDataElement, inputs: Tensor, is_bgr: bool) -> np.ndarray:
    """Return what the predictions of a sample are drawn on: the image or the views.

    Args:
        sample: a sample. A DetDataSample is drawn on the image file ``img_path``, any other sample on ``inputs``.
        inputs: the images [..., 3, H, W] that the pipeline made; see :func:`image_of_inputs`.
        is_bgr: whether the channels of ``inputs`` are blue, green, red.
    """
    return image_file_of(sample) if isinstance(sample, DetDataSample) else image_of_inputs(inputs, is_bgr)


def image_of_inputs(inputs: Tensor, is_bgr: bool) -> np.ndarray:
    """Return images as RGB images [..., H, W, 3] on the CPU, of the same dtype.

    Args:
        inputs: the images [..., 3, H, W] that the pipeline made.
        is_bgr: whether the channels of ``inputs`` are blue, green, red.
    """
    channels = inputs.flip(-3) if is_bgr else inputs
    return channels.movedim(-3, -1).contiguous().numpy(force=True)


def image_file_of(sample: DetDataSample) -> np.ndarray:
    """Return the image file of a sample, [H, W, 3] uint8 RGB, as the pipeline reads it before any resizing."""
    height, width = sample.metainfo.get("ori_shape", (None, None))[:2]
    # The pipeline has accepted the number of pixels.
    return rgb_of_file(sample.img_path, max_pixels=None, height=height, width=width)


def rgb_of_file(path: str | None, max_pixels: int | None = MAX_PIXELS, **results: Any) -> np.ndarray:
    """Return an image file, [H, W, 3] uint8 RGB, as LoadImageFromFile reads it.

    Args:
        path: the file. max_pixels: see LoadImageFromFile. results: what its results dict has besides.
    """
    read = TRANSFORMS.build({"type": "LoadImageFromFile", "channel_order": "rgb", "max_pixels": max_pixels})
    return read({"img_path": path, **results})["img"].permute(1, 2, 0).contiguous().numpy()


def is_bgr(cfg: Config) -> bool:
    """Return whether the pipeline of a config gives images whose channels are blue, green, red.

    The result follows from the data preprocessor's ``bgr_to_rgb``. If that does not match the pipeline, the colours
    of the pictures are wrong.
    """
    return bool(data_preprocessor_of(cfg).get("bgr_to_rgb", False))
