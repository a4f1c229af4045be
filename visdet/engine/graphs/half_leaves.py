"""16-bit leaves that stand in for the parameters which autocast would cast, so that a few kernels cast them all."""

from collections.abc import Iterable, Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from visdet.execution.tensor_tree import tensors_of


class CastsNoted(TorchDispatchMode):
    """Notes which of some tensors that learn are cast to the type of autocast, and otherwise not used.

    Args:
        tensors: the tensors. dtype: the type of autocast.
    """

    def __init__(self, tensors: Iterable[Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self._watched = {tensor for tensor in tensors if tensor.requires_grad}
        self._dtype = dtype
        self._cast: set[Tensor] = set()
        self._used: set[Tensor] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # An autograd function that casts a tensor by itself, without gradients, expects its own type.
        is_cast = (
            func is torch.ops.aten._to_copy.default
            and kwargs.get("dtype") == self._dtype
            and torch.is_grad_enabled()
        )
        found = self._watched.intersection(tensors_of((args, kwargs)))
        (self._cast if is_cast else self._used).update(found)
        return func(*args, **kwargs)

    def only_cast(self) -> set[Tensor]:
        """Return the tensors that were cast and not used otherwise."""
        return self._cast - self._used


class HalfLeaves:
    """16-bit copies of parameters, which are leaves of a graph in their places.

    Args:
        leaves: the leaves of all parameters. only_cast: those that are copied. dtype: the type of the copies.
        shared: copies that graphs of other shapes have, to which new ones are added.
    """

    def __init__(
        self,
        leaves: Mapping[nn.Parameter, Tensor],
        only_cast: Set[Tensor],
        dtype: torch.dtype,
        shared: dict[tuple[nn.Parameter, torch.dtype], Tensor],
    ) -> None:
        self.leaves = dict(leaves)
        self._sources: list[Tensor] = []
        self._copies: list[Tensor] = []
        for parameter, leaf in leaves.items():
            if leaf in only_cast:
                key = parameter, dtype
                source = leaf.detach()
                if key not in shared:
                    shared[key] = torch.empty_like(source, dtype=dtype)
                copy = shared[key]
                self._sources.append(source)
                self._copies.append(copy)
                self.leaves[parameter] = copy.detach().requires_grad_(leaf.requires_grad)

    def refresh(self) -> None:
        """Copy the parameters."""
        copies = self._copies
        if copies:
            torch._foreach_copy_(copies, self._sources)
