"""What a family of problems is, and how one is drawn at random."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

__all__ = ["Draw", "Family", "Problem", "Result"]

FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
EXTREME = 1e4  # a number of this magnitude or more is not compared: the operator may overflow where float64 does not
BAD_NUMBERS = (float("nan"), float("inf"), -float("inf"), 1e30, -1e30, 65504.0, -0.0, 1e-40, -1e-42, 0.0)
MARGIN = float("nan")  # what surrounds a view in memory: reading it shows in the result

Result = Tensor | tuple[Tensor, ...]


@dataclass
class Problem:
    """One call of an operator, and what of its result can be compared."""

    arguments: dict[str, Any]
    differentiable: tuple[str, ...] = ()
    # Arguments whose NaN, infinite and huge numbers have a defined meaning; in all others such a number makes what
    # depends on it undefined, and that is not compared.
    positions: tuple[str, ...] = ()
    reference_arguments: dict[str, Any] = field(default_factory=dict)  # in place of those of the call
    wide: torch.dtype = torch.float32  # the type in which the operator computes
    epsilon: float | None = None  # of its sums and intermediate results; None: of that type
    error_factor: float = 64.0  # rounding errors allowed, in units of epsilon
    absolute: dict[str, float] = field(default_factory=dict)  # errors allowed besides
    skip: dict[str, Tensor | bool] = field(
        default_factory=dict
    )  # what is not compared, of "output" and gradients
    may_refuse: str = ""  # why the operator may refuse the problem
    must_refuse: str = ""  # why it has to


@dataclass
class Family:
    """How problems of an operator are drawn, called and computed in float64.

    Args:
        name: of the operator; every error message has to name it.
        call: the operator, called with ``Problem.arguments``.
        draw: makes a problem.
        reference: the same as ``call`` in plain torch, for float64 tensors.
        bounds: corrects the magnitudes that errors are relative to, {"output" or an argument's name: number}. They are
            the largest entries of the reference's results for the magnitudes of all arguments but positions, which is
            no bound where an argument does not enter linearly.
        compare: compares results that are not numbers with a rounding error; returns what is wrong, or "".
        spoiled: arguments of which one may be spoiled on purpose, with what can be wrong: "rank", "type", "device", or
            the number of a dimension, which is then one longer.
        aliases: further names under which errors may come.
        reads_beside: arguments of which CUDA kernels read numbers with weight zero for corners outside a map, so that a
            NaN or infinite one, in them or in the gradient of the result, may reach more than the definition says.
        scatters_beside: arguments of which a NaN or infinite number may likewise reach gradients of ``reads_beside``.
    """

    name: str
    call: Callable[..., Any]
    draw: Callable[["Draw"], Problem]
    reference: Callable[..., Any]
    bounds: Callable[[Problem, dict[str, float]], None] | None = None
    compare: Callable[[Problem, Any, Any], str] | None = None
    spoiled: dict[str, Sequence[str | int]] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    reads_beside: tuple[str, ...] = ()
    scatters_beside: tuple[str, ...] = ()


class Draw:
    """A source of random sizes, numbers and memory layouts; everything follows from the family's name and the seed."""

    def __init__(self, name: str, seed: int, device: str) -> None:
        self.random = random.Random(f"{name} {seed}")
        self.generator = torch.Generator().manual_seed(self.random.getrandbits(62))
        self.device = device
        self.has_bad_numbers = self.chance(0.2)

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def pick(self, *options: Any) -> Any:
        return self.random.choice(options)

    def size(self, limit: int, zero: float = 0.02) -> int:
        """Return a size up to ``limit``, mostly small; 0 with probability ``zero``."""
        if self.chance(zero):
            return 0
        return round((limit + 0.49) ** self.random.random())

    @property
    def is_big(self) -> bool:
        """Whether this problem is one of the rare big ones; drawn anew each time it is asked."""
        return self.chance(0.03 if self.device == "cuda" else 0.01)

    def dtype(self, *options: torch.dtype) -> torch.dtype:
        return self.pick(*(options or (*FLOATING, torch.float32)))

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, dtype=torch.float64) * (high - low) + low

    def whole(self, low: int, high: int, *shape: int) -> Tensor:
        """Return whole numbers, int64, from ``low`` to below ``high``."""
        return torch.randint(low, high, shape, generator=self.generator)

    def numbers(self, *shape: int) -> Tensor:
        """Return numbers of any kind: normal, of another magnitude, all equal, small whole ones or zeros."""
        kind = self.random.random()
        if kind < 0.8:
            return torch.randn(shape, generator=self.generator, dtype=torch.float64)
        if kind < 0.88:
            scale = 10 ** self.random.uniform(-3, 3)
            return torch.randn(shape, generator=self.generator, dtype=torch.float64) * scale
        if kind < 0.92:
            return torch.full(shape, self.random.gauss(0, 1), dtype=torch.float64)
        if kind < 0.97:
            return self.whole(-3, 4, *shape).double()
        return torch.zeros(shape, dtype=torch.float64)

    def with_bad_numbers(self, tensor: Tensor, probability: float = 0.5) -> Tensor:
        """Return the tensor, in some problems with NaN, infinity, huge, denormal or negative zero here and there."""
        if not self.has_bad_numbers or tensor.numel() == 0 or not self.chance(probability):
            return tensor
        tensor = tensor.clone()
        count = 1 if self.chance(0.5) else self.random.randint(1, max(1, tensor.numel() // 8))
        places = self.whole(0, tensor.numel(), count)
        kinds = torch.tensor(BAD_NUMBERS, dtype=tensor.dtype)
        tensor.view(-1)[places] = kinds[self.whole(0, len(BAD_NUMBERS), count)]
        return tensor

    def place(self, tensor: Tensor, dtype: torch.dtype | None = None, can_expand: bool = True) -> Tensor:
        """Return the tensor on the device in a type, laid out in memory in one of many ways.

        Views are surrounded by NaN (or ones). An expanded one repeats its first entry along a dimension.
        """
        tensor = tensor.to(dtype or tensor.dtype).to(self.device)
        kind = self.random.random()
        if kind < 0.45 or tensor.dim() == 0:
            return tensor.clone()
        if kind < 0.6:
            return self._shifted(tensor, self.random.randint(1, 3))
        order = list(range(tensor.dim()))
        if kind < 0.75:
            self.random.shuffle(order)
            if tensor.dim() == 4 and self.chance(0.5):
                order = [0, 2, 3, 1]  # channels last
            inverse = [order.index(d) for d in range(len(order))]
            return self._shifted(tensor.permute(order), self.pick(0, 0, 1, 2)).permute(inverse)
        dim = self.random.randrange(tensor.dim())
        if kind < 0.9 or not can_expand:
            step, start = self.pick((2, 1), (1, 1), (1, 3), (3, 0))
            shape = list(tensor.shape)
            shape[dim] = shape[dim] * step + start
            around = self._filled(shape, tensor)
            view = around.narrow(dim, start, shape[dim] - start)
            view = view[(slice(None),) * dim + (slice(None, None, step),)]
            view.copy_(tensor)
            return view
        if tensor.shape[dim] == 0:
            return tensor
        return tensor.narrow(dim, 0, 1).expand(tensor.shape)

    def leave_out(self, positions: Tensor, is_near: Tensor, value: float = MARGIN) -> None:
        """In a problem with bad numbers, move positions near a whole number of pixels out of the map, in place.

        Rounding decides which texels such a sample reads, and so whether it meets a bad number.
        """
        if self.has_bad_numbers:
            positions.masked_fill_(is_near.to(positions.device), value)

    def _filled(self, shape: Sequence[int], like: Tensor) -> Tensor:
        fill = MARGIN if like.is_floating_point() else 1
        return torch.full(shape, fill, dtype=like.dtype, device=like.device)

    def _shifted(self, tensor: Tensor, offset: int) -> Tensor:
        """Return a contiguous copy that begins ``offset`` elements into its storage."""
        storage = self._filled([tensor.numel() + offset + 4], tensor)
        view = storage[offset : offset + tensor.numel()].view(tensor.shape)
        view.copy_(tensor)
        return view
