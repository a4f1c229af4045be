"""Positions in the plane as sines and cosines."""

import math

import torch
from torch import Tensor

__all__ = ["gen_sineembed_for_position"]


def gen_sineembed_for_position(pos_tensor: Tensor, hidden_dim: int = 256) -> Tensor:
    """Return sines and cosines [..., hidden_dim] of positions [..., 2], those of y first.

    Source: the name and the formula are SparseDrive's.
    """
    half = hidden_dim // 2
    index = torch.arange(half, dtype=torch.float32, device=pos_tensor.device)
    wavelength = 10000 ** (2 * torch.div(index, 2, rounding_mode="floor") / half)
    phase = pos_tensor.float()[..., None] * (2 * math.pi) / wavelength  # [..., 2, half]
    waves = torch.stack([phase[..., 0::2].sin(), phase[..., 1::2].cos()], -1).flatten(-2)
    return torch.cat([waves[..., 1, :], waves[..., 0, :]], -1)
