"""roi_align on the levels of an FPN, beside torchvision's and mmcv's."""

from typing import Any

import torch

from visdet import ops
from visdet.ops.roi_align import roi_align_reference

from ..case import seeded
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


CASES = [
    *(
        _case(
            "roi_align",
            f"roi-align-P{level}-{size}x{size}",
            _of_level,
            dict(N=1024, level=level),
            lambda x, rois, level=level, size=size: ops.roi_align(x, rois, size, 1 / 2**level),
            lambda x, rois, level=level, size=size: roi_align_reference(x, rois, size, 1 / 2**level),
            differentiable={"input": 0},
            is_contestant=False,
            outputs=1024 * 256 * size * size,
            torchvision=lambda tv, level=level, size=size: (
                lambda x, rois: tv.roi_align(x, rois.to(x.dtype), size, 1 / 2**level, 0, True)
            ),
            mmcv=lambda mm, level=level, size=size: (
                lambda x, rois: mm.roi_align(x, rois.to(x.dtype), size, 1 / 2**level)
            ),
            heavy=True,
        )
        for level in (2, 3, 4, 5)
        for size in (7, 14)
    ),
]
