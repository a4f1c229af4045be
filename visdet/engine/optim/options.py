"""The options of optimizers' wrappers. mmengine leaves out those that it does not know in silence, or fails late."""

from typing import Literal

from torch import nn
from torch.optim import Optimizer

from visdet.checks.arguments import Above0, AtLeast0, checked, checked_value

from ..errors import ConfigError, nearest_names
from ..process.console import warn

_MULTIPLIERS = ("lr_mult", "decay_mult")


@checked
def paramwise_cfg(
    *,
    custom_keys: dict[str, dict] | None = None,
    bias_lr_mult: AtLeast0 | None = None,
    bias_decay_mult: AtLeast0 | None = None,
    norm_decay_mult: AtLeast0 | None = None,
    flat_decay_mult: AtLeast0 | None = None,
    dwconv_decay_mult: AtLeast0 | None = None,
    dcn_offset_lr_mult: AtLeast0 | None = None,
    bypass_duplicate: bool = False,
) -> dict[str, dict]:
    """Return the ``custom_keys`` among the options of mmengine's DefaultOptimWrapperConstructor."""
    return custom_keys or {}


@checked
def clip_grad(
    *,
    type: Literal["norm", "value"] = "norm",
    max_norm: Above0 | None = None,
    clip_value: Above0 | None = None,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> None:
    """Do nothing. The arguments are what a ``clip_grad`` may have."""


def check_custom_keys(given: dict[str, dict], model: nn.Module, optimizer: Optimizer) -> None:
    """Check the options of parameters whose names have a part, and warn of parts that no name has.

    Args:
        given: the ``custom_keys``. model: the model. optimizer: the optimizer that was built.

    Raises:
        UserError: an option is unknown, or a multiplier is below 0.
    """
    parts = dict(model.named_parameters())
    known = (*_MULTIPLIERS, *optimizer.defaults)
    for key, options in given.items():
        where = f"optim_wrapper.paramwise_cfg.custom_keys.{key}"
        for name, value in options.items():
            if name not in known:
                [near] = nearest_names(name, known, cutoff=0.0, count=1)
                raise ConfigError(f"{where}.{name} is none of {', '.join(known)}; did you mean {near!r}?")
            if name in _MULTIPLIERS:
                checked_value(f"{where}.{name}", value, AtLeast0)
        if not any(key in part for part in parts):
            children = ", ".join(dict(model.named_children()))
            warn(
                f"{where} acts on nothing: no parameter has this in its name. The parts of the model are {children}"
            )
