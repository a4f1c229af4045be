"""Bounds of rounding errors for references of several steps, each of which is disturbed in turn."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.fuzz.problem import EXTREME, HALVES, Problem

__all__ = ["EXACT_STEPS", "Steps", "bounds_of", "epsilon_of", "greatest", "near_zero_of"]

NEAR_ZERO = (
    1e-4  # times the largest magnitude: rounding may put a sum that is this near to zero on either side of it
)
NEAR_ZERO_16_BIT = 3e-2


class _Relu(torch.autograd.Function):
    """ReLU with a NaN gradient where the input is NaN or so near to zero that rounding decides its sign.

    With ``near_zero`` = None, the input has no rounding errors.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, near_zero: float | None) -> Tensor:
        margin = -1.0 if near_zero is None else near_zero * greatest(x)
        ctx.save_for_backward(torch.where(x.abs() > margin, (x > 0).double(), torch.nan))
        return F.relu(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.saved_tensors[0], None


class _Disturbed(torch.autograd.Function):
    """Its input plus random errors of some magnitudes, with a gradient that has errors of ``factor`` times its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, magnitudes: Tensor, factor: Tensor | float, step: float) -> Tensor:
        ctx.step = step * factor
        return x + step * magnitudes * torch.randn_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad + ctx.step * greatest(grad) * torch.randn_like(grad), None, None, None


class Steps:
    """The steps of the references. With ``step`` > 0, each has random errors of this part of its magnitude."""

    def __init__(self, step: float = 0.0) -> None:
        self.step = step

    def disturbed(self, x: Tensor, magnitudes: Tensor | None = None, factor: Tensor | float = 1.0) -> Tensor:
        magnitudes = x.detach().abs() if magnitudes is None else magnitudes.detach()
        return _Disturbed.apply(x, magnitudes, factor, self.step) if self.step else x

    def relu(self, x: Tensor, near_zero: float | None) -> Tensor:
        return _Relu.apply(x, None if self.step else near_zero)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return self.disturbed(x @ weight.t() + bias, x.abs() @ weight.abs().t() + bias.abs())

    def normalised(self, x: Tensor, dims: tuple[int, ...], eps: float) -> Tensor:
        """Return ``x`` with mean 0 and variance 1 over some dimensions, of which none is empty.

        Gradients may be computed from ``x`` itself, whose mean may be much larger than its deviation.
        """
        disturbed = self.disturbed
        largest = x.detach().abs().amax(dims, keepdim=True)
        difference = disturbed(x) - disturbed(x.mean(dims, keepdim=True), largest)
        variance = difference.square().mean(dims, keepdim=True)
        scale = (disturbed(variance) + eps).rsqrt()
        return disturbed(difference, factor=1 + largest * scale.detach()) * scale


EXACT_STEPS = Steps()


def bounds_of(reference: Callable[..., Any]) -> Callable[..., None]:
    """Return ``bounds`` of a family: how much its results change if each step has errors, in units of these errors."""

    def bounds(problem: Problem, found: dict[str, float]) -> None:
        step = 1e-13 if problem.wide == torch.float64 else problem.epsilon or torch.finfo(problem.wide).eps
        given = {}
        for name, value in problem.arguments.items():
            if isinstance(value, Tensor) and value.is_floating_point():
                value = value.detach().to(problem.wide).double()
                value = torch.where(value.abs() < EXTREME, value, 0.0)
            given[name] = value
        wanted = [name for name in problem.differentiable if name in found and name in given]
        for name in wanted:
            given[name] = given[name].clone().requires_grad_()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            exact, *disturbed = (
                _results(reference, given, wanted, found, Steps(s)) for s in (0, step, step, step)
            )
        for name, result in exact.items():
            found[name] = greatest(result) + max(greatest(other[name] - result) for other in disturbed) / step
            if name in wanted:  # A gradient that is zero is the difference of others.
                found[name] += found.get("grad_peak", 0.0)

    return bounds


def _results(
    reference: Callable[..., Any],
    given: dict[str, Any],
    wanted: Sequence[str],
    found: dict[str, float],
    steps: Steps,
) -> dict[str, Tensor]:
    result = reference(**given, steps=steps)
    outputs = result if isinstance(result, tuple) else (result,)
    results = {f"output {i}" if i else "output": output.detach() for i, output in enumerate(outputs)}
    first = outputs[0]
    if wanted and first.requires_grad:
        device = first.device
        generator = torch.Generator(device).manual_seed(1)
        signs = torch.randint(0, 2, first.shape, generator=generator, device=device) * 2 - 1
        grad_output = found.get("grad_peak", 0.0) * signs.double()
        inputs = [given[name] for name in wanted]
        gradients = torch.autograd.grad(first, inputs, grad_output, allow_unused=True)
        for name, gradient in zip(wanted, gradients, strict=True):
            results[name] = torch.zeros_like(given[name]) if gradient is None else gradient
    return results


def greatest(tensor: Tensor) -> float:
    return float(tensor.abs().nan_to_num(0.0).max()) if tensor.numel() else 0.0


def near_zero_of(dtype: torch.dtype) -> float:
    return NEAR_ZERO_16_BIT if dtype in HALVES else NEAR_ZERO


def epsilon_of(dtype: torch.dtype) -> float | None:
    """Return the rounding error of intermediate results in torch's operators, which keep them in 16 bits."""
    return torch.finfo(dtype).eps if dtype in HALVES else None
