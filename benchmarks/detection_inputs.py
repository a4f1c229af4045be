"""Inputs of the detection operators with mmdet's usual sizes."""

from typing import Any

import torch
from torch import Tensor

from .case import seeded


def _boxes(N: int, generator: torch.Generator, height: int = 800, width: int = 1216) -> Tensor:
    """Return N boxes (x1, y1, x2, y2) of 16 to 400 pixels in an image."""
    corner = torch.rand(N, 2, generator=generator) * torch.tensor([width - 16.0, height - 16.0])
    extent = 16 * 25 ** torch.rand(N, 2, generator=generator)
    return torch.cat([corner, corner + extent], 1)


def _regions(N: int, B: int, generator: torch.Generator) -> Tensor:
    images = torch.randint(0, B, (N, 1), generator=generator)
    return torch.cat([images.float(), _boxes(N, generator)], 1)


def random(dtype: torch.dtype, device: torch.device, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = seeded()
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def scored(dtype: torch.dtype, device: torch.device, *, N: int, classes: int) -> tuple[Any, ...]:
    generator = seeded()
    boxes = _boxes(N, generator).repeat(classes, 1)
    boxes = boxes + torch.rand(boxes.shape, generator=generator) * 4
    scores = torch.rand(N * classes, generator=generator)
    idxs = torch.arange(classes).repeat_interleave(N)
    return boxes.to(device, dtype), scores.to(device, dtype), idxs.to(device)


def rotated(dtype: torch.dtype, device: torch.device, *, N: int, M: int = 0) -> tuple[Any, ...]:
    """Return N rotated boxes of 16 to 400 pixels, and their scores or M more."""
    generator = seeded()
    corners = _boxes(N + M, generator)
    center, sides = (corners[:, :2] + corners[:, 2:]) / 2, corners[:, 2:] - corners[:, :2]
    angle = torch.rand(N + M, 1, generator=generator) * 3.14159
    boxes = torch.cat([center, sides, angle], 1).to(device, dtype)
    return (boxes[:N], boxes[N:] if M else torch.rand(N, generator=generator).to(device, dtype))


def pooled(dtype: torch.dtype, device: torch.device, *, N: int, shape: tuple[int, ...]) -> tuple[Any, ...]:
    return *random(dtype, device, shape), _regions(N, shape[0], seeded()).to(device)


def convolved(
    dtype: torch.dtype, device: torch.device, *, shape: tuple[int, ...], modulated: bool
) -> tuple[Any, ...]:
    B, C, H, W = shape
    x, offset, weight = random(dtype, device, shape, (B, 18, H, W), (C, C, 3, 3))
    weight = weight / (3 * C**0.5)
    mask = torch.rand(B, 9, H, W, generator=seeded()).to(device, dtype)
    return (x, offset, mask, weight) if modulated else (x, offset, weight)


def classified(dtype: torch.dtype, device: torch.device, *, N: int, C: int) -> tuple[Any, ...]:
    """Return logits about as low as those of a trained head, and targets of which one in fifty is a class."""
    generator = seeded()
    logits = torch.randn(N, C, generator=generator) * 2 - 4
    is_object = torch.rand(N, generator=generator) < 0.02
    target = torch.where(is_object, torch.randint(0, C, (N,), generator=generator), C)
    return logits.to(device, dtype), target.to(device)


def upsampled(dtype: torch.dtype, device: torch.device, *, shape: tuple[int, ...], K: int) -> tuple[Any, ...]:
    B, _, H, W = shape
    features, masks = random(torch.float32, device, shape, (B, K * K, 2 * H, 2 * W))
    return features.to(dtype), masks.softmax(1).to(dtype)


def masked(
    dtype: torch.dtype, device: torch.device, *, shape: tuple[int, ...], share: float
) -> tuple[Any, ...]:
    features, weight = random(dtype, device, shape, (shape[1], shape[1], 3, 3))
    mask = torch.rand(shape[0], *shape[2:], generator=seeded()) < share
    return features, mask.to(device, dtype), weight / (3 * shape[1] ** 0.5)
