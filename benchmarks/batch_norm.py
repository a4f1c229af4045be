"""Time batch normalisation in training with the sum and ReLU after it: python -m benchmarks.batch_norm.

Each call is replayed from a CUDA graph. The times are means in microseconds, without and with a residual. This needs a
GPU. The sizes are those of ResNet-50 on 24 images of 256 x 704.
"""

import argparse
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from visdet.ops.fused import batch_norm_add_relu

SHAPES = [
    (24, 64, 128, 352),
    (24, 256, 64, 176),
    (24, 512, 32, 88),
    (24, 1024, 16, 44),
    (24, 2048, 8, 22),
    (24, 512, 8, 22),
]
REPLAYS = 30


def composed(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor) -> Tensor:
    """Return what ``batch_norm_add_relu`` returns, by torch's operators."""
    output = F.batch_norm(x, None, None, weight, bias, training=True)
    return F.relu(output if residual is None else output + residual, inplace=True)


def calls(
    shape: tuple[int, ...], has_residual: bool, dtype: torch.dtype, device: str
) -> dict[tuple[str, str], Callable[[], object]]:
    """Return the calls to time by (implementation, pass); 'both' is forward and backward."""

    def images() -> Tensor:
        drawn = torch.randn(shape, device=device, dtype=dtype)
        return drawn.contiguous(memory_format=torch.channels_last).requires_grad_()

    tensors = [images(), images() if has_residual else None, *torch.rand(2, shape[1], device=device).unbind()]
    leaves = [None if tensor is None else tensor.detach().requires_grad_() for tensor in tensors]
    grad_output = images().detach()

    def both(function: Callable[..., Tensor]) -> object:
        given = [leaf for leaf in leaves if leaf is not None]
        return torch.autograd.grad(function(*leaves), given, grad_output)

    def forward(function: Callable[..., Tensor]) -> object:
        with torch.no_grad():
            return function(*leaves)

    return {
        (name, kind): lambda function=function, run=run: run(function)
        for name, function in (("ours", batch_norm_add_relu), ("torch", composed))
        for kind, run in (("forward", forward), ("both", both))
    }


def microseconds(call: Callable[[], object]) -> float:
    """Return the mean time of a call in replays of a CUDA graph of it."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream), torch.autograd.set_multithreading_enabled(False):
        call()
        with torch.cuda.graph(graph, stream=stream):
            call()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    start.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end) / REPLAYS


def main(arguments: list[str] | None = None) -> int:
    """Run the command line."""
    argparse.ArgumentParser(
        prog="python -m benchmarks.batch_norm", description=__doc__.splitlines()[0]
    ).parse_args(arguments)
    if not torch.cuda.is_available():
        print("benchmarks.batch_norm: this needs a GPU", file=sys.stderr)
        return 1
    for shape in SHAPES:
        for has_residual in (False, True):
            times = {
                key: microseconds(call)
                for key, call in calls(shape, has_residual, torch.bfloat16, "cuda").items()
            }
            text = ", ".join(f"{name} {kind} {time:.1f}" for (name, kind), time in times.items())
            print(f"{shape}, {'with' if has_residual else 'without'} a residual: {text}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
