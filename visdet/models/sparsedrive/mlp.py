"""The multilayer perceptrons that all parts of SparseDrive use."""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from visdet.ops._gpu_rows import has_kernel
from visdet.ops.perceptrons import (
    FIRST,
    MAX_LAYERS,
    MAX_PERCEPTRONS,
    MAX_WIDTH,
    NORM,
    RELU,
    SCALE,
    run_kernels,
)

from ..layers.normalization import ReLULayerNorm
from ..layers.precision import in_full_precision
from ..layers.residual import HOOKS, is_plain

__all__ = ["Perceptron", "Scale", "linear_in_full_precision", "linear_relu_ln", "side_by_side"]


class Scale(nn.Module):
    """Multiplies each channel by a learnable factor, the parameter ``scale``."""

    def __init__(self, scale: float | Sequence[float] = 1.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(scale, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        """Return x [..., C] times ``scale``, which is [C] or a scalar."""
        return x * self.scale


class Perceptron(nn.Sequential):
    """A sequence of linear layers, ReLUs, normalisations and at last a ``Scale``, which one kernel of a GPU computes.

    The kernel computes in float32, under autocast too; see ``visdet.ops.perceptrons``. Sequences that it does not know,
    layers with hooks, and other devices run layer by layer.
    """

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self._plan: _Plan | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return the result of all layers, [..., channels of the last layer]."""
        plan = self.kernel_plan(x)
        return super().forward(x) if plan is None else plan.run(x)

    def in_full_precision(self, x: Tensor) -> Tensor:
        """Return the result in the dtype of the weights, without autocast."""
        plan = self.kernel_plan(x)
        return in_full_precision(self, x) if plan is None else plan.run(x)

    def kernel_plan(self, x: Tensor) -> "_Plan | None":
        """Return how the kernel computes the layers, or None if they have to run one by one."""
        if not has_kernel("perceptrons", x):
            return None
        if self._plan is None or not self._plan.is_of(self):
            self._plan = _Plan.of(self)
        return self._plan if self._plan.is_valid() else None


class _Plan:
    """How the kernel of ``perceptrons`` computes a sequence of layers.

    It is asked in every call whether it still holds, so that it keeps the dicts in which modules hold their hooks.
    Reading these takes the host a fraction of the time of ``is_plain``.

    Args:
        layers: the sequence. kinds: the kinds of its linear layers, empty if the kernel does not know a layer.
        sources: the layers that have parameters, each with the names of these in the order of the kernel.
    """

    def __init__(
        self, layers: Sequence[nn.Module], kinds: list[int], sources: list[tuple[nn.Module, tuple[str, ...]]]
    ) -> None:
        self.kinds = kinds
        self._layers = list(layers)
        self._types = [type(layer) for layer in layers]
        self._attributes = [vars(layer) for layer in layers]
        self._hooks = [vars(layer)[name] for layer in layers for name in HOOKS]
        self._places: list[tuple[Any, str]] = [(layer, name) for layer, names in sources for name in names]

    def __reduce__(self) -> tuple[Any, ...]:
        """Let a copy of a sequence make a plan of its own, because the copy of a dict is not the one of a module."""
        return type(None), ()

    @classmethod
    def of(cls, sequence: nn.Sequential) -> "_Plan":
        layers: list[Any] = list(sequence)
        kinds: list[int] = []
        sources: list[tuple[nn.Module, tuple[str, ...]]] = []
        unknown = cls(layers, [], [])
        for layer in layers:
            kind = type(layer)
            if kind is nn.Linear and layer.bias is not None and max(layer.weight.shape) <= MAX_WIDTH:
                kinds.append(0 if kinds else FIRST)
                sources.append((layer, ("weight", "bias")))
            elif not kinds or kinds[-1] & (NORM | SCALE):
                return unknown
            elif kind is nn.ReLU and not kinds[-1] & RELU:
                kinds[-1] |= RELU
            elif kind is ReLULayerNorm and layer.eps == _EPS:
                kinds[-1] |= RELU | NORM
                sources.append((layer, ("weight", "bias")))
            elif kind is Scale and layer.scale.dim() == 1:
                kinds[-1] |= SCALE
                sources.append((layer, ("scale",)))
            elif kind is not nn.Identity:
                return unknown
        return cls(layers, kinds, sources) if 0 < len(kinds) <= _MAX_DEPTH else unknown

    def is_of(self, sequence: nn.Sequential) -> bool:
        """Return whether a sequence still consists of the layers that the plan was made for."""
        return list(sequence) == self._layers

    def is_valid(self) -> bool:
        """Return whether the kernel computes what the layers do with their hooks and parameters of this moment."""
        return (
            bool(self.kinds)
            and not any(self._hooks)
            and [*map(type, self._layers)] == self._types
            and not any(map(_HAS_FORWARD, self._attributes))
            and getattr(*self._places[0]).dtype == torch.float32
        )

    def tensors(self) -> list[Tensor]:
        """Return the parameters in the order of the kernel."""
        return [getattr(layer, name) for layer, name in self._places]

    def run(self, x: Tensor) -> Tensor:
        return run_kernels(x.float(), self.tensors(), self.kinds, (0,), _EPS)


_HAS_FORWARD = operator.methodcaller("__contains__", "forward")
_EPS = nn.LayerNorm(1).eps
_MAX_DEPTH = MAX_LAYERS // 4  # Four perceptrons can run side by side in any case.


def side_by_side(modules: Sequence[Perceptron], x: Tensor, first_columns: Sequence[int]) -> Tensor:
    """Return the results of perceptrons, concatenated, each of which reads columns of x of its own.

    They are computed in full precision.

    Args:
        first_columns: the column of x with which each perceptron begins. It reads as many as its first layer takes.
    """
    found = [module.kernel_plan(x) for module in modules]
    plans = [plan for plan in found if plan is not None]
    kinds = [kind for plan in plans for kind in plan.kinds]
    if len(plans) == len(modules) <= MAX_PERCEPTRONS and len(kinds) <= MAX_LAYERS:
        tensors = [tensor for plan in plans for tensor in plan.tensors()]
        return run_kernels(x.float(), tensors, kinds, first_columns, _EPS)
    widths = [next(module.parameters()).shape[1] for module in modules]
    parts = [
        module.in_full_precision(x[..., first : first + width])
        for module, first, width in zip(modules, first_columns, widths, strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def linear_in_full_precision(linear: nn.Linear, x: Tensor) -> Tensor:
    """Return ``linear(x)`` in the dtype of the weights, without autocast."""
    is_served = (
        is_plain(linear, nn.Linear) and linear.bias is not None and max(linear.weight.shape) <= MAX_WIDTH
    )
    if is_served and linear.weight.dtype == torch.float32 and has_kernel("perceptrons", x):
        return run_kernels(x.float(), (linear.weight, linear.bias), (FIRST,), (0,), _EPS)
    return in_full_precision(linear, x)


def linear_relu_ln(
    embed_dims: int, in_loops: int, out_loops: int, input_dims: int | None = None
) -> list[nn.Module]:
    """Return ``out_loops`` times (``in_loops`` times (Linear, ReLU), LayerNorm), all of width ``embed_dims``.

    The last ReLU before a LayerNorm is part of it. An ``nn.Identity`` has its place, which keeps parameter names.

    Args:
        input_dims: width of the input, by default ``embed_dims``.

    Source: the name and the order of layers, and thus the names of parameters, are SparseDrive's.
    """
    # The ReLU is not in place. A Linear of [B, N, C] returns a view, and its gradient would be copied four times in the
    # backward pass if the view were overwritten.
    layers: list[nn.Module] = []
    width = embed_dims if input_dims is None else input_dims
    for _ in range(out_loops):
        for i in range(in_loops):
            layers += [nn.Linear(width, embed_dims), nn.ReLU() if i + 1 < in_loops else nn.Identity()]
            width = embed_dims
        layers.append(ReLULayerNorm(embed_dims))
    return layers
