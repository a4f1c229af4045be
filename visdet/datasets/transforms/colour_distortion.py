"""The arguments that transforms which change colours at random have in common."""

from typing import Annotated

from visdet.checks.arguments import AtLeast0, Range
from visdet.errors import InvalidInputError

from .base import BaseTransform


class ColourDistortion(BaseTransform):
    """A transform that changes brightness, contrast, saturation and hue at random.

    Args:
        brightness_delta: the largest change of the brightness, on the scale 0..255.
        contrast_range: the lowest and the highest factor of the contrast.
        saturation_range: the lowest and the highest factor of the saturation.
        hue_delta: the largest change of the hue, in degrees.

    Raises:
        ValueError: a range or a delta is not valid.
    """

    def __init__(
        self,
        brightness_delta: AtLeast0 = 32,
        contrast_range: tuple[float, float] = (0.5, 1.5),
        saturation_range: tuple[float, float] = (0.5, 1.5),
        hue_delta: Annotated[float, Range(0, 180)] = 18,
    ) -> None:
        for name, pair in (("contrast_range", contrast_range), ("saturation_range", saturation_range)):
            if not 0 <= pair[0] <= pair[1]:
                raise InvalidInputError(
                    f"{type(self).__name__}: {name} must be 0 <= lowest <= highest, got {pair}"
                )
        self.brightness_delta = brightness_delta
        self.contrast_range = tuple(contrast_range)
        self.saturation_range = tuple(saturation_range)
        self.hue_delta = hue_delta
