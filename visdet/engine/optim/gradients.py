"""The gradients of many parameters in one block of memory, so that one kernel empties or averages them."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_ALIGNMENT = 64  # numbers, so that each gradient begins at a multiple of 128 bytes or more


def parameters_in(groups: Iterable[Mapping[str, Any]]) -> Iterator[Tensor]:
    """Yield the parameters of the groups of an optimizer."""
    for group in groups:
        yield from group["params"]


class GradientBlock:
    """The gradients of some parameters: one flat tensor for each dtype and device, of which they are views.

    Args:
        parameters: the parameters.

    Attributes:
        parameters: the parameters. views: their gradients, in the same order and with the strides of the parameters.
        flat: the tensors that hold them. The few numbers between two gradients are zeros.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = list(parameters)
        sizes: dict[tuple[torch.dtype, torch.device], int] = defaultdict(int)
        places = []
        for parameter in self.parameters:
            kind = parameter.dtype, parameter.device
            places.append((kind, sizes[kind]))
            sizes[kind] += -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT
        blocks = {kind: torch.zeros(size, dtype=kind[0], device=kind[1]) for kind, size in sizes.items()}
        self.flat = list(blocks.values())
        self.views = [
            blocks[kind].as_strided(parameter.shape, _dense_strides(parameter), offset)
            for parameter, (kind, offset) in zip(self.parameters, places, strict=True)
        ]

    def attach(self) -> None:
        """Make the views the gradients of the parameters. A gradient that lies elsewhere keeps its values."""
        if self.is_attached():
            return
        parameters = self.parameters
        gradients = [parameter.grad for parameter in parameters]
        pairs = list(zip(gradients, self.views, strict=True))
        empty = [view for gradient, view in pairs if gradient is None]
        if empty:
            torch._foreach_zero_(empty)
        for parameter, (gradient, view) in zip(parameters, pairs, strict=True):
            if gradient is not None and gradient is not view:
                view.copy_(gradient)
            parameter.grad = view

    def is_attached(self) -> bool:
        """Return whether the views are the gradients of parameters that still learn."""
        return all(
            parameter.grad is view and parameter.requires_grad
            for parameter, view in zip(self.parameters, self.views, strict=True)
        )


class Gradients:
    """The blocks in which the gradients of a model lie, one for each set of parameters that got some together.

    Args:
        order: the order of the parameters in every block, which is the same in all processes.
    """

    def __init__(self, order: Iterable[Tensor] = ()) -> None:
        self._position = {parameter: position for position, parameter in enumerate(order)}
        self._blocks: dict[frozenset[Tensor], GradientBlock] = {}
        self._attached: GradientBlock | None = None

    def block_of(self, parameters: Sequence[Tensor]) -> GradientBlock:
        """Return the block of these parameters, which is made once."""
        key = frozenset(parameters)
        blocks = self._blocks
        if key not in blocks:
            blocks[key] = GradientBlock(sorted(parameters, key=self._place))
        return blocks[key]

    def _place(self, parameter: Tensor) -> int:
        position = self._position
        return position.get(parameter, len(position))

    def attach(self, block: GradientBlock) -> None:
        """Let the gradients of a block's parameters lie in it, and forget those of others that lay in another one."""
        before = self._attached
        self._attached = block
        if before is not None and before is not block:
            kept = set(block.parameters)
            for parameter, view in zip(before.parameters, before.views, strict=True):
                if parameter not in kept and parameter.grad is view:
                    parameter.grad = None
        block.attach()

    def flat(self) -> list[Tensor]:
        """Return the tensors that hold all gradients, which are none if the gradients lie elsewhere."""
        block = self._attached
        if block is None or not block.is_attached():
            return []
        return block.flat

    def zero(self) -> bool:
        """Set the gradients to zero and return True, if they lie in a block."""
        flat = self.flat()
        if flat:
            torch._foreach_zero_(flat)
        return bool(flat)


def _dense_strides(parameter: Tensor) -> tuple[int, ...]:
    """Return the strides of a gradient: those of the parameter if it is dense, as autograd chooses them."""
    return torch.empty_like(parameter, device="meta").stride()
