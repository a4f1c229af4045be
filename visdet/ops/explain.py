"""Explains which kernels a call of an operator uses on a GPU, and why, without running them."""

import functools
import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from . import _library
from ._arguments import check_that
from .devices import DEVICES, Device, present_device

__all__ = ["Explanation", "KernelLaunch", "OperatorPlan", "choose_for", "choose_only", "explain"]


@dataclass(frozen=True)
class KernelLaunch:
    """The launch of a CUDA kernel, with its blocks, and the threads and the bytes of shared memory of a block."""

    kernel: str
    grid: tuple[int, int, int]
    threads: int
    static_shared: int
    dynamic_shared: int


@dataclass
class OperatorPlan:
    """The plan of one operator: the path that it takes, earlier paths that declined, and its kernels in order."""

    op: str
    path: str | None = None  # None if the operator has only one path
    declined: list[tuple[str, str]] = field(default_factory=list)  # (path, reason)
    launches: list[KernelLaunch] = field(default_factory=list)


@dataclass
class Explanation:
    """The answer of ``explain``. Converted by str, it is a text for people."""

    operator: str
    device: str
    plans: list[OperatorPlan]

    def paths(self) -> dict[str, str | None]:
        """Return the path of each operator that the call consists of."""
        return {plan.op: plan.path for plan in self.plans}

    def __str__(self) -> str:
        lines = [f"{self.operator} on {self.device}"]
        for plan in self.plans:
            lines.append(f"  {plan.op}: " + (f"path {plan.path!r}" if plan.path else "the only path"))
            lines += [f"    not {path!r}: {reason}" for path, reason in plan.declined]
            for launch in plan.launches:
                grid = " x ".join(map(str, launch.grid))
                shared = launch.static_shared + launch.dynamic_shared
                lines.append(
                    f"    {launch.kernel}: {grid} blocks of {launch.threads} threads, "
                    f"{shared} bytes of shared memory a block"
                )
        return "\n".join(lines)


# The arguments of public functions that are floating-point numbers and cannot have a gradient.
_CONSTANTS = ("fixed", "projection", "image_wh")
# The functions that need what tensors hold. They have no kernel of visdet's on a GPU.
_ON_DATA = ("soft_nms", "nms_match", "masked_conv2d")
_NO_KERNEL = ", where it starts no kernel of visdet's"


def explain(
    operator: str | Callable[..., Any],
    *arguments: Any,
    device: str | Device | None = None,
    backward: bool = True,
    **keywords: Any,
) -> Explanation:
    """Return which path a call of an operator takes on a GPU, why earlier ones declined, and the kernels it launches.

    Nothing is computed and no memory of a GPU is allocated, because the operator runs on tensors without data. A
    machine without a GPU can therefore answer for any device.

    Args:
        operator: A function of ``visdet.ops`` or its name.
        arguments: The arguments of the function. Tensors on the CPU stand for tensors on ``device``, except for
            ``level_shapes`` and ``level_starts``, which stay where they are.
        device: A name of ``visdet.ops.devices.DEVICES`` or the numbers of a device. The default is the device of the
            tensors.
        backward: Whether to explain the gradients, too. They are those of the tensors that require one or, if none
            does, of all tensors of floating-point type that can have one.
        keywords: The keyword arguments of the function.

    Returns:
        The explanation. ``str`` makes a text of it, and ``plans`` has a plan for each operator that the call consists
        of. There is none for what torch or torchvision compute.

    Raises:
        ValueError: The operator or the device has no such name.
        NotBuiltError: The CUDA library is not loaded.

    It also raises whatever the operator raises for these arguments.
    """
    function, name = _function_of(operator)
    bound = inspect.signature(function).bind(*arguments, **keywords)
    tensors = [value for value in bound.arguments.values() if isinstance(value, Tensor)]
    on_gpu = next((tensor for tensor in tensors if tensor.is_cuda), None)
    if device is None and on_gpu is None:
        isa = _library.build_info()["cpu"]["isa"]
        return Explanation(name, f"the CPU ({isa} kernels), where every operator has one path", [])
    _library.require("cuda")
    numbers, title = _numbers_of(device, on_gpu)
    needs_all = backward and not any(tensor.requires_grad for tensor in tensors)
    for key, value in bound.arguments.items():
        bound.arguments[key] = _without_data(value, key, needs_all and key not in _CONSTANTS)
    if name in _ON_DATA:
        return Explanation(name, title + _NO_KERNEL, [])

    torch.ops.visdet_plan.begin_plan(numbers.numbers())
    try:
        with _library.planning(), _Planner(), torch.enable_grad():
            result = function(*bound.args, **bound.kwargs)
            results = result if isinstance(result, (list, tuple)) else [result]
            roots = [value for value in results if isinstance(value, Tensor) and value.requires_grad]
            if backward and roots:
                torch.autograd.backward(roots, [torch.empty_like(root) for root in roots])
    finally:
        notes = json.loads(torch.ops.visdet_plan.end_plan())
    plans = _plans_of(notes)
    return Explanation(name, title if plans else title + _NO_KERNEL, plans)


def choose_for(device: str | Device) -> AbstractContextManager[None]:
    """Make this thread's calls on CUDA choose and size their kernels as on ``device``. This is meant for tests.

    The kernels run on the present GPU. Backward passes stay in the calling thread within the block.
    """
    numbers, _ = _numbers_of(device, None)
    return _chosen(torch.ops.visdet_plan.choose_for, (numbers.numbers(),), ([],))


def choose_only(op: str, path: str) -> AbstractContextManager[None]:
    """Make this thread's calls of ``op`` on CUDA take this path or fail. This is meant for tests and measurements.

    ``op`` is the operator's name, with ``_backward`` for its gradients. Backward passes stay in the calling thread
    within the block.
    """
    _library.require("cuda")
    return _chosen(torch.ops.visdet_plan.choose_only, (op, path), (op, ""))


@contextmanager
def _chosen(choose: Callable[..., None], of: tuple[Any, ...], of_none: tuple[Any, ...]) -> Iterator[None]:
    choose(*of)
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        choose(*of_none)


def _function_of(operator: str | Callable[..., Any]) -> tuple[Callable[..., Any], str]:
    if callable(operator):
        return operator, getattr(operator, "__name__", str(operator))
    from .. import ops

    function: Any = getattr(ops, operator, None)
    fits = inspect.isfunction(function) and operator in ops.__all__
    expected = "be a function of visdet.ops or its name"
    check_that(fits, "explain", "operator", expected, repr(operator))
    return function, operator


def _numbers_of(device: str | Device | None, tensor: Tensor | None) -> tuple[Device, str]:
    if isinstance(device, Device):
        return device, "a made-up device"
    if device is not None:
        expected = "be one of {} or a visdet.ops.devices.Device"
        check_that(device in DEVICES, "explain", "device", expected, repr(device), sorted(DEVICES))
        return DEVICES[device], device
    assert tensor is not None
    index = tensor.device.index
    return present_device(index), torch.cuda.get_device_name(index)


def _without_data(value: Any, name: str, needs_grad: bool) -> Any:
    """Return a tensor of the same sizes, strides and alignment on the meta device. Other values do not change."""
    if isinstance(value, (list, tuple)):
        return type(value)(_without_data(item, name, needs_grad) for item in value)
    if not isinstance(value, Tensor) or (value.is_cpu and name.startswith("level_")):
        return value  # Level tables on the host stay there.
    offset = 0 if value.is_meta else value.data_ptr() % 16 // value.element_size()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    memory = torch.empty(offset + max(extent, 0), dtype=value.dtype, device="meta")
    copy = memory.as_strided(value.shape, value.stride(), offset)
    return copy.requires_grad_(needs_grad or value.requires_grad) if value.is_floating_point() else copy


def _plans_of(notes: list[dict[str, Any]]) -> list[OperatorPlan]:
    plans: list[OperatorPlan] = []
    plan: OperatorPlan | None = None
    for note in notes:
        kind = note["kind"]
        op = note["op"]
        if plan is None or plan.op != op or (kind != "launch" and plan.path is not None):
            plan = OperatorPlan(op)
            plans.append(plan)
        if kind == "declined":
            plan.declined.append((note["path"], note["reason"]))
        elif kind == "chosen":
            plan.path = note["path"]
        else:
            sizes = (note["threads"], note["static_shared"], note["dynamic_shared"])
            plan.launches.append(KernelLaunch(note["kernel"], tuple(note["grid"]), *sizes))
    return plans


_declared = torch.library.Library("visdet_plan", "FRAGMENT")


@functools.cache
def _plan_operator(operator: Any) -> Any:
    """Return the CUDA library's function of ``visdet::<op>`` for tensors without data, or None if it has none."""
    _, name = operator._schema.name.split("::")
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"visdet_plan::{name}", "Meta"):
        return None
    _declared.define(str(operator._schema).replace("visdet::", "", 1))
    return getattr(torch.ops.visdet_plan, name).default


class _Planner(TorchDispatchMode):
    """Passes calls of ``visdet::`` operators to the CUDA library, which notes the kernels that it would launch."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        planned = _plan_operator(func) if func.namespace == "visdet" else None
        return (planned or func)(*args, **(kwargs or {}))
