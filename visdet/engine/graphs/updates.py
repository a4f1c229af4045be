"""The update of the parameters, replayed as a CUDA graph."""

import itertools
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from ..optim.gradients import parameters_in
from ..optim.muon import MuonWithAuxAdam
from ..optim.optim_wrapper import AmpOptimWrapper, OptimWrapper
from .calls import GraphedCall


class GraphedUpdate(GraphedCall):
    """What ``OptimWrapper.update`` does, replayed as a graph: unscaling, clipping and the step of the optimizer.

    Learning rates lie on the device in all updates, and are copied there when they have changed. The first update is
    not captured, because it makes the state of the optimizer. An update is captured when gradients, parameters and
    state lie where those of the update before lay, and the options of all groups are the same.

    Args:
        say: see :class:`GraphedCall`.
    """

    name = "update"
    what = "the update of the parameters"

    _rates: Sequence[Tensor] = ()  # the learning rates of all groups, on the device
    _values: Sequence[float] = ()
    _norm: Tensor | None = None  # the norm of the gradients that the graph writes

    def __call__(self, wrapper: OptimWrapper) -> None:
        """Update the parameters."""
        reason = why_not_a_graph(wrapper)
        if reason:
            self._run_without_graph(reason, wrapper.update)
            return
        optimizer = wrapper.optimizer
        with torch.cuda.device(next(parameters_in(optimizer.param_groups)).device):
            self._copy_rates(optimizer)
            self._run(partial(key_of, wrapper), partial(self._update, wrapper))
        norm = self._norm
        wrapper.grad_norm = None if norm is None else norm.clone()

    def _update(self, wrapper: OptimWrapper) -> None:
        with rates_on_device(wrapper.optimizer, self._rates):
            wrapper.update()
        self._norm = wrapper.grad_norm

    def _copy_rates(self, optimizer: Optimizer) -> None:
        """Bring the learning rates of all groups to the device, if they have changed."""
        groups = optimizer.param_groups
        values = [float(group["lr"]) for group in groups]
        if values == self._values:
            return
        if len(values) != len(self._values):
            device = next(parameters_in(groups)).device
            self._rates = [torch.zeros((), device=device) for _ in values]
        for rate, value in zip(self._rates, values, strict=True):
            rate.fill_(value)
        self._values = values


def why_not_a_graph(wrapper: Any) -> str:
    """Return why the updates of a wrapper cannot be a graph, or "" if nothing speaks against it."""
    optimizer = wrapper.optimizer
    kind = type(optimizer)
    name = kind.__name__
    groups = optimizer.param_groups
    kind_of_wrapper = type(wrapper)
    if kind_of_wrapper not in (OptimWrapper, AmpOptimWrapper):
        return f"{kind_of_wrapper.__name__} may do more than visdet's wrappers"
    is_known = kind.__module__.startswith("torch.optim") and (
        kind is SGD or "capturable" in optimizer.defaults
    )
    if not is_known and kind is not MuonWithAuxAdam:
        return f"{name} may compute on the host"
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return f"hooks of {name}.step may change it"
    if not all(isinstance(group["lr"], int | float) for group in groups):
        return "a learning rate is not a number"
    if not all(parameter.is_cuda for parameter in parameters_in(groups)):
        return "a parameter is not on a GPU"
    return ""


def key_of(wrapper: OptimWrapper) -> Hashable:
    """Return all that a graph of an update depends on besides numbers on the device and learning rates."""
    optimizer = wrapper.optimizer
    groups = optimizer.param_groups
    options = tuple(
        (name, repr(value))
        for group in groups
        for name, value in group.items()
        if name not in ("params", "lr")
    )
    parameters = list(parameters_in(groups))
    gradients = [parameter.grad for parameter in parameters]
    numbers = itertools.chain.from_iterable(state.values() for state in optimizer.state.values())
    places = [value.data_ptr() for value in (*parameters, *gradients, *numbers) if isinstance(value, Tensor)]
    return options, hash(tuple(places)), repr(wrapper.clip_grad_kwargs)


@contextmanager
def rates_on_device(optimizer: Optimizer, rates: Sequence[Tensor]) -> Iterator[None]:
    """Run the block with learning rates and counts of steps on the device, as a graph needs them.

    The parameters are in the order of their sizes, because torch's kernels for many tensors take some dozens at a time:
    a large one among small ones would be left to a part of the GPU.
    """
    groups = optimizer.param_groups
    before = [dict(group) for group in groups]
    for state in optimizer.state.values():
        if isinstance(state.get("step"), Tensor):
            state["step"] = state["step"].to(rates[0].device)
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate
        group["params"] = sorted(group["params"], key=Tensor.numel)
        # SGD has no other implementation that reads the rate on the device.
        group.update({"fused": True} if isinstance(optimizer, SGD) else {"capturable": True})
    try:
        yield
    finally:
        for group, options in zip(groups, before, strict=True):
            group.update(options)
