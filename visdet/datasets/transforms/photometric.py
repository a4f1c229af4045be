"""Transforms that change colours but not the geometry."""

from typing import Annotated

import cv2
import numpy as np
import torch

from visdet.checks.arguments import Ascending, AtLeast0, Range
from visdet.registry import TRANSFORMS

from .base import BaseTransform, uniform, uniform_int

_Factors = Annotated[tuple[AtLeast0, AtLeast0], Ascending()]


@TRANSFORMS.register_module()
class PhotoMetricDistortion(BaseTransform):
    """Changes brightness, contrast, saturation, hue and the order of the channels, each with probability one half.

    The steps are, in this order: brightness ``+ d``; contrast ``* a``, which is moved behind the hue with probability
    one half; saturation ``* s``; hue ``+ h``; a random permutation of the channels. The saturation is that of HSV: each
    channel c moves away from the brightest one v to ``v - (v - c) * s``, but not below 0.

    Args:
        brightness_delta: d is uniform in ±brightness_delta, on the scale 0..255.
        contrast_range: the lowest and the highest a.
        saturation_range: the lowest and the highest s.
        hue_delta: h is uniform in ±hue_delta, in degrees.

    Raises:
        ValueError: a range or a delta is not valid.

    Source: SSD's augmentation, with mmdet's names and defaults, by OpenCV. Differences: values are clipped to 0..255
    before the saturation or the hue changes, and the result is rounded to whole numbers and has the dtype of the image.
    """

    keeps_size = True

    def __init__(
        self,
        brightness_delta: AtLeast0 = 32,
        contrast_range: _Factors = (0.5, 1.5),
        saturation_range: _Factors = (0.5, 1.5),
        hue_delta: Annotated[float, Range(0, 180)] = 18,
    ) -> None:
        self.brightness_delta = brightness_delta
        self.contrast_range = contrast_range
        self.saturation_range = saturation_range
        self.hue_delta = hue_delta

    def transform(self, results: dict) -> dict:
        from .tv_results import set_image  # with torchvision, which images of cameras do not need

        image = results["img"].as_subclass(torch.Tensor)
        pixels = image.round().to(torch.uint8).permute(1, 2, 0).contiguous().numpy()
        # In an RGB image the hue changes in the opposite direction. Both directions are equally likely.
        set_image(results, torch.from_numpy(self.distorted(pixels)).permute(2, 0, 1).to(image.dtype))
        return results

    def distorted(self, image: np.ndarray) -> np.ndarray:
        """Return an image, uint8 [H, W, 3], with other colours."""
        table = np.arange(256, dtype=np.float32)  # what becomes of each value
        if uniform_int(0, 1):
            table += uniform(-self.brightness_delta, self.brightness_delta)
        contrast_comes_first = uniform_int(0, 1)
        contrast = uniform_int(0, 1)
        if contrast and contrast_comes_first:
            table *= uniform(*self.contrast_range)
        saturate = uniform_int(0, 1)
        turn = uniform_int(0, 1)
        values: np.ndarray = table
        if saturate or turn:
            hsv: np.ndarray = cv2.cvtColor(cv2.LUT(image, np.clip(table, 0, 255) / 255), cv2.COLOR_BGR2HSV)
            hue, saturation, _ = hsv.transpose(2, 0, 1)  # views, through which hsv is changed
            if saturate:
                saturation *= uniform(*self.saturation_range)
                np.minimum(saturation, 1, out=saturation)
            if turn:
                hue += uniform(-self.hue_delta, self.hue_delta)
                hue -= 360 * np.floor(hue / 360)
            values = cv2.cvtColor(hsv, cv2.COLOR_HSV2BGR)
            values *= 255
        if contrast and not contrast_comes_first:
            values *= uniform(*self.contrast_range)
        if values is table:
            distorted = cv2.LUT(image, np.clip(np.round(table), 0, 255).astype(np.uint8))
        else:
            distorted = cv2.convertScaleAbs(values)  # rounded, and at most 255
        if uniform_int(0, 1):
            channels = list(cv2.split(distorted))
            for last in (2, 1):
                other = uniform_int(0, last)
                channels[last], channels[other] = channels[other], channels[last]
            distorted = cv2.merge(channels)
        return distorted


@TRANSFORMS.register_module()
class PhotoMetricDistortionMultiViewImage(PhotoMetricDistortion):
    """``PhotoMetricDistortion`` of the images of several cameras, a list of uint8 [H, W, 3].

    Source: the name and defaults are mmdet3d's.
    """

    def transform(self, results: dict) -> dict:
        results["img"] = [self.distorted(image) for image in results["img"]]
        return results
