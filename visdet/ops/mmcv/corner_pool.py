"""Corner pooling, which is the running maximum along rows or columns."""

import torch
from torch import Tensor

from .._declared import declared
from .._modules import OperatorModule

__all__ = ["CornerPool", "corner_pool"]

# For each mode, the dimension of [B, C, H, W] and whether the maximum runs towards lower indices.
_DIRECTIONS = {"bottom": (2, False), "left": (3, True), "right": (3, False), "top": (2, True)}


@declared(x="real [B, C, H, W]", mode=f"one of {tuple(_DIRECTIONS)}")
def corner_pool(x: Tensor, mode: str) -> Tensor:
    """Return the maximum of each pixel and of all pixels before it on the way in a direction, [B, C, H, W].

    Args:
        x: The map [B, C, H, W].
        mode: 'bottom' and 'right' run towards higher rows and columns, 'top' and 'left' towards lower ones.

    It is differentiable. Of equal maxima, the last one on the way gets the gradient. From a NaN on, pixels are NaN.

    Raises:
        ValueError: ``mode`` is unknown, or ``x`` has another number of dimensions.

    Source: CornerNet, arXiv 1808.01244; the modes are mmcv's.
    """
    dim, is_reversed = _DIRECTIONS[mode]
    if x.shape[dim] == 0:
        return x.clone()
    if not is_reversed:
        return torch.cummax(x, dim).values
    return torch.cummax(x.flip(dim), dim).values.flip(dim)


class CornerPool(OperatorModule):
    """A module that calls ``corner_pool`` in one direction."""

    operator = staticmethod(corner_pool)

    def __init__(self, mode: str) -> None:
        super().__init__(mode=mode)

    def forward(self, x: Tensor) -> Tensor:
        return self._call(x)
