"""The sum of a branch and what it branched off, and its normalisation."""

from typing import TypeGuard, TypeVar

from torch import Tensor, nn

from .normalization import LayerNorm

_Layer = TypeVar("_Layer", bound=nn.Module)


def is_plain(layer: nn.Module, kind: type[_Layer]) -> TypeGuard[_Layer]:
    """Return whether calling a layer does exactly what its class does. Global hooks of all modules are not checked.

    torch 2.10 to 2.14 have no public way to ask a module for its hooks.
    """
    return (
        type(layer) is kind
        and getattr(layer.forward, "__func__", None) is kind.forward
        and getattr(layer.forward, "__self__", None) is layer
        and not (
            layer._forward_hooks
            or layer._forward_pre_hooks
            or layer._backward_hooks
            or layer._backward_pre_hooks
        )
    )


def drops(dropout: nn.Module) -> bool:
    """Return whether a dropout layer has to be called."""
    if isinstance(dropout, nn.Dropout) and is_plain(dropout, nn.Dropout):
        return dropout.training and dropout.p > 0
    return not is_plain(dropout, nn.Identity)


def add_and_norm(norm: nn.Module | None, branch: Tensor, identity: Tensor, *dropouts: nn.Module) -> Tensor:
    """Return ``norm(identity + dropouts(branch))``, where that is possible in one operator.

    Args:
        norm: the normalisation, or None for the sum alone.
        branch, identity: [..., C]. dropouts: layers that the branch goes through, one after another.
    """
    dropping = [dropout for dropout in dropouts if drops(dropout)]
    if isinstance(norm, LayerNorm) and not dropping:
        return norm(branch, identity)
    if isinstance(norm, LayerNorm) and len(dropping) == 1 and is_plain(dropping[0], nn.Dropout):
        return norm(branch, identity, dropping[0].p)
    for dropout in dropping:
        branch = dropout(branch)
    total = identity + branch
    return total if norm is None else norm(total)
