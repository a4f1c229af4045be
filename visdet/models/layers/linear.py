"""Linear layers, and their weights, which one launch casts for autocast."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_pre_hooks

from visdet.ops.autocast_linear import autocast_linear, suits_autocast_linear
from visdet.ops.tracing import is_traced
from visdet.structures.replayed_launches import are_launches_replayed

from .precision import autocast_dtype

__all__ = ["Linear", "cast_weight", "weights_cast_together"]

# From how many rows on the GPU takes longer than the host, in eager steps and in those by graphs.
_MIN_ROWS_OF_AN_EAGER_STEP = 65536
_MIN_ROWS = 8192


class _Copies(threading.local):
    """The copies of the blocks that the thread is in."""

    def __init__(self) -> None:
        self.blocks: list[dict[Tensor, Tensor]] = []


_copies = _Copies()


class Linear(nn.Linear):
    """The linear layer of torch. ``autocast_linear`` computes it for many rows, in training under autocast on CUDA.

    The kernels of ``autocast_linear`` take the GPU less time than torch's, but its calls take the host longer.

    ``torch.ao.quantization.quantize_dynamic`` leaves this layer as it is, because it looks for torch's own class.
    torchao quantises it.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input @ weight.T + bias``, [..., out_features]."""
        weight, bias = self.weight, self.bias
        least = _MIN_ROWS if are_launches_replayed() else _MIN_ROWS_OF_AN_EAGER_STEP
        if suits_autocast_linear(input, weight, bias, least):
            return autocast_linear(input, weight, bias, torch.get_autocast_dtype("cuda"))
        return F.linear(input, cast_weight(weight), None if bias is None else cast_weight(bias))


@contextmanager
def weights_cast_together(module: nn.Module) -> Iterator[None]:
    """Let ``cast_weight`` return copies of a module's weights within the block, in the type that autocast gives them.

    Autocast launches a kernel for each weight that it casts and for each gradient. Here, all weights take one launch,
    and so do all gradients. These are the weights of each ``Linear``, and those by which ``nn.MultiheadAttention``
    projects queries, keys and values. As with autocast's own casts, the gradients of several uses of a weight are
    summed in its type. The gradients come when those of all weights are known, which is why the block is the forward of
    one layer of a transformer. With ``DistributedDataParallel``, a weight that is not used gets a gradient of zeros.

    The block does nothing without autocast, without gradients, in a traced call, and where launches are replayed,
    because the graphs of a model cast its weights themselves. Nor does it if a part of the module has a hook that runs
    before its forward, or another forward than its class, since these may change the weights, or gather them from other
    processes. Weights that have hooks themselves are left to autocast.
    """
    copies = _cast_all(module) if _has_casts() else {}
    if not copies:
        yield
        return
    _copies.blocks.append(copies)
    try:
        yield
    finally:
        _copies.blocks.pop()


def cast_weight(weight: Tensor) -> Tensor:
    """Return the copy of a weight that ``weights_cast_together`` has made, or the weight itself.

    It is the weight if there is no copy, if autocast is off here or has another type, and in a compiled part of the
    module, which would read the copies of other layers when it is used again.
    """
    if torch.compiler.is_compiling() or not _copies.blocks:
        return weight
    copy = _copies.blocks[-1].get(weight)
    return weight if copy is None or autocast_dtype(weight) != copy.dtype else copy


def _has_casts() -> bool:
    if _global_forward_pre_hooks or not torch.is_grad_enabled():
        return False
    return not is_traced() and not are_launches_replayed()


def _cast_all(module: nn.Module) -> dict[Tensor, Tensor]:
    weights: list[Tensor] = []
    for part in module.modules():
        has_its_forward = getattr(part.forward, "__func__", None) is type(part).forward
        if part is not module and (part._forward_pre_hooks or not has_its_forward):
            return {}
        if type(part) in (Linear, nn.MultiheadAttention):
            weights += filter(_is_cast, part._parameters.values())
    weights = [weight for weight in dict.fromkeys(weights) if weight.device == weights[0].device]
    if not weights:
        return {}
    return dict(zip(weights, _Casts.apply(autocast_dtype(weights[0]), *weights), strict=True))


def _is_cast(weight: Tensor | None) -> TypeGuard[Tensor]:
    """Return whether autocast casts a weight, and its gradient, of which nobody else knows."""
    return (
        type(weight) is nn.Parameter
        and weight.requires_grad
        and autocast_dtype(weight) != weight.dtype
        and not weight._backward_hooks
        and not weight._post_accumulate_grad_hooks
    )


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
