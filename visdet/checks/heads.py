"""The heads of a model, and how many classes each of them knows."""

from collections.abc import Sequence

from torch import nn

from visdet.errors import ConfigError, listed


def classes_of_heads(model: nn.Module) -> dict[str, int]:
    """Return the ``num_classes`` of each head of a model by its name."""
    return {
        name: module.num_classes
        for name, module in model.named_modules()
        if isinstance(getattr(module, "num_classes", None), int)
        and "head" in f"{name} {type(module)}".lower()
    }


def check_heads(
    model: nn.Module, classes: Sequence[str], owner: str, advice: str = "", names_may_be_unused: bool = False
) -> None:
    """Check that each head of a model is for as many classes as are named.

    Args:
        model: the model. classes: the names.
        owner: who names them, for the message, such as "train_dataloader.dataset has".
        advice: what the message ends with; ``{head}`` and ``{count}`` in it are the head and the number of the names.
        names_may_be_unused: whether there may be more names than a head is for.

    Raises:
        ConfigError: a head is for another number. The message has its key in the config, and both numbers.
    """
    count = len(classes)
    for head, number in classes_of_heads(model).items():
        if number > count or (number < count and not names_may_be_unused):
            raise ConfigError(
                f"model.{head}.num_classes is {number}, but {owner} {count} classes ({listed(classes, 6)})"
                + advice.format(head=head, count=count)
            )
