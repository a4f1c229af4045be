"""Saving and restoring what a temporal model remembers of earlier frames."""

from typing import Any

from mmengine.dist import all_gather_object
from torch import nn

from ..optim.wrappers import unwrapped


def gather_temporal_states(runner: Any) -> list[Any] | None:
    """Return what the model of a run remembers in every process, as plain types and in the order of the ranks.

    Every process of the group must call this. A temporal model has ``plain_state`` and ``state_of_plain``. The result
    is None for any other model, and for mmengine's own runner, which keeps no state.
    """
    inner = unwrapped(runner.model)
    if not hasattr(inner, "plain_state") or not hasattr(runner, "steps"):
        return None
    return all_gather_object(inner.plain_state(runner.steps.state))


def restored_temporal_state(model: nn.Module, states: list[Any], rank: int, world_size: int) -> Any:
    """Return what a model remembered in process ``rank``, or None if the states come from another number of processes.

    Args:
        model: the model or its wrapper.
        states: the result of :func:`gather_temporal_states`.
        rank: the rank of this process.
        world_size: the number of processes of this run.
    """
    inner = unwrapped(model)
    if not hasattr(inner, "state_of_plain") or len(states) != world_size:
        return None
    return inner.state_of_plain(states[rank])
