"""roi_align on the levels of an FPN, beside torchvision's."""

from typing import Any

import torch

from visdet import ops
from visdet.ops.roi_align import roi_align_reference

from ..case import Case, seeded
from ..detection_inputs import random
from .detection import _case


def _of_level(dtype: torch.dtype, device: torch.device, *, N: int, level: int) -> tuple[Any, ...]:
    """Return a level of an FPN for two images of 800 x 1344, and regions of about 14 x 14 pixels of the level."""
    generator, stride = seeded(), 2**level
    x = random(dtype, device, (2, 256, -(-800 // stride), 1344 // stride))
    side = stride * 14 * (0.5 + torch.rand(N, 1, generator=generator))
    ratio = 2 ** (torch.rand(N, 1, generator=generator) - 0.5)
    corner = torch.rand(N, 2, generator=generator) * torch.tensor([1290.0, 750.0])
    index = torch.randint(2, (N, 1), generator=generator)
    rois = torch.cat([index, corner, corner + torch.cat([side * ratio, side / ratio], 1)], 1)
    return *x, rois.to(device)


def _level_case(level: int) -> Case:
    scale = 1 / 2**level
    return _case(
        "roi_align",
        f"roi-align-P{level}-7x7",
        _of_level,
        dict(N=1024, level=level),
        lambda x, rois: ops.roi_align(x, rois, 7, scale),
        lambda x, rois: roi_align_reference(x, rois, 7, scale),
        differentiable={"input": 0},
        is_contestant=False,
        outputs=1024 * 256 * 49,
        torchvision=lambda tv: lambda x, rois: tv.roi_align(x, rois.to(x.dtype), 7, scale, 0, True),
        heavy=True,
    )


CASES = [_level_case(2), _level_case(5)]
