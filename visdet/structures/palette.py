"""Colours that distinguish classes."""

import colorsys

_GOLDEN_RATIO = 0.618033988749895


def class_palette(num_classes: int) -> list[tuple[int, int, int]]:
    """Return ``num_classes`` RGB colours in 0..255, each with a hue far from those before it.

    The hue advances by the golden ratio, so that any prefix of the list is spread over the colour wheel. Saturation and
    value alternate, so that similar hues of a long list still differ. A class has the same colour in every run.
    """
    colours = []
    for i in range(num_classes):
        hue = (0.02 + i * _GOLDEN_RATIO) % 1.0
        saturation = (0.85, 0.65, 0.95)[i % 3]
        value = (1.0, 0.9, 0.8)[(i // 3) % 3]
        red, green, blue = colorsys.hsv_to_rgb(hue, saturation, value)
        colours.append((round(red * 255), round(green * 255), round(blue * 255)))
    return colours
