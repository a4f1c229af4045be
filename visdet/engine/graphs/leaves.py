"""Leaf tensors that stand in for the parameters of a model, in the same memory."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


class _Call(nn.Module):
    """A module whose call runs a given function."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[], Any]) -> Any:
        return function()


def leaves_in_place_of(model: nn.Module) -> dict[nn.Parameter, Tensor]:
    """Return new leaf tensors that share the memory of the parameters."""
    return {
        parameter: parameter.detach().requires_grad_(parameter.requires_grad)
        for parameter in model.parameters()
    }


def with_leaves(model: nn.Module, leaves: Mapping[nn.Parameter, Tensor], function: Callable[[], Any]) -> Any:
    """Return the result of a function that runs while the leaves replace the model's parameters."""
    # Each attribute is named only once, and ``functional_call`` must not look for further names of a shared module.
    # Otherwise it would take the leaf for the original parameter and put the leaf back after the call.
    call = _Call(model)
    attributes = {
        f"{prefix}.{name}": leaves[parameter]
        for prefix, module in call.named_modules()
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
    }
    return torch.func.functional_call(call, attributes, (function,), tie_weights=False)
