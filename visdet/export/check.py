"""Whether what was exported gives what the model gives, in the runtime of the format."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .errors import ExportError
from .families.family import Family, Tensors, seeded
from .precision import Tolerance

Arrays = dict[str, np.ndarray]
Run = Callable[[Tensors], Tensors]
# The relative change of weights, about that of rounding a few times, and how often it is drawn.
_ROUNDING, _DRAWS = 3e-7, 10


@dataclass
class Differences:
    """The largest and the mean difference of each output, and the number of compared inputs.

    Differences of numbers are divided by the greater of 1 and the largest number of that output. ``left_out`` is the
    number of cases that :func:`compare` leaves out.
    """

    largest: dict[str, float] = field(default_factory=dict)
    mean: dict[str, float] = field(default_factory=dict)
    count: int = 0
    left_out: int = 0

    def add(
        self, expected: Arrays, found: Arrays, rows: Mapping[str, tuple[str, ...]], limit: Tolerance
    ) -> None:
        """Add the comparison of the outputs of one call.

        Args:
            expected, found: the outputs of the model and of what was exported.
            rows: groups of outputs whose rows are sets; see ``Family``.
            limit: rows whose score is within its difference of the lowest one may be missing, because another row may
                have been chosen.
        """
        self.count += 1
        in_groups = set().union(*rows.values())
        misshapen = set()
        for name, values in expected.items():
            given = found[name]
            if given.shape != values.shape:
                self._note(name, np.array([np.inf]))
                misshapen.add(name)
            elif name not in in_groups:
                self._note(name, _distance(values, given))
        for score, names in rows.items():
            for sample in range(len(expected[score]) if misshapen.isdisjoint(names) else 0):
                ours = {name: expected[name][sample] for name in names}
                theirs = {name: found[name][sample] for name in names}
                self._add_rows(ours, theirs, score, limit.difference)
                self._add_rows(theirs, ours, score, limit.difference)

    def _add_rows(self, ours: Arrays, theirs: Arrays, score: str, limit: float) -> None:
        distances = {name: _row_distances(ours[name], theirs[name]) for name in ours}  # [K, K] each
        nearest = np.max(list(distances.values()), axis=0).argmin(1)
        scores = ours[score].reshape(len(nearest), -1).max(1)
        is_certain = scores > scores.min() + 2 * limit
        chosen = np.flatnonzero(is_certain) if is_certain.any() else np.arange(len(nearest))
        for name, distance in distances.items():
            self._note(name, distance[chosen, nearest[chosen]])

    def _note(self, name: str, distance: np.ndarray) -> None:
        if distance.size:
            before = self.mean.get(name, 0.0)
            self.mean[name] = before + (float(distance.mean()) - before) / self.count
            self.largest[name] = max(self.largest.get(name, 0.0), float(distance.max()))

    @property
    def most(self) -> float:
        """The largest difference of all outputs, or -1 before any input."""
        return max(self.largest.values(), default=-1.0)

    def table(self) -> dict[str, Any]:
        """Return what a report says."""
        return {
            "inputs": self.count,
            "left_out": self.left_out,
            "outputs": {
                name: {"largest": largest, "mean": self.mean[name]} for name, largest in self.largest.items()
            },
        }

    def beyond(self, limit: Tolerance) -> list[str]:
        """Return which outputs differ by more than the limit, and by how much."""
        judged = self.mean if limit.of_the_mean else self.largest
        return [f"{name} by {value:.3g}" for name, value in judged.items() if not value <= limit.difference]

    def check(self, limit: Tolerance) -> None:
        """Raise an ExportError if an output differs by more than the limit."""
        if wrong := self.beyond(limit):
            raise ExportError(
                f"the exported model gives other results than the model: {', '.join(wrong)} (relative to the largest "
                f"number of the output, limit {limit.difference:g}, {self.count} inputs)"
            )


def _distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return |a - b| relative to the largest number."""
    finite = np.abs(a[np.isfinite(a)].astype(np.float64))
    return distance(a, b, finite.max(initial=1.0))


def distance(a: np.ndarray, b: np.ndarray, scale: Any) -> np.ndarray:
    """Return |a - b| / scale. Equal infinite numbers and two NaN are equal."""
    a = a.astype(np.float64)
    b = b.astype(np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        distance = np.where(same, 0.0, np.abs(a - b) / scale)
    return np.where(np.isnan(distance), np.inf, distance)


def _row_distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the largest distance of each pair of rows [K, K]. Integers, such as labels, are equal or 1 apart."""
    a = a.reshape(len(a), 1, -1)
    b = b.reshape(1, len(b), -1)
    if a.dtype.kind != "f":
        return (a != b).any(-1).astype(np.float64)
    return _distance(a, b).max(-1, initial=0.0)


def arrays(tensors: Mapping[str, Tensor]) -> Arrays:
    """Return tensors as arrays."""
    return {name: tensor.numpy(force=True) for name, tensor in tensors.items()}


def compare(
    family: Family, run: Run, limit: Tolerance, leaves_out: bool = True
) -> tuple[Differences, Tensors, Tensors]:
    """Compare the model and what was exported on the family's cases, each with its own state.

    A case beyond the limit is left out if the model itself goes beyond it where its weights change by rounding: two of
    its queries are then so close that their order, and with it their objects, says nothing of what was exported.

    Args:
        family, run, limit: the model, what was exported, and the greatest difference.
        leaves_out: whether such cases are left out.

    Returns:
        the differences, and the inputs and outputs of the first call that is not left out.

    Raises:
        ExportError: all cases are left out.
    """
    differences = Differences()
    sample: Any = None
    for calls in family.cases():
        before = copy.deepcopy(differences)
        first = _compare_case(differences, family, run, calls, limit)
        if leaves_out and differences.beyond(limit) and _rounding_decides(family, calls, limit):
            differences = before
            differences.left_out += 1
        else:
            sample = sample or first
    if sample is None:
        raise ExportError(
            f"the model itself gives other results, beyond the limit {limit.difference:g}, where its weights change by "
            f"{_ROUNDING:g} of their values, for all {differences.left_out} inputs, so that nothing can be compared"
        )
    return differences, *sample


def _compare_case(
    differences: Differences, family: Family, run: Run, calls: Sequence[Tensors], limit: Tolerance
) -> tuple[Tensors, Tensors]:
    """Add the comparison of a sequence of calls, and return the inputs and outputs of the first one."""
    state: Tensors = {}
    exported_state: Tensors = {}
    first: Any = None
    for given in calls:
        expected = family.run({**given, **state})
        inputs = {**given, **exported_state}
        found = run(inputs)
        differences.add(arrays(expected), arrays(found), family.rows, limit)
        first = first or (inputs, found)
        state = family.state_after(expected)
        exported_state = family.state_after(found)
    return first


@torch.no_grad()
def _rounding_decides(family: Family, calls: Sequence[Tensors], limit: Tolerance) -> bool:
    """Return whether a model gives results beyond the limit where its weights change by rounding."""
    generator = seeded()
    for _ in range(_DRAWS):
        changed = copy.deepcopy(family)
        for weight in changed.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.mul_(1 + _ROUNDING * noise.to(weight.device))
        differences = Differences()
        _compare_case(differences, family, changed.run, calls, limit)
        if differences.beyond(limit):
            return True
    return False


def graphed(family: Family, inputs: Tensors) -> Callable[[], Any]:
    """Return a function that replays a CUDA graph of the model itself for these inputs."""
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        family.run(inputs)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        family.run(inputs)
    return graph.replay


def latencies(call: Callable[[], Any], batch: int) -> dict[str, float]:
    """Return ``p50_ms``, ``p99_ms`` and ``images_per_second`` of a call."""
    from torch.utils.benchmark import Timer  # Its import looks for CUDA and prints where that is.

    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    timer.timeit(3)
    times = timer.blocked_autorange(min_run_time=3.0).times
    p50, p99 = np.percentile(times, [50, 99]) * 1e3
    return {"p50_ms": p50, "p99_ms": p99, "images_per_second": batch / float(np.mean(times))}
