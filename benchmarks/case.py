"""What the benchmark file of an operator is made of: cases, the work they do, and what they are compared with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

__all__ = ["PASSES", "Call", "Case", "Peer", "Work", "dtype_name"]

# What is timed, in the order of the table. The deterministic passes run under
# torch.use_deterministic_algorithms(True), which also makes torch fill every fresh tensor; "unfilled" is the same
# with torch.utils.deterministic.fill_uninitialized_memory off: the operator alone.
PASSES = ("forward", "backward", "both", "backward_deterministic", "backward_deterministic_unfilled")


@dataclass(frozen=True)
class Call:
    """An implementation with the arguments it wants; ``differentiable`` are the positions that need gradients."""

    function: Callable[..., Tensor]
    arguments: tuple[Any, ...]
    differentiable: tuple[int, ...]


@dataclass(frozen=True)
class Work:
    """Bytes and operations of one pass, counted from the sizes."""

    moved: int  # bytes: every input read once and every output written once
    flops: int  # additions and multiplications
    gathered: int = 0  # bytes that samples read or add, wherever they come from: all of it passes L1
    rows: int = 0  # the part of it read from random rows that L1 cannot hold
    reductions: int = 0  # the part of it added to random rows that L1 cannot hold
    rows_footprint: int = 0  # bytes those rows are spread over
    reductions_footprint: int = 0


@dataclass(frozen=True)
class Peer:
    """Another implementation of the same operator."""

    name: str
    # Imports it and returns a function from the case's arguments to a Call; raises ImportError where it is missing.
    load: Callable[[], Callable[..., Call]]
    memory: Callable[[tuple[Any, ...]], int] = lambda arguments: (
        0
    )  # estimate of its peak bytes, 0: not an issue


@dataclass(frozen=True)
class Case:
    """One named set of sizes and inputs of an operator."""

    op: str
    name: str
    sizes: str  # for people, such as "B2 Q300 G8 C32 P4 levels 100x134 50x67"
    make: Callable[
        [torch.dtype, torch.device], tuple[Any, ...]
    ]  # the arguments, the same numbers on every device
    function: Callable[..., Tensor]
    reference: Callable[..., Tensor]  # plain torch; run in float64 for the gate
    differentiable: dict[str, int]  # argument name: position; empty: the forward alone is checked and timed
    work: Callable[[torch.dtype], dict[str, Work]]  # of "forward" and "backward"
    tolerance: Callable[
        [torch.dtype], dict[str, float]
    ]  # of "output" and each differentiable argument's gradient
    peers: Sequence[Peer] = ()  # the first, usually plain torch, is the one ratios refer to
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    batched: tuple[int, ...] = ()  # positions of arguments whose first dimension is the batch
    checked_batches: tuple[int, ...] | None = (
        None  # what the gate compares, of the full run; None: everything
    )
    graph: bool = False  # replay from a CUDA graph on a GPU, inputs warm in L2
    heavy: bool = False  # on the CPU only when --cases selects it
    goals_us: dict[torch.dtype, dict[str, float]] = field(default_factory=dict)  # on an H200
    goals_ratio: dict[str, float] = field(default_factory=dict)  # float32 on a CPU, against the first peer

    @property
    def title(self) -> str:
        """Return ``op/name``, what --cases is matched with."""
        return f"{self.op}/{self.name}"

    def call(self, arguments: tuple[Any, ...]) -> Call:
        """Return the operator itself as a Call."""
        return Call(self.function, arguments, tuple(self.differentiable.values()))


def dtype_name(dtype: torch.dtype) -> str:
    """Return "float32" for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")
