"""What stands in the wrapper of a model: the model itself."""

from typing import Any

from mmengine.model import is_model_wrapper


def unwrapped(model: Any) -> Any:
    """Return the model itself, without the wrapper that several processes train it in."""
    return model.module if is_model_wrapper(model) else model
