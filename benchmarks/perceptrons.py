"""Time perceptrons in one operator beside torch's layers: python -m benchmarks.perceptrons.

For each size it prints the time that kernels run, and the wall time of eager calls, in microseconds. The sizes are
those of SparseDrive: predictions of a frame have 100 lines and 900 boxes, and training steps of four frames 4883 rows
with the denoising queries. This needs a GPU.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from visdet.models.sparsedrive.mlp import Perceptron, Scale, linear_relu_ln, side_by_side

__all__ = ["CASES", "calls", "main", "microseconds"]

ROWS = [100, 900, 4883]
CALLS = 20


def _boxes() -> list[Perceptron]:
    sizes = [(3, 128), (3, 32), (2, 32), (3, 64)]
    return [Perceptron(*linear_relu_ln(outputs, 1, 4, inputs)) for inputs, outputs in sizes]


# Functions that make the perceptrons, and the columns that these begin with.
CASES: dict[str, tuple[Callable[[], list[Perceptron]], tuple[int, ...]]] = {
    "embedding of boxes": (_boxes, (0, 3, 6, 8)),
    "embedding of lines": (lambda: [Perceptron(*linear_relu_ln(256, 1, 2, 40))], (0,)),
    "class logits": (lambda: [Perceptron(*linear_relu_ln(256, 1, 2), nn.Linear(256, 10))], (0,)),
    "refinement of boxes": (
        lambda: [Perceptron(*linear_relu_ln(256, 2, 2), nn.Linear(256, 11), Scale([1.0] * 11))],
        (0,),
    ),
}


def by_layers(modules: Sequence[Perceptron], x: Tensor, first_columns: Sequence[int]) -> Tensor:
    """Return what ``side_by_side`` returns, layer by layer."""
    widths = [next(module.parameters()).shape[1] for module in modules]
    parts = [
        nn.Sequential.forward(module, x[:, first : first + width])
        for module, first, width in zip(modules, first_columns, widths, strict=True)
    ]
    return torch.cat(parts, dim=-1)


def calls(case: str, rows: int, device: str) -> dict[tuple[str, str], Callable[[], object]]:
    """Return the calls to time by (implementation, pass); 'both' is forward and backward."""
    make, first_columns = CASES[case]
    modules = [module.to(device) for module in make()]
    width = first_columns[-1] + next(modules[-1].parameters()).shape[1]
    x = torch.randn(rows, width, device=device, requires_grad=True)
    leaves = [x, *(parameter for module in modules for parameter in module.parameters())]
    grad_output = torch.randn_like(side_by_side(modules, x, first_columns))

    def forward(function: Callable[..., Tensor]) -> object:
        with torch.no_grad():
            return function(modules, x, first_columns)

    def both(function: Callable[..., Tensor]) -> object:
        return torch.autograd.grad(function(modules, x, first_columns), leaves, grad_output)

    return {
        (name, kind): lambda function=function, run=run: run(function)
        for name, function in (("ours", side_by_side), ("torch", by_layers))
        for kind, run in (("forward", forward), ("both", both))
    }


def microseconds(call: Callable[[], object]) -> tuple[float, float]:
    """Return the mean times of a call, that of its kernels and the wall time."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    torch.cuda.synchronize()
    wall = time.perf_counter() - start
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()
    kernels = sum(event.self_device_time_total for event in profile.key_averages())
    return kernels / CALLS, 1e6 * wall / CALLS


def main(arguments: list[str] | None = None) -> int:
    """Run the command line."""
    argparse.ArgumentParser(
        prog="python -m benchmarks.perceptrons", description=__doc__.splitlines()[0]
    ).parse_args(arguments)
    if not torch.cuda.is_available():
        print("benchmarks.perceptrons: this needs a GPU", file=sys.stderr)
        return 1
    with torch.autograd.set_multithreading_enabled(False):
        for case in CASES:
            for rows in ROWS:
                times = {key: microseconds(call) for key, call in calls(case, rows, "cuda").items()}
                text = ", ".join(
                    f"{name} {kind} {kernels:.0f} ({wall:.0f})"
                    for (name, kind), (kernels, wall) in times.items()
                )
                print(f"{case}, {rows} rows: {text}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
