"""The tensors that a model computes in torch, by which those of a graph are recognised."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.module_tracker import ModuleTracker

from visdet.execution.tensor_tree import tensors_of

from .check import distance

_SAMPLES = 64  # numbers of a tensor that are compared first


@dataclass(frozen=True)
class Counterpart:
    """A tensor of a model that one of a graph is compared with.

    Attributes:
        operator, module: the operator of torch, and the module that has called it.
        number: its place in the order in which torch computes.
        distance: the greatest difference, each relative to the number and to a typical one.
        largest: the greatest difference.
    """

    operator: str
    module: str
    number: int
    distance: float
    largest: float


class _Listener(TorchDispatchMode):
    """Calls a function with each tensor that torch computes, as a list of numbers, its shape, and what has made it:
    the operator, the module, and the place in the order.
    """

    def __init__(self, hear: Callable[..., None]) -> None:
        super().__init__()
        self.hear = hear
        self.count = 0
        self.tracker = ModuleTracker()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        for tensor in tensors_of(found):
            if not tensor.is_complex():
                self.count += 1
                numbers = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
                maker = (str(function), max(self.tracker.parents, key=len), self.count)
                self.hear(numbers.numpy(force=True).reshape(-1), tensor.shape, maker)
        return found


def _listen(run: Callable[[], Any], hear: Callable[..., None]) -> None:
    """Run a model, and call a function with each tensor that torch computes, attention in its plain form."""
    listener = _Listener(hear)
    with torch.no_grad(), listener.tracker, sdpa_kernel(SDPBackend.MATH), listener:
        run()


def nearness(ours: np.ndarray, theirs: np.ndarray) -> tuple[float, float]:
    """Return the greatest differences of the numbers of two tensors: each relative to the number and to a typical one,
    which is the median of a sample, and the absolute one. Integers and booleans are equal or infinitely apart.
    """
    ours = ours.reshape(-1)
    theirs = theirs.reshape(-1)
    relative = float(
        distance(ours, theirs, np.abs(ours) + _typical(ours[_places(len(ours))])).max(initial=0.0)
    )
    are_floats = ours.dtype.kind == theirs.dtype.kind == "f"
    largest = float(distance(ours, theirs, 1.0).max(initial=0.0))
    return np.inf if relative > 0 and not are_floats else relative, largest


def _places(size: int) -> np.ndarray:
    return np.linspace(0, size - 1, min(size, _SAMPLES)).astype(int)


def _typical(numbers: np.ndarray) -> float:
    known = np.abs(numbers[np.isfinite(numbers) & (numbers != 0)])
    return float(np.median(known)) if known.size else 1.0


def counterparts(
    run: Callable[[], Any], values: Mapping[str, np.ndarray], limit: float
) -> dict[str, Counterpart]:
    """Return for each tensor of a graph the nearest one that torch computes, if it is within the limit.

    Tensors are compared as lists of numbers, so that another shape, but not another order of axes, is the same tensor.

    Args:
        run: a call of the model. values: the tensors of the graph by name. limit: the greatest distance.
    """
    groups: dict[int, dict[str, np.ndarray]] = defaultdict(dict)
    for name, value in values.items():
        groups[value.size][name] = value.reshape(-1)
    groups.pop(0, None)
    samples = {
        size: np.stack([value[_places(size)].astype(np.float64) for value in group.values()])
        for size, group in groups.items()
    }
    nearest: dict[str, Counterpart] = {}

    def hear(ours: np.ndarray, _: torch.Size, maker: tuple[str, str, int]) -> None:
        size = len(ours)
        if size not in groups:
            return
        sample = ours[_places(size)].astype(np.float64)
        apart = distance(sample, samples[size], np.abs(sample) + _typical(sample)).max(1)
        for (name, theirs), least in zip(groups[size].items(), apart, strict=True):
            known = nearest.get(name)
            if least > limit or (known and known.distance <= least):
                continue
            relative, largest = nearness(ours, theirs)
            if relative <= limit and (not known or relative < known.distance):
                nearest[name] = Counterpart(*maker, relative, largest)

    _listen(run, hear)
    return nearest


def nearest_of_shape(run: Callable[[], Any], value: np.ndarray, after: int) -> Counterpart | None:
    """Return the nearest tensor of the shape of one of a graph that torch computes after a place in the order."""
    found: list[Counterpart] = []

    def hear(ours: np.ndarray, shape: torch.Size, maker: tuple[str, str, int]) -> None:
        if maker[-1] > after and shape == value.shape:
            found.append(Counterpart(*maker, *nearness(ours, value)))

    _listen(run, hear)
    return min(found, key=lambda one: one.largest, default=None)
