"""The parts of an operator's benchmark file, which are cases, their work, and the peers that they are compared with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# The passes that are timed, in the order of the table. The deterministic passes run under
# torch.use_deterministic_algorithms(True), which also makes torch fill every new tensor. For "unfilled",
# torch.utils.deterministic.fill_uninitialized_memory is off, so that the operator alone is timed.
PASSES = ("forward", "backward", "both", "backward_deterministic", "backward_deterministic_unfilled")


# Errors relative to the largest value. Sums are float32, and positions have an error of half an ulp of their pixel
# coordinate (4e-6 at width 134); the error of plain torch in float32 is as large, up to 8e-6. What has 16 bits is
# rounded once, with a relative error of at most 2^-8 (bfloat16) or 2^-11 (float16).
ROUNDED = {torch.float32: 2e-5, torch.bfloat16: 5e-3, torch.float16: 6e-4}
COORDINATE_TOLERANCE = 2e-5


def tolerances(rounded: Sequence[str], coordinates: Sequence[str], dtype: torch.dtype) -> dict[str, float]:
    """Return the tolerances of results that are rounded to ``dtype``, and of gradients that stay float32."""
    return dict.fromkeys(rounded, ROUNDED[dtype]) | dict.fromkeys(coordinates, COORDINATE_TOLERANCE)


def seeded(seed: int = 0) -> torch.Generator:
    """Return a generator on the CPU, so that numbers are the same on every device."""
    return torch.Generator().manual_seed(seed)


@dataclass(frozen=True)
class Call:
    """An implementation with its arguments. ``differentiable`` are the positions that need gradients."""

    function: Callable[..., Tensor]
    arguments: tuple[Any, ...]
    differentiable: tuple[int, ...]


@dataclass(frozen=True)
class Work:
    """Bytes of one pass, counted from the sizes."""

    moved: int  # bytes if every input is read once and every output is written once
    gathered: int = 0  # bytes that samples read or add, all of which pass L1
    rows: int = 0  # the part of ``gathered`` that is read from random rows which L1 cannot hold
    reductions: int = 0  # the part of ``gathered`` that is added to random rows which L1 cannot hold
    rows_footprint: int = 0  # bytes over which the rows that are read are spread
    reductions_footprint: int = 0  # bytes over which the rows that are added to are spread


@dataclass(frozen=True)
class Peer:
    """Another implementation of the same operator."""

    name: str
    # This imports the peer and returns a function from the case's arguments to a Call. It raises an ImportError if the
    # peer is missing.
    load: Callable[[], Callable[..., Call]]


def peer_of(name: str, function: Callable[..., Tensor], differentiable: tuple[int, ...] = ()) -> Peer:
    """Return the peer that is a function of the operator's own arguments."""
    return Peer(name, lambda: lambda *arguments: Call(function, arguments, differentiable))


@dataclass(frozen=True)
class Case:
    """One named set of sizes and inputs of an operator."""

    op: str
    name: str
    sizes: str  # text for the report, such as "B2 Q300 G8 C32 P4 levels 100x134 50x67"
    make: Callable[
        [torch.dtype, torch.device], tuple[Any, ...]
    ]  # the arguments, the same numbers on every device
    function: Callable[..., Tensor]
    reference: Callable[..., Tensor]  # plain torch, which the gate runs in float64
    differentiable: dict[str, int]  # argument name: position; if empty, only the forward is checked and timed
    work: Callable[[torch.dtype], dict[str, Work]]  # the work of "forward" and "backward"
    tolerance: Callable[
        [torch.dtype], dict[str, float]
    ]  # for "output" and the gradient of each differentiable argument
    peers: Sequence[Peer] = ()
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    batched: tuple[int, ...] = ()  # positions of arguments whose first dimension is the batch
    checked_batches: tuple[int, ...] | None = (
        None  # the batches of the full run that the gate compares, or None for all
    )
    graph: bool = False  # on a GPU, replay from a CUDA graph, with the inputs warm in L2
    heavy: bool = False  # on a CPU, run only if --cases selects the case

    @property
    def title(self) -> str:
        """Return ``op/name``, with which --cases is matched."""
        return f"{self.op}/{self.name}"

    def call(self, arguments: tuple[Any, ...]) -> Call:
        """Return the operator itself as a Call."""
        return Call(self.function, arguments, tuple(self.differentiable.values()))


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as "float32" for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")
