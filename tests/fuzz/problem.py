"""Families of problems, and the random numbers by which a problem is drawn."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "HALVES",
    "Draw",
    "Operator",
    "Problem",
    "Result",
    "Seeded",
    "draw_cloud",
    "generator_of",
    "gradient_sum",
    "largest",
    "linear_problem",
    "nothing",
    "rand",
    "row_sum",
    "wide_of",
    "wrong_places",
]

HALVES = (torch.float16, torch.bfloat16)
WIDE_TYPES = (torch.float32, torch.float64)
FLOATING = (*WIDE_TYPES, *HALVES)
# Numbers of at least this magnitude are not compared, because the operator may overflow where float64 does not.
EXTREME = 1e4
HUGE = 1e30
BAD_NUMBERS = (float("nan"), float("inf"), -float("inf"), HUGE, -HUGE, 65504.0, -0.0, 1e-40, -1e-42, 0.0)
MARGIN = float("nan")  # This surrounds a view in memory, so that reading beyond the view changes the result.

Result = Tensor | tuple[Tensor, ...]


@dataclass
class Problem:
    """One call of an operator, and the parts of its result that can be compared."""

    arguments: dict[str, Any]
    differentiable: tuple[str, ...] = ()
    # In these arguments, NaN, infinite and huge numbers have a defined meaning. In all others, such a number makes the
    # results that depend on it undefined, and these are not compared.
    positions: tuple[str, ...] = ()
    reference_arguments: dict[str, Any] = field(default_factory=dict)  # other ones for the reference
    wide: torch.dtype = torch.float32  # the dtype in which the operator computes
    epsilon: float | None = None  # the precision of sums and intermediate results, by default of ``wide``
    error_factor: float = 64.0  # allowed rounding errors, in units of epsilon
    absolute: dict[str, float] = field(default_factory=dict)  # additional allowed errors
    skip: dict[str, Tensor | bool] = field(
        default_factory=dict
    )  # the parts of "output" and of gradients that are not compared
    may_refuse: str = ""  # the reason for which the operator may refuse the problem
    must_refuse: str = ""  # the reason for which it has to refuse the problem


@dataclass
class Operator:
    """What the tests of all operators need to know of one: how its problems are drawn, called and checked.

    Args:
        name: the name of the operator, which every error message must contain.
        call: the operator, which is called with ``Problem.arguments``.
        draw: the function that makes a problem.
        reference: the same as ``call`` in plain torch, for float64 tensors.
        bounds: the function that corrects the magnitudes which errors are relative to, {"output" or an argument's name:
            number}. Before, they are the largest entries of the reference's results for the magnitudes of all arguments
            except positions. That is not a bound if an argument does not enter linearly.
        compare: the function that compares results without rounding errors. It returns what is wrong, or "".
        spoiled: the mistakes in arguments that the operator must refuse beside those that follow from its declaration,
            by argument: keys of ``mistakes.TENSORS``, or the numbers of dimensions that become longer by one.
        aliases: other names that error messages may contain.
        reads_beside: the arguments of which CUDA kernels read numbers with weight zero for corners outside a map. A NaN
            or infinite number in them, or in the gradient of the result, may affect more than the definition says.
        of_size: functions of a size that return small sound problems. The operator must compile and export for all
            sizes of each, and its gradients are tested with the first.
        launches: a hypothesis strategy of arguments without data, of any sizes (``sizes.arguments``). The launches on
            CUDA must fit every GPU.
        scatters_beside: the arguments whose NaN or infinite numbers may likewise affect gradients of ``reads_beside``.
        shares_a_scale: whether deterministic gradients on CUDA are multiples of a fraction of the largest number in the
            gradient of the result, so that nothing is left of those beside a huge one.
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
    of_size: tuple[Callable[[int], Problem], ...] = ()
    launches: Any = None
    shares_a_scale: bool = False


def generator_of(seed: int) -> torch.Generator:
    """Return a source of random numbers on the CPU, which depend on the seed alone."""
    return torch.Generator().manual_seed(seed)


class Draw:
    """A source of random sizes, numbers and memory layouts, which depend on the operator's name and the seed only."""

    def __init__(self, name: str, seed: int, device: str) -> None:
        self.random = random.Random(f"{name} {seed}")
        self.generator = generator_of(self.random.getrandbits(62))
        self.device = device
        self.has_bad_numbers, self.has_empty_sizes = self.chance(0.2), self.chance(0.05)

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def pick(self, *options: Any) -> Any:
        return self.random.choice(options)

    def size(self, limit: int, zero: float = 0.02) -> int:
        """Return a size up to ``limit``, which is mostly small. It is 0 with probability ``zero``, and in some problems
        often so, unless ``zero`` is 0."""
        if self.chance(0.3 if zero and self.has_empty_sizes else zero):
            return 0
        return round((limit + 0.49) ** self.random.random())

    @property
    def is_big(self) -> bool:
        """Whether this problem is one of the rare big ones. Each read draws a new answer."""
        return self.chance(0.03 if self.device == "cuda" else 0.01)

    def dtype(self, *options: torch.dtype) -> torch.dtype:
        return self.pick(*(options or (*FLOATING, torch.float32)))

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, dtype=torch.float64) * (high - low) + low

    def whole(self, low: int, high: int, *shape: int) -> Tensor:
        """Return random int64 numbers from ``low`` to below ``high``."""
        return torch.randint(low, high, shape, generator=self.generator)

    def numbers(self, *shape: int) -> Tensor:
        """Return numbers of a random kind, which are normal, scaled, all equal, small integers or zeros."""
        kind = self.random.random()
        if kind < 0.88:
            scale = 1 if kind < 0.8 else 10 ** self.random.uniform(-3, 3)
            return torch.randn(shape, generator=self.generator, dtype=torch.float64) * scale
        if kind < 0.92:
            return torch.full(shape, self.random.gauss(0, 1), dtype=torch.float64)
        if kind < 0.97:
            return self.whole(-3, 4, *shape).double()
        return torch.zeros(shape, dtype=torch.float64)

    def with_bad_numbers(self, tensor: Tensor, probability: float = 0.5) -> Tensor:
        """Return the tensor. In some problems, a few of its numbers are NaN, infinite, huge, subnormal or -0."""
        N = tensor.numel()
        if not self.has_bad_numbers or N == 0 or not self.chance(probability):
            return tensor
        tensor = tensor.clone()
        count = 1 if self.chance(0.5) else self.random.randint(1, max(1, N // 8))
        places = self.whole(0, N, count)
        kinds = torch.tensor(BAD_NUMBERS, dtype=tensor.dtype)
        tensor.view(-1)[places] = kinds[self.whole(0, len(BAD_NUMBERS), count)]
        return tensor

    def values(self, *shape: int, dtype: torch.dtype | None = None, bad: float = 0.5) -> Tensor:
        """Return numbers of a random kind, of which some may be bad, in any type and memory layout."""
        return self.place(self.numbers(*shape), dtype or self.dtype(), bad=bad)

    def place(
        self, tensor: Tensor, dtype: torch.dtype | None = None, can_expand: bool = True, bad: float = 0.0
    ) -> Tensor:
        """Return the tensor on the device, with a dtype and a random memory layout.

        Views are surrounded by NaN, or by ones for integers. An expanded tensor repeats its first entry along a
        dimension. Before, some numbers may be made bad, with the probability ``bad``.
        """
        random = self.random
        if bad:
            tensor = self.with_bad_numbers(tensor, bad)
        tensor = tensor.to(dtype or tensor.dtype).to(self.device)
        kind, dims = random.random(), tensor.dim()
        if kind < 0.45 or dims == 0:
            return tensor.clone()
        if kind < 0.6:
            return self._shifted(tensor, random.randint(1, 3))
        order = list(range(dims))
        if kind < 0.75:
            random.shuffle(order)
            if dims == 4 and self.chance(0.5):
                order = [0, 2, 3, 1]  # channels last
            inverse = [order.index(d) for d in range(dims)]
            return self._shifted(tensor.permute(order), self.pick(0, 0, 1, 2)).permute(inverse)
        dim = random.randrange(dims)
        if kind < 0.9 or not can_expand:
            step, start = self.pick((2, 1), (1, 1), (1, 3), (3, 0))
            shape = list(tensor.shape)
            shape[dim] = shape[dim] * step + start
            view = self._filled(shape, tensor).narrow(dim, start, shape[dim] - start)
            view = view[(slice(None),) * dim + (slice(None, None, step),)]
            view.copy_(tensor)
            return view
        if tensor.shape[dim] == 0:
            return tensor
        return tensor.narrow(dim, 0, 1).expand(tensor.shape)

    def table(self, table: Tensor) -> Any:
        """Return a table of integers in one of the forms that a caller may give: lists, or a tensor of any layout."""
        kind = self.random.random()
        if kind < 0.25 and table.numel():
            return table.tolist()
        table = table.to(self.pick(torch.int64, torch.int64, torch.int32))
        return self.place(table, can_expand=False) if kind < 0.6 else table

    def index(self, low: int, high: int, *shape: int) -> Tensor:
        """Return random indices from ``low`` to below ``high``."""
        kind = self.pick(torch.int32, torch.int64)
        return self.place(self.whole(low, max(high, low + 1), *shape), kind, can_expand=False)

    def leave_out(self, positions: Tensor, is_near: Tensor, value: float = MARGIN) -> None:
        """In a problem with bad numbers, replace positions near a whole number of pixels by ``value``, in place.

        Rounding decides which texels such a sample reads, and thus whether it reads a bad number.
        """
        if self.has_bad_numbers:
            positions.masked_fill_(is_near.to(positions.device), value)

    def _filled(self, shape: Sequence[int], like: Tensor) -> Tensor:
        fill = MARGIN if like.is_floating_point() else 1
        return torch.full(shape, fill, dtype=like.dtype, device=like.device)

    def _shifted(self, tensor: Tensor, offset: int) -> Tensor:
        """Return a contiguous copy that begins ``offset`` elements into its storage."""
        end = offset + tensor.numel()
        view = self._filled([end + 4], tensor)[offset:end].view(tensor.shape)
        view.copy_(tensor)
        return view


class Seeded:
    """Random float64 numbers on the CPU, which depend on the seed and on the draws before."""

    def __init__(self, seed: int = 0) -> None:
        self.generator = generator_of(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def uniform(self, *shape: int) -> Tensor:
        """Return numbers in 0..1."""
        return torch.rand(shape, generator=self.generator, dtype=torch.float64)


def wide_of(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _magnitudes(tensor: Tensor, below: float) -> Tensor:
    """Return the magnitudes that are less than ``below``, and 0 for others."""
    magnitudes = tensor.detach().double().abs()
    return torch.where(magnitudes < below, magnitudes, 0.0)


def largest(tensor: Tensor, below: float = EXTREME) -> float:
    """Return the largest magnitude that is less than ``below``."""
    magnitudes = _magnitudes(tensor, below)
    return float(magnitudes.max()) if magnitudes.numel() else 0.0


def rand(*shape: int) -> Tensor:
    """Return numbers in 0..1 that depend on the shape alone."""
    return torch.rand(*shape, generator=generator_of(sum(shape)))


def gradient_sum(bounds: dict[str, float]) -> float:
    """Return a bound of the sum of the magnitudes of grad_output over the channels of a head."""
    return bounds.get("grad_output", 0.0)


def row_sum(tensor: Tensor, dims: int) -> float:
    """Return the largest sum of magnitudes over the last dimensions."""
    return largest(_magnitudes(tensor, EXTREME).flatten(-dims).sum(-1), below=torch.inf)


def wrong_places(what: str, is_wrong: Tensor) -> str:
    """Return a text with the places where results are wrong, or an empty text."""
    return f"{what} {is_wrong.nonzero().tolist()}" if bool(is_wrong.any()) else ""


def linear_problem(features: str, arguments: dict[str, Any], *others: str) -> Problem:
    return Problem(
        arguments,
        differentiable=(features, *others),
        wide=wide_of(arguments[features].dtype),
        error_factor=2000.0,
    )


def draw_cloud(draw: Draw, *shape: int) -> Tensor:
    """Return points. In some problems many lie on a grid, so that points and distances are equal."""
    points = draw.numbers(*shape)
    return draw.with_bad_numbers((points * 2).round() / 2 if draw.chance(0.4) else points)


def nothing(**arguments: Any) -> Tensor:
    """Stand for the reference in float64, which such comparisons do not use."""
    return torch.zeros(0)
