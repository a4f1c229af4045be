"""What stands in wrappers: the model itself, and the optimizers by their names."""

from typing import Any

import torch
from mmengine.model import is_model_wrapper
from mmengine.optim import OptimWrapperDict


def unwrapped(model: Any) -> Any:
    """Return the model itself, without the wrapper that several processes train it in."""
    return model.module if is_model_wrapper(model) else model


def wrappers_of(optim_wrapper: Any) -> dict[str, Any]:
    """Return the wrappers of single optimizers by their names. A single one has the name ""."""
    return dict(optim_wrapper.items()) if isinstance(optim_wrapper, OptimWrapperDict) else {"": optim_wrapper}


def optimizers_of(optim_wrapper: Any) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers of a wrapper by their names. A single optimizer has the name ""."""
    return {name: wrapper.optimizer for name, wrapper in wrappers_of(optim_wrapper).items()}
