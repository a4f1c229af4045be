"""Compare deformable convolution on the CPU with torchvision by calls in turns: python -m benchmarks.deform_conv_turns.

Each turn calls every implementation once, so that other processes slow all of them alike. The output has the median
wall time and the least processor time of all threads, both in ms, and how often torchvision in float32 takes that.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torchvision.ops import deform_conv2d as torchvision_deform_conv2d

from visdet.ops import modulated_deform_conv2d
from visdet.ops.deform_conv2d import convolve

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def tensors(B: int, C: int, H: int, W: int, groups: int) -> list[Tensor]:
    """Return input, offset, mask and weight for a 3 x 3 kernel with padding 1 and as many outputs as inputs."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    weight = draw(C, C // groups, 3, 3) / (3 * (C // groups) ** 0.5)
    return [draw(B, C, H, W), draw(B, 18, H, W), draw(B, 9, H, W).sigmoid(), weight]


def ours(x: Tensor, offset: Tensor, mask: Tensor | None, weight: Tensor, groups: int) -> Tensor:
    if mask is None:
        return convolve(x, offset, None, weight, None, 1, 1, 1, 1)
    return modulated_deform_conv2d(x, offset, mask, weight, None, 1, 1, 1, groups)


def theirs(x: Tensor, offset: Tensor, mask: Tensor | None, weight: Tensor, groups: int) -> Tensor:
    return torchvision_deform_conv2d(x, offset, weight, None, padding=1, mask=mask)


def both(function: Callable[..., Tensor], leaves: list[Tensor | None], groups: int) -> None:
    output = function(*leaves, groups)
    torch.autograd.grad(output, [t for t in leaves if t is not None], torch.ones_like(output))


def contestants(
    given: list[Tensor], groups: int, modulated: bool
) -> dict[tuple[str, str], Callable[[], object]]:
    """Return the calls to time by (name, pass)."""
    calls: dict[tuple[str, str], Callable[[], object]] = {}
    for name, function, dtype in [
        ("torchvision float32", theirs, torch.float32),
        *((f"visdet {str(dtype).removeprefix('torch.')}", ours, dtype) for dtype in DTYPES),
    ]:
        cast = [t.to(dtype) if modulated or i != 2 else None for i, t in enumerate(given)]
        leaves = [None if t is None else t.clone().requires_grad_() for t in cast]
        calls[name, "forward"] = partial(function, *cast, groups)
        calls[name, "both"] = partial(both, function, leaves, groups)
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.deform_conv_turns", description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--shape", type=int, nargs=4, default=(2, 256, 50, 76), metavar=("B", "C", "H", "W"))
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--modulated", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    calls = contestants(tensors(*given.shape, given.groups), given.groups, given.modulated)
    times: dict[tuple[str, str], list[tuple[float, float]]] = {key: [] for key in calls}
    for turn in range(given.turns + 1):
        for key, call in calls.items():
            wall, processor = time.perf_counter(), time.process_time()
            call()
            if turn:  # The first turn is a warm-up.
                times[key].append((time.perf_counter() - wall, time.process_time() - processor))
    for (name, what), measured in times.items():
        peer = times["torchvision float32", what]
        wall, base = (statistics.median(w for w, _ in t) for t in (measured, peer))
        processor, base_processor = (min(p for _, p in t) for t in (measured, peer))
        print(
            f"{what:8} {name:20} wall {wall * 1e3:8.1f} ms ({base / wall:5.2f} times), "
            f"processor {processor * 1e3:8.1f} ms ({base_processor / processor:5.2f} times)"
        )


if __name__ == "__main__":
    main()
