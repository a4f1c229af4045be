"""Whether a call is recorded rather than eager, gradients within operators, and functions recorded as one operator."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["gradients_of", "is_traced", "recorded_as_one"]


def _is_recorded() -> bool:
    """Return whether calls are recorded by ``torch.compile``, an export or a trace."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def is_traced() -> bool:
    """Return whether calls are recorded by ``torch.compile``, an export, a trace or ``torch.func``.

    These support registered operators and plain torch, but not every ``torch.autograd.Function``.
    """
    return _is_recorded() or torch._C._are_functorch_transforms_active()


def gradients_of(
    function: Callable[..., Tensor], grad_output: Tensor, inputs: Sequence[Any], needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of those inputs of a function in plain torch that need one. They are differentiable.

    Unlike torch.autograd.grad, this also differentiates within an operator, where torch records nothing.
    """
    places = [place for place, needs in enumerate(needed) if needs]

    def of_leaves(*leaves: Tensor) -> Tensor:
        return function(*(dict(enumerate(inputs)) | dict(zip(places, leaves, strict=True))).values())

    found = torch.func.vjp(of_leaves, *(inputs[place] for place in places))[1](grad_output)
    return tuple(dict(zip(places, found, strict=True)).get(place) for place in range(len(inputs)))


def recorded_as_one(
    function: Callable[..., Tensor], schema: str, leaves: int, fake: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """Return ``function``, which ``torch.compile`` and exports record as one operator instead of looking inside.

    They cannot record plain torch whose shapes or loops depend on what tensors hold.

    Args:
        schema: The types and names of the arguments, as torch writes them. They are passed by position.
        leaves: How many of the first arguments have gradients, which the backward computes by calling ``function``
            again.
        fake: A function that returns a result of the right shape and type, given the arguments.
    """
    name = f"visdet::{function.__name__.lstrip('_')}"

    def backward(grad_output: Tensor, *arguments: Any) -> list[Tensor]:
        needed = [place < leaves for place in range(len(arguments))]
        found = gradients_of(function, grad_output, arguments, needed)
        return [grad.contiguous() for grad in found if grad is not None]

    def fake_backward(grad_output: Tensor, *arguments: Any) -> list[Tensor]:
        return [tensor.new_empty(tensor.shape) for tensor in arguments[:leaves]]

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*(one for one in inputs if isinstance(one, Tensor)))
        ctx.others = [None if isinstance(one, Tensor) else one for one in inputs]

    def gradients(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        saved = iter(ctx.saved_tensors)
        arguments = [next(saved) if one is None else one for one in ctx.others]
        return (*backward_operator(grad_output, *arguments), *[None] * (len(arguments) - leaves))

    operator = torch.library.custom_op(
        name,
        lambda *arguments: function(*arguments).contiguous(),
        mutates_args=(),
        schema=f"({schema}) -> Tensor",
    )
    backward_operator = torch.library.custom_op(
        f"{name}_backward", backward, mutates_args=(), schema=f"(Tensor grad_output, {schema}) -> Tensor[]"
    )
    operator.register_fake(fake)
    operator.register_autograd(gradients, setup_context=setup_context)
    backward_operator.register_fake(fake_backward)

    def call(*arguments: Any) -> Tensor:
        return (operator if _is_recorded() else function)(*arguments)

    return call
