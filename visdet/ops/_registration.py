"""Registers the shapes and gradients of the libraries' operators, for autograd, ``torch.compile`` and exports."""

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from types import MappingProxyType, SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ._library import declares, explain_failures, kernel_device, operator_of, require, serves
from .tracing import gradients_of, is_traced

_RESULT = re.compile(r"(\w+) \[(.*?)\](?: (\w+))?")

__all__ = ["Gradient", "differentiable", "differentiable_once", "needs_order", "without_gradient"]


def differentiable(
    name: str,
    shape: str | Callable[[Any], Any],
    *,
    layouts: Mapping[str, str] | None = None,
    gradient: Any = None,
    elsewhere: Callable[..., Any] | None = None,
    needs_library: bool = True,
    **options: Any,
) -> Callable[..., Any]:
    """Register the shapes and the gradient of ``visdet::<name>``, and return the function that Python code calls.

    The schema in C++ declares the arguments.

    The registered gradient serves ``torch.compile``, exports, traces, ``torch.func.vmap`` and callers of
    ``torch.ops.visdet``. The transforms of ``torch.func`` that differentiate refuse it. An eager call of the returned
    function uses an ``autograd.Function`` instead. That takes less time on the host than torch's wrapper of a
    registered gradient, and differentiating it twice raises an error. The returned function refuses tensors with a
    tangent, because torch would return a tangent of zeros.

    Args:
        shape: the results, each with an argument that has its type and device, its dimensions, which are numbers,
            those of ``layouts`` and integer arguments, and a type if that differs: "images [B, C, 2 * H, size] int32".
            Or a function that returns empty results. Its argument has the operator's arguments as attributes.
        layouts: the dimensions of the tensors whose shapes that needs, such as {"images": "[B, C, H, W]"}.
        gradient: an object with the three methods of ``Gradient``, which is used otherwise.
        elsewhere: a function of the same arguments in plain torch, for devices that have no kernels.
        needs_library: whether calls on a CPU or a GPU fail where its library is missing. ``elsewhere`` serves them
            otherwise.
        options: those of ``Gradient``. With its ``reference``, eager calls can be differentiated twice, and
            ``torch.func`` and tangents get that function.
    """
    if not declares(name):
        return elsewhere if elsewhere and not needs_library else lambda *_: require("cpu")
    rule = gradient or Gradient(name, **options)
    reference = getattr(rule, "reference", None)
    torch.library.register_fake(f"visdet::{name}", _fake_of(name, shape, layouts or {}))
    torch.library.register_fake(f"visdet::{name}_backward", rule.fake)
    torch.library.register_autograd(f"visdet::{name}", rule.backward, setup_context=rule.save)
    refuse = functools.partial(_refuse_to_differentiate, name)
    torch.library.register_autograd(f"visdet::{name}_backward", refuse)
    explain_failures(name, f"{name}_backward")
    operator = operator_of(name)

    below_autograd = torch._C._AutoDispatchBelowAutograd

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            with below_autograd():
                output = operator(*inputs)
            rule.save(ctx, inputs, output)
            return output

        @staticmethod
        def backward(ctx: Any, *grad_outputs: Any) -> Any:
            if reference or torch.is_grad_enabled():
                return rule.backward(ctx, *grad_outputs)
            with below_autograd():
                return rule.backward(ctx, *grad_outputs)

    def call(*inputs: Any) -> Any:
        if elsewhere and not (
            inputs[0].device.type in ("cpu", "cuda", "meta") if needs_library else serves(inputs[0])
        ):
            return elsewhere(*inputs)
        if reference and (forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()):
            return reference(*inputs)
        if forward_ad._current_level >= 0 and any(
            isinstance(one, Tensor) and forward_ad.unpack_dual(one).tangent is not None for one in inputs
        ):
            raise NotImplementedError(f"{name}: forward-mode derivatives (jvp, jacfwd) are not implemented")
        if is_traced():
            return operator(*inputs)
        if torch.is_grad_enabled():
            return Eager.apply(*inputs)
        with below_autograd():
            return operator(*inputs)

    return call


def without_gradient(
    name: str, shape: str | Callable[[Any], Any], elsewhere: Callable[..., Any], **layouts: str
) -> Callable[..., Any]:
    """Register the shapes of ``visdet::<name>``, which has no gradient, and return the function that Python code calls.

    ``shape``, ``elsewhere`` and ``layouts`` are those of ``differentiable``. ``elsewhere`` also serves devices whose
    library is missing.
    """
    if not declares(name):
        return elsewhere
    torch.library.register_fake(f"visdet::{name}", _fake_of(name, shape, layouts))
    explain_failures(name)
    operator = operator_of(name)
    return lambda *inputs: (operator if serves(inputs[0]) else elsewhere)(*inputs)


class Gradient:
    """The gradient of ``visdet::<name>``, which its schema and that of ``visdet::<name>_backward`` describe.

    The second takes ``grad_output``, the arguments of the first, tensors first, and flags: ``needs_<argument>`` and
    ``deterministic``. It returns a ``grad_<argument>`` for each argument that has a gradient, with the argument's shape
    (or empty if it is not needed) and type.

    Args:
        name: the operator.
        wide: an argument in whose type the gradient of the result is passed on. The default is its own type.
        channels_last: the arguments whose gradients are channels last where they are so themselves.
        reference: the operator in plain torch, whose gradients are differentiable, and deterministic where the operator
            without a flag ``deterministic`` is not, on CUDA.
        computed_with: by an argument without a flag, the argument with whose gradient its own is computed.
    """

    def __init__(
        self,
        name: str,
        wide: str | None = None,
        channels_last: Sequence[str] = (),
        reference: Callable[..., Tensor] | None = None,
        computed_with: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        operator = self._operator = operator_of(f"{name}_backward")
        arguments = operator_of(name)._schema.arguments
        names = [argument.name for argument in arguments]
        given = [argument.name for argument in operator._schema.arguments]
        results = [result.name.removeprefix("grad_") for result in operator._schema.returns]
        self._given, self._results, self._channels_last = given, results, channels_last
        self._flag_of = {name: f"needs_{computed_with.get(name, name)}" for name in results}
        self._flags = []  # for each the places of its arguments, none for ``deterministic``
        for flag in given[1 + len(names) :]:
            self._flags.append([names.index(name) for name in results if self._flag_of[name] == flag])
        self._tensors = sum("Tensor" in str(argument.type) for argument in arguments)
        assert given[: 1 + len(names)] == ["grad_output", *names] and set(results) <= set(names), name
        self._wide = None if wide is None else names.index(wide)
        self.reference = reference
        # The gradients of the arguments are the results and, for the arguments without one, the None behind them.
        self._in_order = itemgetter(*(results.index(name) if name in results else -1 for name in names))

    def fake(self, *inputs: Any, **options: Any) -> Any:
        given = dict(zip(self._given, inputs, strict=False)) | options

        def empty(name: str) -> Tensor:
            tensor = given[name]
            if tensor is None or not given.get(self._flag_of[name], True):
                return (given["grad_output"] if tensor is None else tensor).new_empty(0)
            is_channels_last = name in self._channels_last and tensor.is_contiguous(
                memory_format=torch.channels_last
            )
            return torch.empty_like(tensor) if is_channels_last else tensor.new_empty(tensor.shape)

        gradients = tuple(empty(name) for name in self._results)
        return gradients if len(gradients) > 1 else gradients[0]

    def save(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[: self._tensors])
        ctx.numbers = inputs[self._tensors :]

    def backward(self, ctx: Any, grad_output: Tensor) -> Any:
        tensors = ctx.saved_tensors
        if self.reference and (torch.is_grad_enabled() or needs_order(grad_output)):
            return gradients_of(self.reference, grad_output, (*tensors, *ctx.numbers), ctx.needs_input_grad)
        if self._wide is not None:
            grad_output = grad_output.to(tensors[self._wide].dtype)
        needs = ctx.needs_input_grad
        flags = []
        for places in self._flags:
            is_needed = any(needs[place] for place in places)
            flags.append(is_needed if places else torch.are_deterministic_algorithms_enabled())
        found = self._operator(grad_output, *tensors, *ctx.numbers, *flags)
        gradients = self._in_order((*found, None) if isinstance(found, tuple) else (found, None))
        # An argument that is None has no gradient.
        return tuple(one if is_needed else None for one, is_needed in zip(gradients, needs, strict=True))


def needs_order(tensor: Tensor) -> bool:
    """Return whether sums to which threads of a GPU add in any order are refused."""
    return torch.are_deterministic_algorithms_enabled() and kernel_device(tensor) == "cuda"


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the backward of an ``autograd.Function`` such that differentiating its results raises an error.

    torch's ``once_differentiable`` raises it only if the gradients of the outputs have gradients themselves. Most
    results depend on the inputs, too, and that part of a second derivative would be missing without a word.
    """

    @torch.autograd.function.once_differentiable
    def backward_once(ctx: Any, _: Tensor, *grad_outputs: Any) -> Any:
        return backward(ctx, *grad_outputs)

    @functools.wraps(backward)
    def checked(ctx: Any, *grad_outputs: Any) -> Any:
        if not torch.is_grad_enabled():
            return backward(ctx, *grad_outputs)
        return backward_once(ctx, torch.empty(0, requires_grad=True), *grad_outputs)

    return checked


def _fake_of(name: str, shape: str | Callable[[Any], Any], layouts: Mapping[str, str]) -> Callable[..., Any]:
    """Return a function of the operator's arguments that checks their dimensions and devices, and makes the results.

    torch calls it for a tensor without data beside a first tensor with data, too, where the result would be numbers
    that nothing has computed.
    """
    names = [argument.name for argument in operator_of(name)._schema.arguments]

    def fake(*inputs: Any, **options: Any) -> Any:
        given = SimpleNamespace(**dict(zip(names, inputs, strict=False)), **options)
        device = inputs[0].device
        for argument, tensor in vars(given).items():
            if device.type != "meta" and isinstance(tensor, Tensor) and tensor.device.type == "meta":
                raise RuntimeError(
                    f"{name}: {argument} must be on the device {device} of {names[0]}, got meta"
                )
        sizes: dict[str, Any] = {}
        for argument, layout in layouts.items():
            tensor = getattr(given, argument)
            if tensor.dim() != layout.count(",") + 1:
                raise RuntimeError(f"{name}: {argument} must be {layout}, got {tuple(tensor.shape)}")
            sizes |= zip(layout.strip("[]").split(", "), tensor.shape, strict=True)
        return _empty(shape, given, sizes) if isinstance(shape, str) else shape(given)

    return fake


def _empty(results: str, given: Any, sizes: Mapping[str, Any]) -> Any:
    """Return empty results that are described as of ``differentiable``, one alone or a tuple."""

    def size_of(factor: str) -> Any:
        return int(factor) if factor.isdigit() else sizes.get(factor, getattr(given, factor, None))

    found = []
    for argument, layout, dtype in _RESULT.findall(results):
        shape = []
        for dimension in filter(None, layout.split(", ")):
            shape.append(math.prod(map(size_of, dimension.split(" * "))))
        found.append(getattr(given, argument).new_empty(shape, dtype=getattr(torch, dtype, None)))
    return tuple(found) if len(found) > 1 else found[0]


def _refuse_to_differentiate(name: str, *_: Any) -> NoReturn:
    raise RuntimeError(f"{name}: it has no second derivative, so that its gradient cannot be differentiated")
