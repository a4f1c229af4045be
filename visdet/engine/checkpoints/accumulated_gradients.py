"""Saving and restoring the gradients that have been accumulated since the last update."""

from typing import Any

import torch
from mmengine.dist import get_rank, get_world_size
from torch import nn

from ..optim.wrappers import unwrapped, wrappers_of


def gather_gradients(model: nn.Module, optim_wrapper: Any) -> dict[str, Any] | None:
    """Return the gradients of every process, on the CPU, if the next update needs gradients of earlier iterations.

    Every process of the group must call this after an iteration. The result is None if the iteration has updated the
    parameters. The gradients of the other processes are given to the main process only.
    """
    wrappers = list(wrappers_of(optim_wrapper).values())
    if all(wrapper.should_update() for wrapper in wrappers):
        return None
    gradients = {}
    for name, parameter in unwrapped(model).named_parameters():
        gradient = None if parameter.grad is None else parameter.grad.detach().cpu()
        by_rank = [gradient]
        if get_world_size() > 1:
            by_rank = [None] * get_world_size()
            torch.distributed.gather_object(gradient, by_rank if get_rank() == 0 else None)
        gradients[name] = by_rank
    return {"accumulative_counts": _counts(wrappers), "by_rank": gradients}


def restore_gradients(model: nn.Module, optim_wrapper: Any, saved: dict[str, Any]) -> bool:
    """Give a model the gradients of :func:`gather_gradients`, and return whether they fit this run.

    They do not fit if the run accumulates another number of iterations or has another number of processes.
    """
    if saved.get("accumulative_counts") != _counts(list(wrappers_of(optim_wrapper).values())):
        return False
    if any(len(by_rank) != get_world_size() for by_rank in saved["by_rank"].values()):
        return False
    for name, parameter in unwrapped(model).named_parameters():
        gradient = saved["by_rank"][name][get_rank()]
        parameter.grad = None if gradient is None else gradient.to(parameter.device)
    return True


def _counts(wrappers: list[Any]) -> list[int]:
    return [wrapper._accumulative_counts for wrapper in wrappers]
