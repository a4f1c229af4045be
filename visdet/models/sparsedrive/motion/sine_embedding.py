"""Positions in the plane as sines and cosines."""

import math

from torch import Tensor

from ...layers.positional_encoding import sine_embedding


def gen_sineembed_for_position(pos_tensor: Tensor, hidden_dim: int = 256) -> Tensor:
    """Return the sines and cosines [..., hidden_dim] of positions [..., 2]. Those of y come first.

    Source: the name and the formula are SparseDrive's.
    """
    y_and_x = pos_tensor.float().flip(-1)
    return sine_embedding(y_and_x * (2 * math.pi), hidden_dim // 2).flatten(-2)
