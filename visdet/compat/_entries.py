"""Functions of compiled extensions, each made from an operator of visdet and a row of text.

A row names the arguments of the extension's function in their order, and what is done with them::

    name              an argument, which the operator gets if it has one of this name
    name:other        an argument, which the operator gets under another name
    one,two:other     arguments, which the operator gets as a tuple
    one|two:other     the same in the reverse order
    name=x/y          the number of a choice, whose name the operator gets
    name?             an argument that may be left out
    >name             a tensor, into which the operator's next result is written
    ~name             a tensor, into whose first rows it is written
    <name             the gradient of the operator's next result, in a backward function. Without any, it is ones
    input>name        a tensor, into which the gradient of the operator's argument ``input`` is written
    -> input other    at the end: the gradients of these arguments are returned

A function with gradients runs the operator again on what it is given, and differentiates it. Where it is not given an
argument whose gradient it computes, the operator is linear in that argument, and zeros take its place. Where an
operator takes None for a tensor, extensions have an empty tensor. Named arguments that a row does not list are ignored.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from inspect import Parameter
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

__all__ = ["functions_of", "gradients_of"]

_WORD = re.compile(
    r"(?:(?P<input>\w*)(?P<mark>[<>~]))?(?P<names>[\w,|]+)(?P<optional>\??)(?::(?P<to>\w+))?(?:=(?P<choices>.+))?"
)


def functions_of(
    extension: str, rows: dict[str, tuple[Callable[..., Any], str] | Callable[..., Any]]
) -> dict[str, Callable[..., Any]]:
    """Return the functions of an extension by their names, from their operators and rows. Functions stay."""
    return {
        name: _function(f"{extension}.{name}", *row) if isinstance(row, tuple) else row
        for name, row in rows.items()
    }


def _function(entry: str, operator: Callable[..., Any], row: str) -> Callable[..., Any]:
    row, _, returned = row.partition("->")
    words: list[Any] = []
    for text in row.split():
        parts: dict[str, Any] = _WORD.fullmatch(text).groupdict()  # type: ignore[union-attr]
        parts |= {"names": re.split("[,|]", parts["names"]), "step": -1 if "|" in parts["names"] else 1}
        words.append(SimpleNamespace(**parts | {"to": parts["to"] or parts["names"][0]}))
    signature = inspect.Signature(
        [
            Parameter(
                name,
                Parameter.POSITIONAL_OR_KEYWORD,
                default=None if word.optional else Parameter.empty,
            )
            for word in words
            for name in word.names
        ]
        + [Parameter("others", Parameter.VAR_KEYWORD)]
    )
    taken: dict[str, Any] = {
        name: one.annotation for name, one in inspect.signature(operator).parameters.items()
    }
    targets = [word for word in words if word.mark in (">", "~")]
    of_results = [word.names[0] for word in words if word.mark == "<"]

    def function(*args: Any, **named: Any) -> Any:
        given = signature.bind(*args, **named).arguments
        passed = {
            word.to: _value(entry, word, given, taken[word.to])
            for word in words
            if word.to in taken and word.names[0] in given
        }
        if not (of_results or returned or any(word.input for word in targets)):
            return _write(entry, targets, given, operator(**passed))
        outs = {word.input: given[word.names[0]] for word in targets}
        inputs = {
            name: passed[name] if name in passed else torch.zeros_like(outs[name])
            for name in [*outs, *returned.split()]
        }
        inputs = {name: tensor for name, tensor in inputs.items() if tensor is not None}
        grads = gradients_of(
            entry,
            lambda *leaves: operator(**passed | dict(zip(inputs, leaves, strict=True))),
            list(inputs.values()),
            [given[name] for name in of_results],
        )
        for name, grad in zip(inputs, grads, strict=True):
            if outs.get(name) is not None:
                _copy(entry, f"the gradient of {name}", outs[name], grad)
        return grads if returned else None

    function.__name__ = entry.rpartition(".")[2]
    function.__signature__ = signature  # type: ignore[attr-defined]
    return function


def _value(entry: str, word: Any, given: dict[str, Any], annotation: Any) -> Any:
    """Return what the operator gets for an argument."""
    value: Any = (
        given[word.names[0]]
        if len(word.names) == 1
        else tuple(given[name] for name in word.names[:: word.step])
    )
    if word.choices:
        choices = word.choices.split("/")
        if not 0 <= value < len(choices):
            meanings = ", ".join(f"{number} ({choice})" for number, choice in enumerate(choices))
            raise ValueError(f"{entry}: {word.names[0]} must be one of {meanings}, got {value!r}")
        return choices[value]
    if annotation is bool:
        return bool(value)
    return None if annotation == Tensor | None and value is not None and value.numel() == 0 else value


def _write(entry: str, targets: list[Any], given: dict[str, Any], result: Any) -> Any:
    """Write results into their tensors, and return what is left of them."""
    if not targets:
        return result
    results = list(result) if isinstance(result, tuple) else [result]
    for word, values in zip(targets, results, strict=False):
        name, target = word.names[0], given[word.names[0]]
        if not isinstance(values, Tensor):
            target.fill_(values)
            continue
        if word.mark == "~":
            if target.dim() and len(target) < len(values):
                sizes = ", ".join(map(str, [f"{len(values)} or more", *values.shape[1:]]))
                raise ValueError(f"{entry}: {name} must be [{sizes}], got {list(target.shape)}")
            target = target[: len(values)]
        _copy(entry, name, target, values)
    rest = results[len(targets) :]
    return rest[0] if rest else None


def _copy(entry: str, name: str, target: Tensor, values: Tensor) -> None:
    if target.shape != values.shape:
        raise ValueError(f"{entry}: {name} must be {list(values.shape)}, got {list(target.shape)}")
    target.copy_(values)


def gradients_of(
    entry: str, function: Callable[..., Any], inputs: Sequence[Tensor], grad_outputs: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Return the gradients of ``function(*inputs)`` for the inputs, given those of its first results, or of its sum.

    Raises:
        ValueError: the gradient of a result does not have the result's shape.
    """
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        results = function(*leaves)
        results = results if isinstance(results, tuple) else (results,)
        grad_outputs = grad_outputs or [torch.ones_like(results[0])]
        results = results[: len(grad_outputs)]
    for result, grad in zip(results, grad_outputs, strict=True):
        if result.shape != grad.shape:
            raise ValueError(f"{entry}: grad_output must be {list(result.shape)}, got {list(grad.shape)}")
    grads = [grad.to(result.dtype) for result, grad in zip(results, grad_outputs, strict=True)]
    return torch.autograd.grad(results, leaves, grads, allow_unused=True, materialize_grads=True)
