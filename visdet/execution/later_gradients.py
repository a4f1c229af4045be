"""Gradients of parameters computed beside a backward pass, which does not wait for them."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from visdet.ops.fused import autocast_linear, parameter_gradients_go_to

_Rows = tuple[Tensor, range]  # a leaf and some rows of it
_Computation = tuple[Sequence[_Rows | None], Callable[[], Sequence[Tensor]]]

_MAX_ROWS = 8192  # of a linear layer; more rows would hold much memory until the backward pass ends
_TOGETHER = 32  # so many computations begin together


class LaterGradients(TorchFunctionMode):
    """Computes the gradients of linear and normalising layers on streams beside the backward pass.

    A backward pass needs the gradients of its activations at once, and those of parameters only at its end. In a graph
    the latter become branches, whose small kernels run while others do not fill the GPU. The mode must be on in the
    forward pass and in the backward pass.

    Args:
        leaves: the parameters, as leaf tensors. Others, and parts of them other than rows, are left to autograd.
        streams: the streams beside. Without any, all is computed on the current stream when it is joined.
    """

    def __init__(self, leaves: Sequence[Tensor], streams: Sequence[torch.cuda.Stream]) -> None:
        super().__init__()
        self._leaves = {leaf for leaf in leaves if leaf.requires_grad}
        self._streams = deque(streams)
        self._busy: set[torch.cuda.Stream] = set()
        self._origins: set[torch.cuda.Stream] = set()  # the streams that make what the waiting ones read
        self._waiting: list[_Computation] = []
        # It keeps the memory that they read from being used for something else.
        self._begun: list[_Computation] = []
        self._found: list[tuple[Any, Tensor]] = []  # rows of a leaf and their gradient

    @contextmanager
    def taking(self) -> Iterator[None]:
        """Run a block, forward pass or backward pass."""
        with self, parameter_gradients_go_to(self._take):
            yield

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_linear = func is F.linear and torch.is_grad_enabled()
        return (self._linear if is_linear else func)(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        is_cast = torch.is_autocast_enabled("cuda")
        dtype = torch.get_autocast_dtype("cuda") if is_cast else input.dtype
        parameters = [weight] if bias is None else [weight, bias]
        is_served = all(part.dtype == dtype and self._rows_of(part) for part in parameters)
        if not is_served or dtype == torch.float64 or not 0 < input.numel() < _MAX_ROWS * input.shape[-1]:
            return F.linear(input, weight, bias)
        return autocast_linear(input, weight, bias, dtype)

    def _rows_of(self, parameter: Tensor) -> _Rows | None:
        """Return the leaf that a parameter is or that it is some rows of, and those rows."""
        leaves = self._leaves
        if parameter in leaves:
            return parameter, range(len(parameter) if parameter.dim() else 1)
        leaf: Any = parameter._base
        if leaf not in leaves or not leaf.is_contiguous() or not parameter.is_contiguous():
            return None
        if parameter.shape[1:] != leaf.shape[1:]:
            return None
        first = (parameter.storage_offset() - leaf.storage_offset()) // leaf.stride(0)
        return leaf, range(first, first + len(parameter))

    def _take(self, parameters: Sequence[Tensor], compute: Callable[[], Sequence[Tensor]]) -> bool:
        places = list(map(self._rows_of, parameters))
        if None in places:
            return False
        waiting = self._waiting
        streams = self._streams
        waiting.append((places, compute))
        if streams:
            self._origins.add(torch.cuda.current_stream())
            if len(waiting) == _TOGETHER:
                stream = streams[0]
                streams.rotate()
                with torch.cuda.stream(stream):
                    self._compute()
                self._busy.add(stream)
        return True

    @torch.no_grad()
    def _compute(self) -> None:
        """Compute what waits on the current stream."""
        _wait_for(self._origins)
        waiting = self._waiting
        for places, compute in waiting:
            self._found += zip(places, compute(), strict=True)
        self._begun += waiting
        self._waiting = []

    def join(self) -> None:
        """Compute what is left, and let the current stream wait for all."""
        self._compute()
        _wait_for(self._busy)

    def has_found(self, leaf: Tensor) -> bool:
        """Return whether a leaf, or rows of it, got a gradient."""
        return any(found is leaf for (found, _), _ in self._found)

    def rounds(self, views: Iterable[tuple[Tensor, Tensor]]) -> list[list[tuple[Tensor, Tensor]]]:
        """Return pairs of a place and a gradient to be added there. The places of a round do not overlap.

        Args:
            views: pairs of a leaf and the tensor in which its gradient belongs.
        """
        view_of = dict(views)
        rounds: dict[int, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        # The rows of each leaf, and the rounds in which they are.
        taken: dict[Tensor, list[tuple[range, int]]] = defaultdict(list)
        for (leaf, rows), gradient in self._found:
            before = taken[leaf]
            number = max((other + 1 for others, other in before if _overlap(rows, others)), default=0)
            before.append((rows, number))
            view = view_of[leaf]
            rounds[number].append((view[rows.start : rows.stop] if view.dim() else view, gradient))
        return list(rounds.values())


def _wait_for(streams: set[torch.cuda.Stream]) -> None:
    """Let the current stream wait for others, which are then forgotten."""
    for stream in streams:
        torch.cuda.current_stream().wait_stream(stream)
    streams.clear()


def _overlap(one: range, other: range) -> bool:
    return one.start < other.stop and other.start < one.stop
