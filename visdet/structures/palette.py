"""Colours that tell classes apart."""

import colorsys

__all__ = ["class_palette"]

_GOLDEN_RATIO = 0.618033988749895


def class_palette(num_classes: int) -> list[tuple[int, int, int]]:
    """Return ``num_classes`` RGB colours (0..255), each far in hue from the ones before it.

    The hue advances by the golden ratio, so any prefix of the list is spread over the colour wheel, and
    saturation and value alternate so that the neighbours that a long list must have still differ. The list
    depends on nothing else: class 3 has the same colour in every run.
    """
    colours = []
    for i in range(num_classes):
        hue = (0.02 + i * _GOLDEN_RATIO) % 1.0
        saturation = (0.85, 0.65, 0.95)[i % 3]
        value = (1.0, 0.9, 0.8)[(i // 3) % 3]
        red, green, blue = colorsys.hsv_to_rgb(hue, saturation, value)
        colours.append((round(red * 255), round(green * 255), round(blue * 255)))
    return colours
