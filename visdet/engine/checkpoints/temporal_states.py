"""Saving and restoring what a temporal model remembers of earlier frames."""

from typing import Any, Protocol, runtime_checkable

import torch
from mmengine.dist import get_world_size
from mmengine.model import is_model_wrapper
from torch import nn


@runtime_checkable
class TemporalModel(Protocol):
    """A model that remembers earlier frames."""

    def temporal_state_dict(self) -> Any:
        """Return what the model remembers, as tensors and plain types."""

    def load_temporal_state_dict(self, state: Any) -> None:
        """Load a result of ``temporal_state_dict``."""


def _unwrapped(model: nn.Module) -> Any:
    return model.module if is_model_wrapper(model) else model


def gather_temporal_states(model: nn.Module) -> list[Any] | None:
    """Return the temporal state of the model of every process, in the order of the ranks.

    Every process of the group must call this. The result is None for a model that remembers nothing.
    """
    inner = _unwrapped(model)
    if not isinstance(inner, TemporalModel):
        return None
    state = inner.temporal_state_dict()
    if get_world_size() == 1:
        return [state]
    states: list[Any] = [None] * get_world_size()
    torch.distributed.all_gather_object(states, state)
    return states


def restore_temporal_state(model: nn.Module, states: list[Any], rank: int, world_size: int) -> None:
    """Restore the temporal state of process ``rank``, unless the states come from another number of processes.

    Args:
        model: the model. A model that is not a :class:`TemporalModel` does not change.
        states: the result of :func:`gather_temporal_states`.
        rank: the rank of this process.
        world_size: the number of processes of this run.
    """
    inner = _unwrapped(model)
    if isinstance(inner, TemporalModel) and len(states) == world_size:
        inner.load_temporal_state_dict(states[rank])
