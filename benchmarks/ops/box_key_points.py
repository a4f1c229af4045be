"""Cases of box_key_points, with the key points of SparseDrive's detection head at batch sizes 1 and 6."""

from functools import partial
from typing import Any

import torch

from visdet.ops import box_key_points, box_key_points_reference

from ..case import Case, Work, peer_of, seeded

DIMS, FIXED, LEARNABLE = 11, 7, 6


def make_arguments(dtype: torch.dtype, device: torch.device, *, B: int, Q: int) -> tuple[Any, ...]:
    """Return anchors, fixed points and logits."""
    generator = seeded()
    shapes = ((B, Q, DIMS), (FIXED, 3), (B, Q, LEARNABLE * 3))
    return tuple(torch.randn(shape, generator=generator).to(dtype).to(device) for shape in shapes)


def work_of(dtype: torch.dtype, *, B: int, Q: int) -> dict[str, Work]:
    """Return the bytes of every input and output."""
    points = FIXED + LEARNABLE
    read, written = B * Q * (8 + LEARNABLE * 3) * dtype.itemsize, B * Q * points * 3 * dtype.itemsize
    return {
        "forward": Work(moved=read + written),
        "backward": Work(moved=2 * read + written),
    }


def _case(name: str, B: int, Q: int = 900) -> Case:
    numbers = dict(B=B, Q=Q)
    return Case(
        op="box_key_points",
        name=name,
        sizes=f"B{B} Q{Q}, {FIXED} fixed points and {LEARNABLE} learnable",
        make=partial(make_arguments, **numbers),
        function=box_key_points,
        reference=box_key_points_reference,
        differentiable={"anchors": 0, "logits": 2},
        work=partial(work_of, **numbers),
        tolerance=lambda dtype: {"output": 1e-6, "anchors": 2e-6, "logits": 2e-6},
        peers=(peer_of("torch", box_key_points_reference, (0, 2)),),
        dtypes=(torch.float32,),
        batched=(0, 2),
    )


CASES = [_case("tiny", B=1, Q=7), _case("det-b1", B=1), _case("det-b6", B=6)]
