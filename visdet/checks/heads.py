"""The heads of a model, and how many classes each of them knows."""

from torch import nn


def classes_of_heads(model: nn.Module) -> dict[str, int]:
    """Return the ``num_classes`` of each head of a model by its name."""
    return {
        name: module.num_classes
        for name, module in model.named_modules()
        if isinstance(getattr(module, "num_classes", None), int)
        and "head" in f"{name} {type(module)}".lower()
    }
