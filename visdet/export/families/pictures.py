"""Detectors with the steps before them: the graph takes a picture as it is decoded."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.export import Dim

from visdet.engine.inference.sample_images import rgb_of_file
from visdet.registry import TRANSFORMS

from ..errors import ExportError
from .family import Family, Tensors, seeded
from .images import BOXES, Images

_HEIGHT = Dim("picture_height", min=2, max=16384)
_WIDTH = Dim("picture_width", min=2, max=16384)
_WITHOUT = "With --no-embed, the graph takes tensors that are resized and normalised before"
_STEPS = ("LoadImageFromFile", "Resize", "LoadAnnotations", "PackDetInputs")


@dataclass(frozen=True)
class Steps:
    """The steps of a test pipeline that become part of a graph.

    Attributes:
        resize: the transform ``Resize``, or None if pictures are not resized.
        reverses_channels: whether the pipeline turns RGB to BGR.
    """

    resize: Any
    reverses_channels: bool

    @classmethod
    def of(cls, pipeline: Sequence[Mapping[str, Any]]) -> "Steps":
        """Return the steps of a pipeline, or raise an ExportError that names what cannot be in a graph."""
        found: dict[str, dict[str, Any]] = {}
        for step in pipeline:
            name = str(step["type"]).rpartition(".")[2]
            if name not in _STEPS or name in found:
                raise ExportError(f"the graph cannot have the transform {name} of the pipeline. {_WITHOUT}")
            found[name] = dict(step)
        load = found.get("LoadImageFromFile", {})
        if load.get("color_type", "color") != "color":
            raise ExportError(f"the pipeline must turn pictures as their EXIF data say. {_WITHOUT}")
        resize = TRANSFORMS.build(found["Resize"]) if "Resize" in found else None
        if resize is not None and (resize.scale is None or resize.backend != "cv2"):
            raise ExportError(
                f"the Resize of the pipeline must have a scale, and no antialiasing, to be in the graph. {_WITHOUT}"
            )
        return cls(resize, load.get("channel_order", "bgr") == "bgr")

    def limits_sizes(self) -> bool:
        """Return whether a resized picture has a largest size."""
        return self.resize is not None and math.isfinite(max(self.resize.scale))

    def canvas(self) -> tuple[int, int]:
        """Return the (height, width) that holds every resized picture."""
        if not self.limits_sizes():
            raise ExportError(
                f"the pipeline does not limit the size of pictures. Give it, --shape H W. {_WITHOUT}"
            )
        width, height = self.resize.scale
        longest = max(width, height)
        return (longest, longest) if self.resize.keep_ratio else (height, width)


class Pictures(Family):
    """The input is ``picture`` [H, W, 3] of any size, and the outputs are those of :class:`Images` in its pixels.

    Args:
        model: the detector. shape: the (height, width) that a resized picture must fit into. steps: those before it.
    """

    shape: tuple[int, int]
    input_names = ("picture",)
    output_names = Images.output_names
    rows = Images.rows
    about: ClassVar[dict[str, str]] = {
        "picture": "uint8 [H, W, 3]: RGB, turned as its EXIF data say",
        "bboxes": f"[1, K, 4 or 5]: {BOXES}, in pixels of the picture",
        "scores": "[1, K]: the best first",
        "labels": "[1, K]: indices of classes",
    }

    def __init__(self, model: Any, shape: tuple[int, int] | None, steps: Steps) -> None:
        super().__init__(model, shape or steps.canvas(), 1)
        self.steps = steps
        self.images = Images(model, self.shape, 1)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        (picture,) = tensors
        height, width = picture.shape[:2]
        numbers = [torch.full((), side, dtype=torch.int64) for side in (height, width)]
        sides = torch.stack(numbers).to(picture.device)
        size = self._resized(sides)
        image = self._image(picture, sides, size)
        bboxes, scores, labels = self.images(image, size.unsqueeze(0))
        scale = (size / sides).flip(0).repeat(2)
        return self.model.box_coder.divided(bboxes, scale), scores, labels

    def _resized(self, sides: Tensor) -> Tensor:
        """Return the (height, width) of a resized picture of the size ``sides``, int64 [2]."""
        rows, columns = sides.unbind()
        limits = [(1, torch.ones_like(rows))]
        resize = self.steps.resize
        if resize is not None:
            width, height = resize.scale
            if not resize.keep_ratio:
                return torch.tensor([height, width], device=sides.device)
            limits = [(max(width, height), sides.amax(0)), (min(width, height), sides.amin(0))]
        # The factor is the least quotient of a limit and a side. In integers, it is the same on every machine.
        most_rows, most_columns = self.shape
        numerator = torch.full_like(rows, most_rows)
        denominator = rows
        for limit, side in [(most_columns, columns), *limits]:
            if math.isfinite(limit):
                most = int(limit)
                is_less = most * denominator < numerator * side
                numerator = torch.where(is_less, most, numerator)
                denominator = torch.where(is_less, side, denominator)
        return ((2 * sides * numerator + denominator) // (2 * denominator)).clamp(min=1)

    def _image(self, picture: Tensor, sides: Tensor, size: Tensor) -> Tensor:
        """Return the picture resized, normalised and padded, [1, 3, H, W]."""
        pixels = picture.permute(2, 0, 1).unsqueeze(0).float()
        if self.steps.reverses_channels:
            pixels = pixels.flip(1)
        rows, columns = (torch.arange(length, device=picture.device) for length in self.shape)
        # The pipeline's kernel, too, goes along the rows first and rounds in between.
        across = resampled(pixels, 3, columns, sides[1], size[1])
        resized = resampled(across, 2, rows, sides[0], size[0])
        preprocessor = self.model.data_preprocessor
        normalised = preprocessor({"inputs": resized, "data_samples": None})["inputs"]
        is_inside = (rows < size[0]).unsqueeze(1) & (columns < size[1])
        return torch.where(is_inside, normalised, float(preprocessor.pad_value))

    def dynamic(self) -> dict[str, dict[int, Dim]]:
        return {"picture": {0: _HEIGHT, 1: _WIDTH}}

    def cases(self) -> Iterator[list[Tensors]]:
        generator = seeded()
        for height, width in ((97, 131), (240, 180), (64, 300)):
            picture = torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8)
            yield [{"picture": picture.to(self.device)}]

    def inputs_of(self, inputs: Tensor, data_samples: Sequence[Any]) -> Tensors:
        """Return the picture of a batch of one, which is read from its file."""
        picture = torch.from_numpy(rgb_of_file(data_samples[0].img_path))
        return {"picture": picture.to(self.device)}

    def samples_of(self, outputs: Tensors, data_samples: Sequence[Any]) -> list[Any]:
        return self.model.with_detections(outputs, data_samples)


def resampled(pixels: Tensor, axis: int, index: Tensor, side: Tensor, size: Tensor) -> Tensor:
    """Return pixels interpolated along an axis of ``side`` pixels, at the places of ``index`` among ``size`` pixels.

    Places are counted in parts of 1 / (2 * size) pixels, which is exact. Weights and results are rounded as those of
    the pipeline's kernel: to 14 bits if a weight is 1, to 15 bits otherwise, and to integers.
    """
    part = 2 * size
    place = ((2 * index + 1) * side - size).clamp(min=0)
    lower = torch.minimum(place // part, side - 1)
    upper = torch.minimum(lower + 1, side - 1)
    share = ((place - lower * part) / part).clamp(max=1)
    largest = torch.where(index < size, torch.maximum(share, 1 - share), 0.5).amax(0)
    unit = torch.where(largest < 1 - 2.0**-16, 2.0**15, 2.0**14)
    weights = (
        ((weight * unit + 0.5).floor() / unit).view(-1, *[1] * (3 - axis)) for weight in (1 - share, share)
    )
    values = [
        pixels.index_select(axis, pixel) * weight
        for pixel, weight in zip((lower, upper), weights, strict=True)
    ]
    return (values[0] + values[1] + 0.5).floor()
