"""Linear layers, and their weights, which one launch casts for autocast."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visdet.ops.autocast_linear import autocast_linear, suits_autocast_linear
from visdet.ops.tracing import is_traced
from visdet.structures.replayed_launches import are_launches_replayed

from .precision import autocast_dtype

__all__ = ["Linear", "cast_weight", "weights_cast_together"]

# From how many rows on the GPU takes longer than the host, in eager steps and in those by graphs.
_MIN_ROWS_OF_AN_EAGER_STEP = 65536
_MIN_ROWS = 8192

_copies: list[dict[Tensor, Tensor]] = [{}]


class Linear(nn.Linear):
    """The linear layer of torch. ``autocast_linear`` computes it for many rows, in training under autocast on CUDA.

    The kernels of ``autocast_linear`` take the GPU less time than torch's, but its calls take the host longer.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input @ weight.T + bias``, [..., out_features]."""
        weight, bias = self.weight, self.bias
        least = _MIN_ROWS if are_launches_replayed() else _MIN_ROWS_OF_AN_EAGER_STEP
        if suits_autocast_linear(input, weight, bias, least):
            return autocast_linear(input, weight, bias, torch.get_autocast_dtype("cuda"))
        return F.linear(input, cast_weight(weight), None if bias is None else cast_weight(bias))


@contextmanager
def weights_cast_together(*modules: nn.Module) -> Iterator[None]:
    """Let ``cast_weight`` return copies of the modules' weights within the block, in the type that autocast gives them.

    Autocast launches a kernel for each weight that it casts and for each gradient. Here, all weights take one launch,
    and so do all gradients. As with autocast's own casts, the gradients of several uses of a weight are summed in its
    type. The block does nothing without autocast, without gradients, in a traced call, and where launches are replayed,
    because the graphs of a model cast its weights themselves.
    """
    _copies.append(_cast_all(modules) if _has_casts() else {})
    try:
        yield
    finally:
        _copies.pop()


def cast_weight(weight: Tensor) -> Tensor:
    """Return the copy of a weight that ``weights_cast_together`` has made, or the weight itself.

    It is the weight if there is no copy, or if autocast is off here or has another type.
    """
    copy = _copies[-1].get(weight)
    return weight if copy is None or autocast_dtype(weight) != copy.dtype else copy


def _has_casts() -> bool:
    return torch.is_grad_enabled() and not is_traced() and not are_launches_replayed()


def _cast_all(modules: tuple[nn.Module, ...]) -> dict[Tensor, Tensor]:
    weights = [
        weight
        for module in modules
        for part in module.modules()
        if isinstance(part, Linear | nn.MultiheadAttention)
        for weight in part.parameters(recurse=False)
        if type(weight) is nn.Parameter and weight.requires_grad and autocast_dtype(weight) != weight.dtype
    ]
    weights = [weight for weight in dict.fromkeys(weights) if weight.device == weights[0].device]
    if not weights:
        return {}
    return dict(zip(weights, _Casts.apply(autocast_dtype(weights[0]), *weights), strict=True))


class _Casts(torch.autograd.Function):
    """Copies of tensors in another type. They may be differentiated any number of times."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.dtype = tensors[0].dtype
        ctx.set_materialize_grads(False)
        copies = tuple(torch.empty_like(tensor, dtype=dtype) for tensor in tensors)
        torch._foreach_copy_(copies, tensors)
        return copies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        present = [grad for grad in grads if grad is not None]
        copies = iter(_Casts.apply(ctx.dtype, *present) if present else ())
        return (None, *(None if grad is None else next(copies) for grad in grads))
