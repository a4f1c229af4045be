"""Drawing of boxes and labels on RGB arrays, and arranging of pictures on sheets."""

import functools
import os
from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from visdet.files.writing import written_whole
from visdet.structures.fonts import legible

_BACKGROUND = (24, 26, 30)
_CAPTION_COLOUR = (225, 228, 232)
_BLACK = (0, 0, 0)
# A place outside of every picture, in pixels. Pillow draws no numbers that are infinite or do not fit a C int.
_FAR = 1e6


def as_bytes(image: np.ndarray) -> np.ndarray:
    """Return an image of any numbers from 0 to 255 as contiguous uint8."""
    return image.clip(0, 255).astype(np.uint8, order="C")


def enlarge(image: np.ndarray, min_side: int = 480) -> tuple[np.ndarray, int]:
    """Return the image [H, W, 3] enlarged by a whole factor, so that a small one is easy to look at, and the factor.

    The factor is the least one that makes the longer side at least ``min_side`` pixels, but at most 8.
    """
    height, width = image.shape[:2]
    factor = min(max(1, -(-min_side // max(height, width))), 8)
    if factor == 1:
        return image, 1
    size = (width * factor, height * factor)
    return np.asarray(Image.fromarray(image).resize(size, Image.Resampling.BICUBIC)), factor


def draw_boxes(
    image: np.ndarray,
    boxes: np.ndarray,
    texts: Sequence[str],
    colours: Sequence[tuple[int, int, int]],
    line_width: int | None = None,
) -> np.ndarray:
    """Return a copy of the image with boxes and their labels drawn.

    Larger boxes are drawn first and all labels last, so that nothing small is hidden. A label is at a free corner of
    its box, within the image.

    Args:
        image: RGB, uint8 [H, W, 3].
        boxes: [N, 4] (x1, y1, x2, y2), or [N, 4, 2], the corners (x, y) of turned boxes, in pixels of ``image``. A box
            with a NaN is left out.
        texts: N labels. An empty label is not drawn.
        colours: N RGB colours.
        line_width: the width of lines in pixels. By default it grows with the image.
    """
    canvas = Image.fromarray(image).convert("RGB")
    draw = ImageDraw.Draw(canvas)
    scale = (max(canvas.size) / 512) ** 0.5
    line_width = line_width or max(2, round(3 * scale))
    size = max(11, round(14 * scale))
    rim = line_width + 2
    outlines = boxes = boxes.clip(-_FAR, _FAR)
    is_turned = boxes.ndim == 3
    if is_turned:
        boxes = np.concatenate([boxes.min(axis=1), boxes.max(axis=1)], axis=1)
    lefts, tops, rights, bottoms = boxes.T
    areas = (rights - lefts) * (bottoms - tops)
    order = [i for i in np.argsort(-areas, kind="stable") if not np.isnan(areas[i])]
    # A dark line around the coloured one keeps it visible on any background.
    for i in order:
        colour = tuple(colours[i])
        if is_turned:
            corners = outlines[i].flatten().tolist()
            around = corners + corners[:4]  # to the second one, so that all joints are round
            draw.line(around, _BLACK, rim, joint="curve")
            draw.line(around, colour, line_width, joint="curve")
            continue
        x1, y1, x2, y2 = map(round, boxes[i].tolist())
        x2 = max(x2 - 1, x1)  # Pillow paints the last row and column, too.
        y2 = max(y2 - 1, y1)
        draw.rectangle((x1 - 1, y1 - 1, x2 + 1, y2 + 1), outline=_BLACK, width=rim)
        draw.rectangle((x1, y1, x2, y2), outline=colour, width=line_width)
    taken: list[tuple[int, int, int, int]] = []
    for i in order:
        label = texts[i]
        if label:
            text, font = _text_and_font(label, size)
            taken.append(_draw_label(draw, canvas.size, boxes[i], text, tuple(colours[i]), font, taken))
    return np.asarray(canvas)


def _draw_label(
    draw: ImageDraw.ImageDraw,
    canvas_size: tuple[int, int],
    box: np.ndarray,
    text: str,
    colour: tuple[int, int, int],
    font: ImageFont.FreeTypeFont,
    taken: Sequence[tuple[int, int, int, int]],
) -> tuple[int, int, int, int]:
    """Draw a label at the first free corner of its box and return the rectangle that it covers."""
    ascent, descent = font.getmetrics()
    pad = max(2, ascent // 5)
    width = round(draw.textlength(text, font=font)) + 2 * pad
    height = ascent + descent + pad // 2
    x1, y1, x2, y2 = map(round, box.tolist())
    places = []
    for x, y in ((x1 - 1, y1 - height), (x1, y1), (x2 - width, y1 - height), (x1 - 1, y2), (x1, y2 - height)):
        inside_x = min(max(x, 0), max(canvas_size[0] - width, 0))
        inside_y = min(max(y, 0), max(canvas_size[1] - height, 0))
        places.append((abs(inside_y - y), (inside_x, inside_y, inside_x + width, inside_y + height)))
    free = (place for moved, place in places if not (moved or _meets_any(place, taken)))
    left, top, right, bottom = place = next(free, min(places)[1])
    draw.rectangle((left, top, right - 1, bottom - 1), fill=colour)
    red, green, blue = colour
    luminance = 0.299 * red + 0.587 * green + 0.114 * blue
    text_colour = _BLACK if luminance > 140 else (255, 255, 255)
    draw.text((left + pad, top + pad // 4), text, fill=text_colour, font=font)
    return place


def _meets_any(a: tuple[int, int, int, int], others: Iterable[tuple[int, int, int, int]]) -> bool:
    """Return whether a rectangle (x1, y1, x2, y2) overlaps one of others."""
    left, top, right, bottom = a
    return any(left < x2 and x1 < right and top < y2 and y1 < bottom for x1, y1, x2, y2 in others)


def dark(height: int, width: int) -> np.ndarray:
    """Return a picture of the colour of the background, RGB uint8 [H, W, 3]."""
    return np.full((height, width, 3), _BACKGROUND, np.uint8)


def side_by_side(images: Sequence[np.ndarray], captions: Sequence[str] | None = None) -> np.ndarray:
    """Return images of equal height next to each other, with captions above them if they are given."""
    return contact_sheet([images], captions, gap=max(4, len(images[0]) // 64))


def contact_sheet(
    rows: Sequence[Sequence[np.ndarray]], captions: Sequence[str] | None = None, gap: int = 8
) -> np.ndarray:
    """Return one picture with rows of RGB images. Each cell is as large as the largest image.

    Args:
        rows: rows of images, uint8 [H, W, 3]. They may differ in length.
        captions: the text above each column.
        gap: the number of pixels between images.

    Raises:
        ValueError: there is no image.
    """
    images = list(chain.from_iterable(rows))
    if not images:
        raise ValueError("contact_sheet: rows must hold at least one image")
    cell_h, cell_w = np.max([image.shape[:2] for image in images], axis=0).tolist()
    size = max(13, round(cell_h / 30))
    top = 2 * size + gap if captions else 0
    step_x = cell_w + gap
    step_y = cell_h + gap
    width = max(map(len, rows)) * step_x + gap
    height = top + len(rows) * step_y + gap
    sheet = dark(height, width)

    def left_of(column: int, own_width: int) -> int:
        return gap + column * step_x + (cell_w - own_width) // 2

    for column, caption in enumerate(captions or ()):
        place = (left_of(column, text_width(caption, size)), gap + round(1.5 * size))
        write_text(sheet, caption, place, size, _CAPTION_COLOUR)
    for r, row in enumerate(rows):
        for c, image in enumerate(row):
            h, w = image.shape[:2]
            left = left_of(c, w)
            upper = top + gap + r * step_y + (cell_h - h) // 2
            sheet[upper : upper + h, left : left + w] = image
    return sheet


def write_text(
    canvas: np.ndarray,
    text: str,
    place: tuple[int, int],
    size: int = 13,
    colour: tuple[int, int, int] = (230, 230, 230),
) -> None:
    """Write a text with a dark rim into an RGB image, uint8 [H, W, 3].

    Args:
        canvas: the image, which is changed.
        text: the text, in any script.
        place: the left end of the base line, (x, y) in pixels.
        size: the size of the font in pixels.
        colour: the RGB colour.
    """
    if not text:
        return
    text, font = _text_and_font(text, size)
    image = Image.fromarray(canvas)
    ImageDraw.Draw(image).text(place, text, colour, font, anchor="ls", stroke_width=1, stroke_fill=_BLACK)
    canvas[:] = np.asarray(image)


def write_picture(path: str | os.PathLike, picture: np.ndarray) -> None:
    """Write an RGB picture, uint8 [H, W, 3], to a file whose suffix says its format."""
    with written_whole(path, reaches_disk=False) as partial:
        image = Image.fromarray(picture)
        image.save(partial, compress_level=1)  # of PNG: a third of the time, a sixth more bytes


def text_width(text: str, size: int) -> int:
    """Return the width in pixels of a text of :func:`write_text`."""
    text, font = _text_and_font(text, size)
    return round(font.getlength(text))


def _text_and_font(text: str, size: int) -> tuple[str, ImageFont.FreeTypeFont]:
    """Return a text as it can be drawn, and a font of ``size`` pixels that has its characters."""
    [shown], file = legible(text)
    return shown, _font(file, size)


@functools.lru_cache(maxsize=32)
def _font(file: str, size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(file, size)
