"""The correctness gate, which compares the full call, as it is timed, with the reference in float64."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .case import Case, seeded
from .timing import deterministic, prepare


@dataclass(frozen=True)
class Gate:
    """The result of the gate. Errors are the largest |difference| divided by the largest |value|."""

    errors: dict[str, float]
    tolerance: dict[str, float]
    bit_equal: bool  # two deterministic backward passes gave the same bits
    expected: list[tuple[slice, Tensor]]  # (batches, output in float64), for the peers' errors

    @property
    def problems(self) -> list[str]:
        """Return the reasons for which the gate is red, or an empty list if it is green."""
        found = [
            f"{name}: error {error:.2e} > {self.tolerance[name]:.0e}"
            for name, error in self.errors.items()
            if not error <= self.tolerance[name]
        ]
        return found if self.bit_equal else [*found, "two deterministic backward passes differ"]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest |actual - expected| divided by the largest |expected|.

    The result is infinite if ``actual`` is not finite or has another shape.
    """
    if actual.shape != expected.shape or not actual.isfinite().all():
        return float("inf")
    if actual.numel() == 0:
        return 0.0
    scale = expected.abs().max().item()
    return (actual.double() - expected).abs().max().item() / (scale or 1.0)


def check(case: Case, arguments: tuple[Any, ...]) -> tuple[Gate, Tensor]:
    """Return the gate of ``case`` on ``arguments``, and the gradient of the output that the passes use.

    The operator runs on all batches, and all results must be finite. If ``case.checked_batches`` is given, only those
    batches are compared, which do not depend on the others.
    """
    call = case.call(arguments)
    with torch.no_grad():
        output = case.function(*arguments)
    grad_output = torch.randn(output.shape, generator=seeded(1)).to(output)
    grads, bit_equal = (), True
    if case.differentiable:
        grads = prepare(call, "backward", grad_output)()
        with deterministic():
            backward = prepare(call, "backward", grad_output)
            bit_equal = all(map(torch.equal, backward(), backward()))

    batches = case.checked_batches
    slices = [slice(None)] if batches is None else [slice(b, b + 1) for b in batches]
    names = ["output", *case.differentiable]
    errors = {
        name: 0.0 if tensor.isfinite().all() else float("inf")
        for name, tensor in zip(names, (output, *grads), strict=True)
    }
    expected_outputs = []
    for chosen in slices:
        expected, expected_grads = _reference(case, arguments, grad_output, chosen)
        for name, actual, wanted in zip(names, (output, *grads), (expected, *expected_grads), strict=True):
            errors[name] = max(errors[name], relative_error(actual[chosen], wanted))
        expected_outputs.append((chosen, expected))
    return Gate(errors, case.tolerance(output.dtype), bit_equal, expected_outputs), grad_output


def _reference(
    case: Case, arguments: tuple[Any, ...], grad_output: Tensor, chosen: slice
) -> tuple[Tensor, tuple[Tensor, ...]]:
    exact = list(arguments)
    for position, argument in enumerate(exact):
        if position in case.batched:
            argument = argument[chosen]
        if isinstance(argument, Tensor) and argument.is_floating_point():
            argument = argument.double()
        exact[position] = argument
    leaves = [exact[p].detach().requires_grad_() for p in case.differentiable.values()]
    for position, leaf in zip(case.differentiable.values(), leaves, strict=True):
        exact[position] = leaf
    output = case.reference(*exact)
    grads = torch.autograd.grad(output, leaves, grad_output[chosen].double()) if leaves else ()
    return output.detach(), grads
