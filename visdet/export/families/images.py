"""Detectors of objects in single images: Deformable DETR, its variants and DINO."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.export import Dim
from torch.overrides import TorchFunctionMode

from visdet.execution.tensor_tree import map_tensors
from visdet.models.base_detector import image_sizes, scale_factors
from visdet.models.deformable_detr.base import PredictionBatch

from ..errors import ExportError
from ..precision import is_in_bfloat16
from .family import Family, Tensors, seeded

BOXES = "(x1, y1, x2, y2), or rotated (cx, cy, w, h, angle) with clockwise radians"
_LEAST, _MOST = 96, 4096  # pixels; a map of the coarsest level needs two rows and two columns
_HEIGHT = Dim("height", min=_LEAST, max=_MOST)
_WIDTH = Dim("width", min=_LEAST, max=_MOST)


class _LinearLayersInBfloat16(TorchFunctionMode):
    """Autocast for linear layers alone; ``torch.export`` of torch 2.14 fails on some regions of autocast."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func is not F.linear:
            return func(*args, **named)
        args_16, kwargs_16 = map_tensors(Tensor.bfloat16, (args, named))
        return func(*args_16, **kwargs_16).to(args[0].dtype)


class Images(Family):
    """The inputs are ``images`` [B, 3, H, W], normalised and padded, and ``image_sizes`` [B, 2], the (height, width) of
    each without its padding. The outputs are ``bboxes`` [B, K, 4 or 5], ``scores`` and ``labels`` [B, K].

    A model whose features are in bfloat16 multiplies in it in all linear layers. Their results have the type of what
    they are given, so that the rest is in float32.
    """

    input_names = ("images", "image_sizes")
    output_names = ("bboxes", "scores", "labels")
    rows = {"scores": ("bboxes", "scores", "labels")}
    about: ClassVar[dict[str, str]] = {
        "images": "float32 [B, 3, H, W]: see preprocessing; padding at the bottom and on the right is pad_value",
        "image_sizes": "int64 [B, 2]: (height, width) of each image without padding, in pixels",
        "bboxes": f"[B, K, 4 or 5]: {BOXES}, in pixels of the input; divide by the scale (x, y) that the image was "
        "resized by",
        "scores": "[B, K]: the best first",
        "labels": "[B, K]: indices of classes",
    }

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        model = self.model
        images, sizes = tensors
        limit = sizes.flip(-1).to(torch.float32).repeat(1, 2).unsqueeze(1)
        # Models are not trained with as much padding as a fixed size may need.
        alone = self.shape is not None and model.can_ignore_padding
        batch = PredictionBatch(images, sizes, limit, torch.ones_like(limit), alone)
        with _LinearLayersInBfloat16() if is_in_bfloat16(model) else nullcontext():
            found = model.detections(batch)
        return tuple(found[name] for name in self.output_names)

    def dynamic(self) -> dict[str, dict[int, Dim]]:
        axes = super().dynamic()
        return axes if self.shape else axes | {"images": {**axes.get("images", {}), 2: _HEIGHT, 3: _WIDTH}}

    def cases(self) -> Iterator[list[Tensors]]:
        generator = seeded()
        shapes = [self.shape] * 3 if self.shape else [(128, 160), (160, 131), (96, 224)]
        for batch, (height, width) in zip((2, 1, 3), shapes, strict=True):
            batch = self.batch or batch
            images = torch.randn(batch, 3, height, width, generator=generator)
            sizes = torch.tensor([[height, width], [height - 17, width], [height, width - 30]])[
                torch.arange(batch) % 3
            ]
            for image, (bottom, right) in zip(images, sizes.tolist(), strict=True):
                image[:, bottom:] = 0
                image[:, :, right:] = 0
            yield [{"images": images.to(self.device), "image_sizes": sizes.to(self.device)}]

    def inputs_of(self, inputs: Tensor, data_samples: Sequence[Any]) -> Tensors:
        sizes = torch.tensor(image_sizes(inputs, data_samples), device=inputs.device)
        rows, columns = inputs.shape[-2:]
        height, width = self.shape or (max(rows, _LEAST), max(columns, _LEAST))
        if rows > height or columns > width or max(height, width) > _MOST:
            raise ExportError(
                f"images of {rows} x {columns} pixels (height x width) are outside the exported "
                f"range, up to {self.shape or (_MOST, _MOST)}: give a larger --shape, or --dynamic"
            )
        images = F.pad(inputs, (0, width - columns, 0, height - rows))
        return {"images": images, "image_sizes": sizes}

    def samples_of(self, outputs: Tensors, data_samples: Sequence[Any]) -> list[Any]:
        scale = outputs["bboxes"].new_tensor(scale_factors(data_samples)).repeat(1, 2).unsqueeze(1)
        boxes = self.model.box_coder.divided(outputs["bboxes"], scale)
        return self.model.with_detections({**outputs, "bboxes": boxes}, data_samples)
