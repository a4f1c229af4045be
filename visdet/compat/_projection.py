"""The linear layers of an attention module in prediction, where no gradient has to be recorded.

With a bias, ``torch.nn.functional.linear`` of float32 tensors on the CPU first fills the output with the bias and then
adds the product, so that the output travels to memory twice. oneDNN adds the bias while it writes the product.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

__all__ = ["is_plain", "is_untouched", "project", "project_masked"]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_MIN_ROWS = 1024  # Below, the output stays in the cache, and both ways take the same time.


def is_untouched(layer: nn.Module, kind: type[nn.Module] | None = None) -> bool:
    """Return whether calling a layer runs its class's forward and, apart from global hooks, nothing else."""
    own = vars(layer)
    is_kind = kind is None or type(layer) is kind
    return is_kind and "forward" not in own and not any(own[hooks] for hooks in _HOOKS)


def is_plain(layer: nn.Module | None) -> bool:
    """Return whether calling a layer is ``torch.nn.functional.linear`` of its weight and bias and nothing else."""
    if layer is None or not is_untouched(layer, nn.Linear) or _has_any_global_hook():
        return False
    return all(type(layer._parameters.get(key)) is nn.Parameter for key in ("weight", "bias"))


def project(layer: nn.Module, input: Tensor) -> Tensor:
    """Return the output of a layer, computed by oneDNN where that is faster. The order of the sums may then differ."""
    if not _suits_onednn(layer, input):
        return layer(input)
    weight, bias = layer._parameters["weight"], layer._parameters["bias"]
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
        return value.masked_fill(mask[..., None], 0.0)
    if mask.device.type == "cpu" and not mask.any():
        return value
    return value.masked_fill_(mask[..., None], 0.0)


def _suits_onednn(layer: Any, input: Tensor) -> bool:
    """Return whether ``project`` passes a call to oneDNN."""
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
