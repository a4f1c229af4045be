"""Drawing of the synthetic shapes data set, which is stored in COCO format. It needs no torch."""

import colorsys
import json
import math
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from visdet.checks.arguments import Positive, Range, Seed, checked
from visdet.structures.polylines import polygon_area
from visdet.structures.poses import directions_of, turn_about_z

from .drawn_folder import draw_each, draw_once

SHAPE_CLASSES = ("circle", "square", "triangle", "star", "cross", "ring")
# The outlines are the same ones, stretched, since the box of a circle or a square would have no angle of its own.
ROTATED_SHAPE_CLASSES = ("ellipse", "rectangle", *SHAPE_CLASSES[2:])

_SUPERSAMPLING = 4
_MIN_VISIBLE = 0.25
_LEAST_RADIUS = 6.0  # pixels
_LEAST_ROTATED_RADIUS = 9.0
# The logarithms of the stretches. The box of a rotated shape is at least 1.5 times as long as it is wide.
_STRETCHES = (-0.15, 0.15)
_ROTATED_STRETCHES = (0.3, 0.6)


class Shape(NamedTuple):
    """A shape of an image.

    Attributes:
        label: its class. num_pixels: the number of its visible pixels.
        bbox: the box (x1, y1, x2, y2) around them or, of rotated shapes, around its corners.
        corners: the four corners (x, y) of its turned box, whether they are visible or not.
    """

    label: int
    bbox: tuple[float, float, float, float]
    num_pixels: int
    corners: list[list[float]]


def draw_shapes(rng: np.random.Generator, size: int, rotated: bool = False) -> tuple[np.ndarray, list[Shape]]:
    """Return an RGB image, uint8 [size, size, 3], and the shapes in it that are at least a quarter visible.

    One to six shapes are painted one over another. Their radius is log-uniform between 6 pixels (9, if rotated) and
    0.28 * size, and their proportions, rotation, colour and texture are random. Classes differ in their outlines only.
    The image depends on ``rng``, ``size`` and ``rotated`` alone. Rotated shapes are stretched, so that each of them has
    a length and a width, and they have the turned boxes of their whole outlines.
    """
    canvas = _background(rng, size)
    owner = np.full((size, size), -1, dtype=np.int16)
    painted = [_paint(rng, canvas, owner, index, rotated) for index in range(rng.integers(1, 7))]
    objects = []
    for index, (label, full_area, corners) in enumerate(painted):
        pixels = np.argwhere(owner == index)[:, ::-1]  # (x, y)
        number = len(pixels)
        if number < _MIN_VISIBLE * full_area:
            continue
        points = corners if rotated else np.concatenate([pixels, pixels + 1])
        bbox = (*points.min(axis=0).tolist(), *points.max(axis=0).tolist())
        objects.append(Shape(label, bbox, number, corners.tolist()))
    canvas += rng.normal(0.0, 3.0, canvas.shape)
    return canvas.clip(0, 255).round().astype(np.uint8), objects


def _background(rng: np.random.Generator, size: int) -> np.ndarray:
    """Return clouds, float32 [size, size, 3], which are two muted colours mixed by noise of four octaves."""
    clouds = np.zeros((size, size), dtype=np.float32)
    for octave in range(4):
        cells = 3 * 2**octave
        grid = Image.fromarray(rng.random((cells, cells), dtype=np.float32))
        clouds += np.asarray(grid.resize((size, size), Image.Resampling.BICUBIC)) / 2**octave
    clouds = (clouds - clouds.min()) / np.ptp(clouds)
    low, high = (_colour(rng, saturation=(0.05, 0.5), value=(0.15, 0.8)) for _ in range(2))
    return low + clouds[..., None] * (high - low)


def _paint(
    rng: np.random.Generator, canvas: np.ndarray, owner: np.ndarray, index: int, rotated: bool
) -> tuple[int, float, np.ndarray]:
    """Paint a random shape onto ``canvas`` and mark the pixels that it covers in ``owner``.

    Returns:
        the label, the area of the whole shape, and the corners [4, 2] of its turned box.
    """
    uniform = rng.uniform
    size = len(canvas)
    label = int(rng.integers(len(SHAPE_CLASSES)))
    least = _LEAST_ROTATED_RADIUS if rotated else _LEAST_RADIUS
    radius = least * (0.28 * size / least) ** rng.random()
    stretch = math.exp(uniform(*(_ROTATED_STRETCHES if rotated else _STRETCHES)))
    turn = uniform(0, 2 * math.pi)
    inset = 0.75 * radius
    center = uniform(inset, size - inset, 2)

    to_image = turn_about_z(turn) @ np.diag([stretch, 1 / stretch]) * radius
    of_radius_1 = _OUTLINES[SHAPE_CLASSES[label]]
    outer, *holes = outlines = [outline @ to_image.T + center for outline in of_radius_1]
    whole = of_radius_1[0]
    left, top = whole.min(axis=0)
    right, bottom = whole.max(axis=0)
    corners = np.array([(left, top), (right, top), (right, bottom), (left, bottom)]) @ to_image.T + center
    area = polygon_area(outer) - sum(map(polygon_area, holes))

    margin = 3 + int(0.3 * radius)  # room for the shadow
    left, top = np.maximum(np.floor(outer.min(axis=0)).astype(int) - margin, 0)
    right, bottom = np.minimum(np.ceil(outer.max(axis=0)).astype(int) + margin, size)
    patch = canvas[top:bottom, left:right]
    coverage = _coverage([outline - (left, top) for outline in outlines], right - left, bottom - top)

    blurred = coverage.filter(ImageFilter.GaussianBlur(1 + 0.08 * radius))
    shift = 1 + 0.06 * radius
    moved = blurred.transform(blurred.size, Image.Transform.AFFINE, (1, 0, -shift, 0, 1, -shift))
    patch *= 1 - 0.45 * np.asarray(moved, dtype=np.float32)[..., None] / 255
    alpha = np.asarray(coverage, dtype=np.float32)[..., None] / 255

    ys, xs = np.mgrid[top:bottom, left:right] + 0.5
    local = (np.stack([xs, ys], axis=-1) - center) @ np.linalg.inv(to_image).T
    surface = _surface(rng, local, around=patch.mean(axis=(0, 1)))
    patch += alpha * (surface - patch)
    owned = owner[top:bottom, left:right]
    # A fringe along the edge has no owner, because it would widen the boxes of hidden shapes.
    share = alpha[..., 0]
    owned[share > 0.1] = -1
    owned[share > 0.5] = index
    return label, area, corners


def _regular_polygon(num_points: int, radius: float = 1.0, phase: float = 0.0) -> np.ndarray:
    angles = phase + np.arange(num_points) * (2 * math.pi / num_points)
    return radius * directions_of(angles)


# The polygons [n, 2] of each shape of radius about 1. The outline comes first, then the holes.
_QUARTER_TURN = np.array([(0.0, -1.0), (1.0, 0.0)])
_QUARTER = np.array([(0.34, 0.34), (0.34, 1.0), (-0.34, 1.0)])  # of the cross
_OUTLINES = {
    "circle": [_regular_polygon(64)],
    "square": [_regular_polygon(4, 1.15, phase=math.pi / 4)],
    "triangle": [_regular_polygon(3, 1.2)],
    "star": [_regular_polygon(10, 1.15) * np.tile([1.0, 0.45], 5)[:, None]],
    "cross": [np.concatenate([_QUARTER @ np.linalg.matrix_power(_QUARTER_TURN, k).T for k in range(4)])],
    "ring": [_regular_polygon(64), _regular_polygon(64, 0.55)],
}


def _coverage(outlines: list[np.ndarray], width: int, height: int) -> Image.Image:
    """Return the part of each pixel that the shape covers, in 0..255."""
    fine = Image.new("L", (width * _SUPERSAMPLING, height * _SUPERSAMPLING), 0)
    draw = ImageDraw.Draw(fine)
    for fill, outline in zip((255, 0), outlines, strict=False):
        # In Pillow, pixel centres are at whole numbers. In the outlines, they are at halves.
        draw.polygon(list(map(tuple, outline * _SUPERSAMPLING - 0.5)), fill=fill)
    return fine.reduce(_SUPERSAMPLING)


def _surface(rng: np.random.Generator, local: np.ndarray, around: np.ndarray) -> np.ndarray:
    """Return colours, float32 [h, w, 3], at the coordinates ``local`` [h, w, 2] of a shape of radius 1."""
    uniform = rng.uniform
    colour = _colour(rng, saturation=(0.4, 1.0), value=(0.5, 1.0))
    for _ in range(8):
        if np.abs(colour - around).max() > 110:
            break
        colour = _colour(rng, saturation=(0.4, 1.0), value=(0.3, 1.0))
    is_darker = rng.random() < 0.5
    second = colour * uniform(0.7, 0.9) if is_darker else colour + uniform(0.1, 0.35) * (255 - colour)
    u, v = np.moveaxis(local, -1, 0)
    frequency = uniform(5.0, 10.0)
    kind = rng.integers(5)
    pattern = _pattern(kind, u, v, frequency)
    mix = 1 / (1 + np.exp(-4.0 * pattern)) if kind else pattern
    light = 1.05 - 0.15 * np.hypot(u - 0.3, v - 0.3)
    return ((colour + mix[..., None] * (second - colour)) * light[..., None]).astype(np.float32)


def _pattern(kind: np.integer, u: np.ndarray, v: np.ndarray, frequency: float) -> np.ndarray:
    """Return the values of a plain, striped, chequered, dotted or shaded pattern at places (u, v) of a shape."""
    match kind:
        case 0:
            return np.zeros_like(u)
        case 1:
            return np.sin(frequency * u)
        case 2:
            lower = 0.7 * frequency
            return 2.0 * np.sin(lower * u) * np.sin(lower * v)
        case 3:
            return 4.0 * np.cos(frequency * u) * np.cos(frequency * v) - 1.5
    return 0.3 * (u + v)


def _colour(rng: np.random.Generator, saturation: tuple, value: tuple) -> np.ndarray:
    rgb = colorsys.hsv_to_rgb(rng.random(), rng.uniform(*saturation), rng.uniform(*value))
    return 255 * np.array(rgb, dtype=np.float32)


_GENERATOR_VERSION = 1
_STAMP = "shapes.json"
_SPLITS = ("train", "val")


@checked
def make_shapes(
    folder: str | Path,
    num_train: Positive = 4000,
    num_val: Positive = 400,
    image_size: Annotated[int, Range(32)] = 128,
    seed: Seed = 0,
    num_workers: int | None = None,
    rotated: bool = False,
) -> Path:
    """Write the shapes data set into ``folder``, unless it is there already, and return the folder.

    It holds ``train/*.jpg``, ``val/*.jpg``, ``annotations/instances_{train,val}.json`` and the stamp ``shapes.json``
    with the generator's version and the arguments. Image i of a split is drawn from
    ``numpy.random.default_rng([seed, split, i])``, so that the files do not depend on ``num_workers``.

    The folder appears only when it is complete, because everything is written beside it and renamed. Processes that
    start at the same time wait for the first one. A folder with another stamp is replaced. A folder without a stamp is
    replaced only if it is empty.

    Args:
        folder: the folder to write.
        num_train: number of images in the train split.
        num_val: number of images in the val split.
        image_size: height and width of an image in pixels.
        seed: seed of the random numbers.
        num_workers: number of processes that draw. The default is one per core.
        rotated: draw ROTATED_SHAPE_CLASSES, whose annotations have a ``segmentation`` of the four corners of the turned
            box.

    Raises:
        FileExistsError: the folder is not empty and was not written by this function.
        ValueError: a number is not positive.
        RuntimeError: a drawing process was killed.
    """
    stamp = {
        "generator_version": _GENERATOR_VERSION,
        "num_train": num_train,
        "num_val": num_val,
        "image_size": image_size,
        "seed": seed,
    }
    if rotated:
        stamp["rotated"] = True
    return draw_once(
        folder,
        _STAMP,
        stamp,
        maker="make_shapes",
        what=f"{num_train + num_val} shapes images",
        draw=_write,
        num_workers=num_workers,
    )


def _write(folder: Path, stamp: dict, num_workers: int | None) -> None:
    annotations = folder / "annotations"
    annotations.mkdir()
    for split_number, split in enumerate(_SPLITS):
        images = folder / split
        images.mkdir()
        tasks = [(images, split_number, index, stamp) for index in range(stamp[f"num_{split}"])]
        objects_of_images = draw_each(_write_image, tasks, num_workers)
        content = _coco(split, objects_of_images, stamp)
        (annotations / f"instances_{split}.json").write_text(json.dumps(content))


def _write_image(folder: Path, split_number: int, index: int, stamp: dict) -> list[Shape]:
    """Write an image and return its shapes."""
    rng = np.random.default_rng([stamp["seed"], split_number, index])
    pixels, objects = draw_shapes(rng, stamp["image_size"], "rotated" in stamp)
    Image.fromarray(pixels).save(folder / f"{index:06d}.jpg", quality=92, subsampling=0)
    return objects


def _coco(split: str, objects_of_images: list[list[Shape]], stamp: dict) -> dict:
    """Return the content of the COCO file of a split."""
    image_size = stamp["image_size"]
    rotated = "rotated" in stamp
    classes = ROTATED_SHAPE_CLASSES if rotated else SHAPE_CLASSES
    images: list[dict] = []
    annotations: list[dict] = []
    for index, objects in enumerate(objects_of_images):
        image_id = index + 1
        images.append(
            {"id": image_id, "file_name": f"{index:06d}.jpg", "height": image_size, "width": image_size}
        )
        for label, (x1, y1, x2, y2), area, corners in objects:
            annotation = {
                "id": len(annotations) + 1,
                "image_id": image_id,
                "category_id": label + 1,
                "bbox": [x1, y1, x2 - x1, y2 - y1],
                "area": area,
                "iscrowd": 0,
            }
            if rotated:
                annotation["segmentation"] = [[round(side, 3) for corner in corners for side in corner]]
            annotations.append(annotation)
    return {
        "info": {"description": f"visdet shapes, {split}", "version": str(_GENERATOR_VERSION)},
        "categories": [{"id": label + 1, "name": name} for label, name in enumerate(classes)],
        "images": images,
        "annotations": annotations,
    }
