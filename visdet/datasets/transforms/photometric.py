"""Transforms that change colours but not the geometry."""

import torch
from torchvision.transforms.v2 import functional as F

from visdet.registry import TRANSFORMS

from .base import uniform
from .colour_distortion import ColourDistortion
from .tv_results import set_image


@TRANSFORMS.register_module()
class PhotoMetricDistortion(ColourDistortion):
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

    Source: SSD's augmentation, with mmdet's names and defaults. Differences: values are clipped to 0..255 after each
    step, and the dtype is kept, whereas mmdet continues with unbounded float32.
    """

    keeps_size = True

    def transform(self, results: dict) -> dict:
        dtype = results["img"].dtype
        image = results["img"].as_subclass(torch.Tensor).float() / 255
        contrast_comes_first = _coin()
        if _coin():
            image = (image + uniform(-self.brightness_delta, self.brightness_delta) / 255).clamp(0, 1)
        contrast = uniform(*self.contrast_range) if _coin() else 1.0
        if contrast_comes_first:
            image = (image * contrast).clamp(0, 1)
        if _coin():
            image = _scale_saturation(image, uniform(*self.saturation_range))
        if _coin():
            # In a BGR image the hue changes in the opposite direction. Both directions are equally likely, so that the
            # order of the channels does not matter.
            image = F.adjust_hue(image, uniform(-self.hue_delta, self.hue_delta) / 360)
        if not contrast_comes_first:
            image = (image * contrast).clamp(0, 1)
        if _coin():
            image = image[torch.randperm(3)]
        image = image * 255
        set_image(results, image.round().to(dtype) if not dtype.is_floating_point else image)
        return results


def _coin() -> bool:
    return uniform(0, 1) < 0.5


def _scale_saturation(image: torch.Tensor, factor: float) -> torch.Tensor:
    """Return ``image`` [3, H, W] with its HSV saturation times ``factor``, but at most 1. Hue and value stay."""
    value = image.amax(dim=0)
    chroma = value - image.amin(dim=0)
    most = value / chroma.clamp(min=1e-6)
    return value - (value - image) * most.clamp(max=factor)
