"""The arguments of transforms that change colours, for images of torchvision and of OpenCV."""

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
        brightness_delta: float = 32,
        contrast_range: tuple[float, float] = (0.5, 1.5),
        saturation_range: tuple[float, float] = (0.5, 1.5),
        hue_delta: float = 18,
    ) -> None:
        for name, pair in (("contrast_range", contrast_range), ("saturation_range", saturation_range)):
            if len(pair) != 2 or not 0 <= pair[0] <= pair[1]:
                raise InvalidInputError(
                    f"{type(self).__name__}: {name} must be 0 <= lowest <= highest, got {pair}"
                )
        if not 0 <= hue_delta <= 180 or brightness_delta < 0:
            raise InvalidInputError(
                f"{type(self).__name__}: brightness_delta must not be negative and hue_delta be in 0..180, "
                f"got {brightness_delta} and {hue_delta}"
            )
        self.brightness_delta = brightness_delta
        self.contrast_range = tuple(contrast_range)
        self.saturation_range = tuple(saturation_range)
        self.hue_delta = hue_delta
