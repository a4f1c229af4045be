"""The linear layers of attention modules and of the layers around them, computed faster than by calling them.

In predictions on the CPU, ``torch.nn.functional.linear`` of float32 tensors first fills the output with the bias and
then adds the product, so that the output travels to memory twice. oneDNN adds the bias while it writes the product.

In training under autocast on CUDA, torch rounds the gradients of a float32 layer to 16 bits and then converts them, by
kernels of their own. ``autocast_linear`` writes them in float32. As an ``autograd.Function``, it takes the host longer
than torch's linear layer, which only pays where the rows are many.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from visdet.ops.autocast_linear import (
    autocast_linear,
    is_trained_under_autocast,
    suits_autocast_linear,
)

__all__ = [
    "has_many_rows",
    "is_plain",
    "is_untouched",
    "project",
    "project_by_onednn",
    "project_masked",
    "suits_onednn",
]

_MIN_ROWS = 1024  # on the CPU: below, the output stays in the cache, and both ways take the same time
_MIN_ROWS_ON_CUDA = 8192


def has_many_rows(input: Tensor) -> bool:
    """Return whether visdet's kernels save a GPU more time on these rows than their calls from Python cost the host."""
    return 0 < _MIN_ROWS_ON_CUDA * input.shape[-1] <= input.numel()


def is_untouched(layer: nn.Module, kind: type[nn.Module] | None = None) -> bool:
    """Return whether calling a layer runs its class's forward and, apart from global hooks, nothing else."""
    own = vars(layer)
    if (kind is not None and type(layer) is not kind) or "forward" in own:
        return False
    is_watched = own["_forward_hooks"] or own["_forward_pre_hooks"]
    return not (is_watched or own["_backward_hooks"] or own["_backward_pre_hooks"])


def is_plain(layer: nn.Module) -> bool:
    """Return whether calling a layer is ``torch.nn.functional.linear`` of a dense weight and bias and nothing else."""
    if not is_untouched(layer, nn.Linear) or _has_any_global_hook():
        return False
    pair = layer._parameters.get("weight"), layer._parameters.get("bias")
    return all(type(parameter) is nn.Parameter and parameter.layout == torch.strided for parameter in pair)


def project(layer: Any, input: Tensor) -> Tensor:
    """Return the output of a layer, computed in the fastest way. The order of the sums may then differ."""
    if (
        is_trained_under_autocast(input, _MIN_ROWS_ON_CUDA)
        and is_plain(layer)
        and suits_autocast_linear(input, layer.weight, layer.bias)
    ):
        return autocast_linear(input, layer.weight, layer.bias, torch.get_autocast_dtype("cuda"))
    return project_by_onednn(layer, input) if suits_onednn(layer, input) else layer(input)


def project_by_onednn(layer: Any, input: Tensor) -> Tensor:
    """Return the output of a layer that suits oneDNN."""
    # oneDNN's operator reads the bias as if it were contiguous.
    weight, bias = layer._parameters["weight"], layer._parameters["bias"].contiguous()
    return torch.ops.mkldnn._linear_pointwise.default(input, weight, bias, "none", [], "")


def project_masked(layer: nn.Module, memory: Tensor, mask: Tensor | None) -> Tensor:
    """Return the output [B, S, channels] of a layer, with zeros where ``mask`` [B, S] is True.

    Without gradients, the output of a plain layer is this function's own. The zeros are then written into it and not
    into a copy, and on the CPU nothing is written if nothing is masked.
    """
    value = project(layer, memory)
    if mask is None:
        return value
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or not is_plain(layer):
        return torch.where(mask[..., None], 0.0, value)  # masked_fill would copy the values first
    if mask.device.type == "cpu" and not mask.any():
        return value
    return value.masked_fill_(mask[..., None], 0.0)


def suits_onednn(layer: Any, input: Tensor) -> bool:
    """Return whether oneDNN computes the output of a layer, and takes less time than calling the layer."""
    if input.device.type != "cpu" or input.dtype != torch.float32 or torch.is_grad_enabled():
        return False
    if not _HAS_ONEDNN or torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return False
    if not torch.backends.mkldnn.enabled or input.dim() != 3 or input.shape[:2].numel() < _MIN_ROWS:
        return False
    if type(input) is not Tensor or not is_plain(layer):
        return False
    weight, bias = layer._parameters["weight"], layer._parameters["bias"]
    are_alike = all(p.dtype == torch.float32 and p.device.type == "cpu" for p in (weight, bias))
    return are_alike and weight.shape[1] == input.shape[2]


_HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
