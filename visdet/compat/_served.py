"""Functions of compiled extensions, each declared by its signature and computed by an operator of visdet.

The extension's functions write into tensors that their callers allocate::

    @serves(ops.carafe, "mmcv._ext.carafe_naive_forward")
    def carafe_naive_forward(
        features: Tensor, masks: Tensor, output: Result, kernel_size: int, group_size: int, scale_factor: int
    ) -> None: ...

The operator gets the arguments that have the names of its own, or that ``serves`` is told to hand on under another
name. Several arguments under one name are handed on as a tuple. An argument of the type ``object`` has no effect. Of a
``Literal``, the extension gives the place of a name from 0 on, and the operator gets the name. A
function with gradients runs the operator again on what it is given, and differentiates it. Where it is not given an
argument whose gradient it computes, or only its sizes, the operator is linear in that argument, and zeros take its
place. Where an operator takes None for a tensor, extensions have an empty tensor. Named arguments that a signature does
not have are ignored. A function that has the extension's arguments itself is decorated by ``computes``.
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Sequence
from inspect import Parameter
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, get_args, get_origin

import torch
from torch import Tensor

__all__ = [
    "SERVED",
    "BoxMode",
    "FirstRows",
    "GradOutput",
    "Gradient",
    "PoolMode",
    "Result",
    "SoftMethod",
    "computes",
    "gradients_of",
    "serves",
]

_Own = TypeVar("_Own", bound=Callable[..., Any])

SERVED: dict[str, dict[str, Callable[..., Any]]] = defaultdict(dict)
"""The functions of each extension by their names, of the modules of this package that have been imported."""


Result: TypeAlias = Annotated[Tensor, "the operator's next result is written here"]
FirstRows: TypeAlias = Annotated[Tensor, "the operator's next result is written into the first rows"]
GradOutput: TypeAlias = Annotated[Tensor, "the gradient of the operator's next result"]
Gradient: TypeAlias = Annotated[Tensor, "the gradient of an argument of the operator is written here"]
BoxMode: TypeAlias = Literal["iou", "iof"]
PoolMode: TypeAlias = Literal["max", "avg"]
SoftMethod: TypeAlias = Literal["naive", "linear", "gaussian"]


def serves(
    operator: Callable[..., Any], *entries: str, returns: Sequence[str] = (), **names: str
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that serves the function with the decorated signature.

    Args:
        operator: what computes it.
        entries: the extension and the name of the function in it, such as "mmcv._ext.nms"; of several extensions, if
            they have the same function.
        returns: the arguments of the operator whose gradients the function returns, as a tuple if there are several.
        names: by the name of an argument, the operator's name for it, or for what a ``Gradient`` is the gradient of.
    """

    def declare(signature: Callable[..., Any]) -> Callable[..., Any]:
        for entry in entries:
            extension, _, name = entry.rpartition(".")
            SERVED[extension][name] = _Function(entry, name, operator, signature, returns, names)
        return SERVED[extension][name]

    return declare


def computes(*entries: str) -> Callable[[_Own], _Own]:
    """Return a decorator that serves the decorated function itself, for ``entries`` as of ``serves``."""

    def declare(function: _Own) -> _Own:
        serves(function, *entries)(function)
        return function

    return declare


class _Function:
    """A function of an extension."""

    def __init__(
        self,
        entry: str,
        name: str,
        operator: Callable[..., Any],
        signature: Callable[..., Any],
        returns: Sequence[str],
        names: dict[str, str],
    ) -> None:
        self.entry = entry
        self.operator = operator
        self.returns = returns
        parameters = list(inspect.signature(signature).parameters.values())
        self.__name__ = name
        self.__signature__ = inspect.Signature([*parameters, Parameter("others", Parameter.VAR_KEYWORD)])
        types = self.types = signature.__annotations__
        self.results = [name for name in types if types[name] in (Result, FirstRows)]
        self.grad_outputs = [name for name in types if types[name] == GradOutput]
        self.gradients = {name: names[name] for name in types if types[name] == Gradient}
        self.taken = inspect.signature(operator).parameters
        assert names.keys() <= types.keys() and {*names.values(), *returns} <= self.taken.keys(), entry
        self.sources: dict[str, list[str]] = {}
        for name, kind in (names | types).items():
            target = names.get(name, name)
            has_effect = kind is not object or operator is signature
            if target in self.taken and name not in self.gradients and has_effect:
                self.sources.setdefault(target, []).append(name)

    def __call__(self, *args: Any, **named: Any) -> Any:
        given = self.__signature__.bind(*args, **named).arguments
        passed = {
            target: self._value(target, names, given)
            for target, names in self.sources.items()
            if names[0] in given
        }
        if self.returns or self.gradients:
            return self._differentiate(given, passed)
        return self._write(given, self.operator(**passed))

    def _value(self, target: str, names: list[str], given: dict[str, Any]) -> Any:
        """Return what the operator gets for an argument."""
        annotation = self.taken[target].annotation
        values = []
        for name in names:
            one = given[name]
            kind = self.types[name]
            # Compiled functions take a tensor of one number, too.
            values.append(kind(one) if kind in (int, float) and isinstance(one, Tensor) else one)
        value: Any = values[0] if len(names) == 1 else tuple(values)
        if get_origin(kind) is Literal:
            choices = get_args(kind)
            if not 0 <= value < len(choices):
                meanings = ", ".join(f"{number} ({choice})" for number, choice in enumerate(choices))
                raise ValueError(f"{self.entry}: {names[0]} must be one of {meanings}, got {value!r}")
            return choices[value]
        if annotation is bool:
            return bool(value)
        return None if annotation == Tensor | None and value is not None and value.numel() == 0 else value

    def _differentiate(self, given: dict[str, Any], passed: dict[str, Any]) -> Any:
        returns = self.returns
        targets = {source: given[name] for name, source in self.gradients.items()}
        grad_outputs = [given[name] for name in self.grad_outputs]
        inputs: dict[str, Any] = {}
        for name in [*targets, *returns]:
            value = passed[name] if name in passed else torch.zeros_like(targets[name])
            if isinstance(value, tuple):
                value = grad_outputs[0].new_zeros(value)
            if value is not None:
                inputs[name] = value

        def run(*leaves: Tensor) -> Any:
            return self.operator(**passed | dict(zip(inputs, leaves, strict=True)))

        grads = gradients_of(self.entry, run, list(inputs.values()), grad_outputs)
        for name, grad in zip(inputs, grads, strict=True):
            if targets.get(name) is not None:
                _copy(self.entry, f"the gradient of {name}", targets[name], grad)
        return (grads if len(returns) > 1 else grads[0]) if returns else None

    def _write(self, given: dict[str, Any], result: Any) -> Any:
        """Write results into their tensors, and return what is left of them."""
        if not self.results:
            return result
        results = list(result) if isinstance(result, tuple) else [result]
        for name, values in zip(self.results, results, strict=False):
            target = given[name]
            if not isinstance(values, Tensor):
                target.fill_(values)
                continue
            if self.types[name] == FirstRows:
                count = len(values)
                if target.dim() and len(target) < count:
                    sizes = ", ".join(map(str, [f"{count} or more", *values.shape[1:]]))
                    raise ValueError(f"{self.entry}: {name} must be [{sizes}], got {list(target.shape)}")
                target = target[:count]
            _copy(self.entry, name, target, values)
        rest = results[len(self.results) :]
        return rest[0] if rest else None


def _copy(entry: str, name: str, target: Tensor, values: Tensor) -> None:
    _check_shape(entry, name, target, values)
    target.copy_(values)


def _check_shape(entry: str, name: str, tensor: Tensor, like: Tensor) -> None:
    if tensor.shape != like.shape:
        raise ValueError(f"{entry}: {name} must be {list(like.shape)}, got {list(tensor.shape)}")


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
        _check_shape(entry, "grad_output", grad, result)
    grads = [grad.to(result.dtype) for result, grad in zip(results, grad_outputs, strict=True)]
    return torch.autograd.grad(results, leaves, grads, allow_unused=True, materialize_grads=True)
