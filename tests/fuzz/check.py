"""Runs one call of an operator and compares its results and gradients with the float64 reference."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from visdet.execution.tensor_tree import map_tensors, tensors_of

from .mistakes import mistakes
from .problem import EXTREME, HUGE, Draw, Operator, Problem, largest

__all__ = ["Outcome", "bits", "numbers_of", "run_call"]

SPOILING = (
    "rank",
    "device",
    "complex",
    "bool",
    "integers",
    "floats",
)  # what leaves a tensor that autograd takes
REFUSALS = (RuntimeError, ValueError, TypeError)
SMALL = (
    1 << 16
)  # numbers in all arguments: so few are compared faster on the CPU, where no operation is a launch
OVERFLOW = 1e36  # Beyond this sum in float32, one more product may overflow.


@dataclass
class Outcome:
    """The outcome of a call. Its ``kind`` is "passed", "refused" or the kind of failure."""

    kind: str
    message: str = ""

    @property
    def is_failure(self) -> bool:
        return self.kind not in ("passed", "refused")

    @property
    def is_fatal(self) -> bool:
        """Whether later outcomes in this process cannot be trusted."""
        return self.kind == "CUDA error"


def describe(problem: Problem) -> str:
    """Return a text with the arguments and their shapes, dtypes, strides and offsets."""
    parts = []
    for name, value in problem.arguments.items():
        if isinstance(value, Tensor):
            text = f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
            if not value.is_contiguous() or value.storage_offset():
                text += f" strides {list(value.stride())} offset {value.storage_offset()}"
            parts.append(f"{name} {text} on {value.device}" + (", grad" if value.requires_grad else ""))
        else:
            parts.append(f"{name} {value!r}")
    return "; ".join(parts)


def run_call(operator: Operator, seed: int, device: str) -> Outcome:
    """Draw the problem of a seed, call the operator and compare its results. Errors of the drawing are raised."""
    draw = Draw(operator.name, seed, device)
    problem = operator.draw(draw)
    if not problem.must_refuse and draw.chance(0.03):
        _spoil(operator, problem, draw)
    deterministic = draw.chance(0.4)
    arguments = problem.arguments
    needed = [name for name in problem.differentiable if isinstance(arguments[name], Tensor)]
    if draw.chance(0.15):
        needed = [name for name in needed if draw.chance(0.6)]
    for name in needed:
        tensor = arguments[name]
        if tensor.is_floating_point():
            arguments[name] = tensor.detach().requires_grad_()
    needed = [name for name in needed if arguments[name].requires_grad]
    try:
        torch.use_deterministic_algorithms(deterministic)
        try:
            outputs, gradients, grad_outputs = _call(operator, problem, needed, draw)
            repeated = _call(operator, problem, needed, draw, grad_outputs)[:2] if draw.chance(0.05) else None
        finally:
            torch.use_deterministic_algorithms(False)
            if device == "cuda":
                torch.cuda.synchronize()
    except Exception as error:
        return _judge_error(operator, problem, error, deterministic)
    if problem.must_refuse:
        return Outcome(
            "accepted", f"the call was accepted although {problem.must_refuse}: {describe(problem)}"
        )
    message = ""
    if repeated and (deterministic or device == "cpu"):
        message = _differences(*repeated, outputs, gradients, needed)
    may_be_nan = _may_be_nan(operator, problem, grad_outputs, ["output", *needed]) if device == "cuda" else ()
    compared = (problem, outputs, gradients, grad_outputs)
    if device == "cuda" and numbers_of(problem) <= SMALL:
        compared = map_tensors(lambda one: one.detach().cpu(), compared)
    message = message or _compare(operator, *compared, needed, may_be_nan)
    if message:
        return Outcome("wrong number", f"{message} (deterministic {deterministic}): {describe(problem)}")
    return Outcome("passed")


def _may_be_nan(
    operator: Operator, problem: Problem, grad_outputs: dict[int, Tensor], results: Sequence[str]
) -> Sequence[str]:
    """Return the results on CUDA that may be NaN because of a bad number elsewhere in an argument."""

    def are_finite(tensors: Iterable[Tensor]) -> bool:
        return all(bool(tensor.isfinite().all()) for tensor in tensors)

    if not operator.reads_beside:
        return ()
    if not are_finite([*(problem.arguments[name] for name in operator.reads_beside), *grad_outputs.values()]):
        return results
    return (
        ()
        if are_finite(problem.arguments[name] for name in operator.scatters_beside)
        else operator.reads_beside
    )


def numbers_of(problem: Problem) -> int:
    """Return how many numbers the tensors of a problem have."""
    return sum(value.numel() for value in tensors_of(problem.arguments))


def _outputs(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


def _by_name(outputs: tuple[Any, ...]) -> dict[str, Any]:
    """Return the results by the names "output", "output 1" and so on."""
    return {f"output {i}" if i else "output": one for i, one in enumerate(outputs)}


def _call(
    operator: Operator, problem: Problem, needed: list[str], draw: Draw, grad_outputs: Any = None
) -> tuple[tuple[Any, ...], tuple[Tensor | None, ...], dict[int, Tensor]]:
    """Return the results, the gradients of the needed arguments, and those of the results that have one."""
    outputs = _outputs(operator.call(**problem.arguments))
    sources = {i: t for i, t in enumerate(outputs) if isinstance(t, Tensor) and t.requires_grad}
    assert sources or not needed, f"no result can be differentiated with respect to {needed}"
    if not needed:
        return outputs, (None,) * len(needed), {}
    if grad_outputs is None:
        numbers = [draw.with_bad_numbers(draw.numbers(*t.shape), 0.3) for t in sources.values()]
        if operator.shares_a_scale:
            numbers = [torch.where(tensor.abs() == HUGE, 1.0, tensor) for tensor in numbers]
        grad_outputs = {
            i: draw.place(tensor, t.dtype) for tensor, (i, t) in zip(numbers, sources.items(), strict=True)
        }
    gradients = torch.autograd.grad(
        list(sources.values()),
        [problem.arguments[name] for name in needed],
        list(grad_outputs.values()),
        allow_unused=True,
    )
    return outputs, gradients, grad_outputs


def _judge_error(operator: Operator, problem: Problem, error: Exception, deterministic: bool) -> Outcome:
    text = f"{type(error).__name__}: {error}"
    if "CUDA error" in text or "CUDA kernel" in text or "AcceleratorError" in text:
        return Outcome("CUDA error", f"{text}; {describe(problem)}")
    if deterministic and "does not have a deterministic implementation" in text:
        return Outcome("refused")  # torch refuses an operation of an operator in plain torch.
    is_clear = isinstance(error, REFUSALS) and any(
        n in str(error) for n in (operator.name, *operator.aliases)
    )
    if (problem.may_refuse or problem.must_refuse) and is_clear:
        return Outcome("refused")
    kind = "refused without a reason" if is_clear else "unclear error"
    why = problem.must_refuse or problem.may_refuse
    return Outcome(kind, f"{text[:2000]} (deterministic {deterministic}; {why}): {describe(problem)}")


def _spoil(operator: Operator, problem: Problem, draw: Draw) -> None:
    """Make one argument wrong, and set ``must_refuse`` to the reason."""
    if problem.may_refuse:
        return  # One mistake may cancel the other.
    tables = [value for key, value in problem.arguments.items() if key.startswith("level_")]
    is_late = any(isinstance(table, Tensor) and table.is_cuda for table in tables)
    possible = []
    for name, what, change in mistakes(operator, problem.arguments):
        # The operator does not read tables on a GPU before the launch.
        if what in SPOILING or (isinstance(what, int) and not is_late):
            possible.append((name, what, change))
    if possible:
        name, what, change = draw.pick(*possible)
        problem.arguments[name] = change(problem.arguments[name])
        problem.must_refuse = f"{name} is spoiled: {what}"


def _exact(problem: Problem, name: str, magnitudes: bool) -> Any:
    """Return an argument for the reference, which is a float64 copy of the values that the operator computes with.

    Numbers that are not compared become NaN. With ``magnitudes``, they become zero and all others positive.
    """
    value = problem.reference_arguments.get(name, problem.arguments[name])
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    value = value.detach().to(problem.wide).double()
    if name not in problem.positions:
        value = torch.where(value.abs() < EXTREME, value, torch.nan)
        value = value.abs().nan_to_num(0.0) if magnitudes else value
    return value


def _reference(
    operator: Operator, problem: Problem, needed: list[str], grad_outputs: dict[int, Tensor], magnitudes: bool
) -> dict[str, Any]:
    """Return the float64 results by name: "output", "output 1" and so on, and the names of needed arguments."""
    arguments = {name: _exact(problem, name, magnitudes) for name in problem.arguments}
    for name in needed:
        arguments[name].requires_grad_()
    outputs = _outputs(operator.reference(**arguments))
    results = _by_name(outputs)
    if grad_outputs:
        given = [grad.double() for grad in grad_outputs.values()]
        grads = [torch.where(grad.abs() < EXTREME, grad, torch.nan) for grad in given]
        if magnitudes:
            grads = [grad.abs().nan_to_num(0.0) for grad in grads]
            results["grad_output"] = _row_sum(grads[0])
            results["grad_total"] = grads[0].sum()
            results["grad_peak"] = given[0]
        # An operator may compute results together of which the reference has some without a gradient.
        pairs = zip((outputs[i] for i in grad_outputs), grads, strict=True)
        used = [pair for pair in pairs if pair[0].requires_grad]
        found: tuple[Tensor | None, ...] = (None,) * len(needed)
        if used:
            sources, grads = zip(*used, strict=True)
            found = torch.autograd.grad(sources, [arguments[n] for n in needed], grads, allow_unused=True)
        for name, gradient in zip(needed, found, strict=True):
            results[name] = torch.zeros_like(arguments[name]) if gradient is None else gradient
    return map_tensors(Tensor.detach, results)


def _compare(
    operator: Operator,
    problem: Problem,
    outputs: tuple[Any, ...],
    gradients: tuple[Tensor | None, ...],
    grad_outputs: dict[int, Tensor],
    needed: list[str],
    may_be_nan: Sequence[str],
) -> str:
    """Return a text on what is wrong, or an empty text. NaN is not wrong in the results ``may_be_nan``."""
    expected = _reference(operator, problem, needed, grad_outputs, False)
    if operator.compare is not None:
        return operator.compare(problem, outputs, expected)
    magnitudes = _reference(operator, problem, needed, grad_outputs, True)
    bounds = {name: largest(value, below=torch.inf) for name, value in magnitudes.items()}
    if operator.bounds is not None:
        operator.bounds(problem, bounds)
    results = _by_name(outputs)
    if grad_outputs:
        results.update(zip(needed, gradients, strict=True))
    for name, got in results.items():
        title = name if name.startswith("output") else f"gradient of {name}"
        if got is None:
            got = torch.zeros_like(problem.arguments[name])
        if problem.skip.get(name) is not True:
            got = got.detach()
            if name in may_be_nan:
                got = torch.where(got.isnan(), expected[name].to(got.dtype), got)
            message = _wrong_entries(problem, name, got, expected[name], bounds[name])
            if message:
                return f"{title}: {message}"
    return ""


def _row_sum(tensor: Tensor) -> Tensor:
    return tensor.sum(-1) if tensor.dim() else tensor


def _wrong_entries(problem: Problem, name: str, got: Tensor, expected: Tensor, bound: float) -> str:
    if got.shape != expected.shape:
        return f"shape {list(got.shape)}, expected {list(expected.shape)}"
    if name in problem.arguments:
        dtype = problem.arguments[name].dtype
        if got.dtype != dtype:
            return f"type {got.dtype}, expected {dtype}"
    if bound > OVERFLOW and problem.wide != torch.float64:
        return ""
    info, wide = torch.finfo(got.dtype), torch.finfo(problem.wide)
    epsilon = wide.eps if problem.epsilon is None else problem.epsilon
    allowed = epsilon * problem.error_factor * bound + problem.absolute.get(name, 0.0)
    # Atomic additions on CUDA flush subnormal terms to zero, and a sum may have several.
    allowed += wide.smallest_normal * problem.error_factor
    tolerance = expected.abs() * info.eps + info.smallest_normal * info.eps + allowed
    is_right = (got.double() - expected).abs() <= tolerance
    is_right |= ~expected.isfinite() | (expected.abs() + allowed >= info.max * (1 - info.eps))
    skipped = problem.skip.get(name)
    if isinstance(skipped, Tensor):
        is_right |= skipped.to(is_right.device)
    if bool(is_right.all()):
        return ""
    wrong = (~is_right).nonzero()
    place = tuple(wrong[0].tolist())
    return (
        f"{len(wrong)} of {got.numel()} entries are wrong, at {list(place)}: {float(got[place])!r}, expected "
        f"{float(expected[place])!r} within {float(tolerance[place]):.3g}"
    )


def _differences(
    outputs: tuple[Any, ...],
    gradients: tuple[Any, ...],
    first: tuple[Any, ...],
    second: tuple[Any, ...],
    needed: list,
) -> str:
    """Return a text if a result does not have the same bits as in the first call, or an empty text."""
    for before, after in zip((*first, *second), (*outputs, *gradients), strict=True):
        if isinstance(before, Tensor) and not torch.equal(bits(before), bits(after)):
            return f"a second call gives other bits (results {len(outputs)}, gradients of {needed})"
    return ""


def bits(tensor: Tensor) -> Tensor:
    """Return a tensor that equals another one, by torch.equal, if its NaN stand in the same places."""
    return tensor.detach().nan_to_num(nan=12345.0) if tensor.is_floating_point() else tensor
