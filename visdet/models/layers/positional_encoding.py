"""Sine position embeddings of pixels and boxes."""

import math
from typing import Any

import torch
from mmengine.model import BaseModule
from torch import Tensor

from visdet.errors import InvalidInputError
from visdet.registry import MODELS


def sine_embedding(positions: Tensor, num_feats: int, temperature: float = 10000.0) -> Tensor:
    """Return sines and cosines of positions [...] at ``num_feats / 2`` wavelengths, [..., num_feats] in float32.

    Channel 2i is sin(position / temperature^(2i / num_feats)), channel 2i + 1 the cosine of the same angle.
    """
    channel = torch.arange(0, num_feats, 2, dtype=torch.float32, device=positions.device)
    wavelength = temperature ** (channel / num_feats)
    angle = positions.float().unsqueeze(-1) / wavelength
    return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(-2)


def box_embedding(positions: Tensor, num_feats: int) -> Tensor:
    """Return the sine embedding [..., P·num_feats] of the P numbers in 0..1 that stand for each box."""
    return sine_embedding(positions * (2 * math.pi), num_feats).flatten(-2)


@MODELS.register_module()
class SinePositionalEncoding(BaseModule):
    """Sine and cosine embedding of the row and the column of each pixel.

    Rows and columns are counted from 1, over valid pixels only.

    Args:
        num_feats: channels for each of the two axes, an even number.
        temperature: base of the wavelengths.
        normalize: whether positions are scaled by (position + offset) / (last position + eps) · scale.
        scale: the position that the last pixel is scaled to, in radians. The default is a full circle.
        eps: added to the last position, so that the division is defined.
        offset: added to the positions before they are scaled.

    Raises:
        ValueError: ``num_feats`` is not even and positive.

    Source: Carion et al., DETR, ECCV 2020; names and defaults are mmdet's.
    """

    def __init__(
        self,
        num_feats: int,
        temperature: float = 10000.0,
        normalize: bool = False,
        scale: float = 2 * math.pi,
        eps: float = 1e-6,
        offset: float = 0.0,
        init_cfg: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(init_cfg)
        if num_feats < 2 or num_feats % 2:
            raise InvalidInputError(
                f"SinePositionalEncoding: num_feats must be even and positive, got {num_feats}"
            )
        self.num_feats = num_feats
        self.temperature = temperature
        self.normalize = normalize
        self.scale = scale
        self.eps = eps
        self.offset = offset

    def forward(self, mask: Tensor | None, input: Tensor | None = None) -> Tensor:
        """Return the embedding [B, 2·num_feats, H, W] in float32. The channels of the rows come first.

        Args:
            mask: [B, H, W] bool, True where a pixel is padding, or None if there is no padding.
            input: [B, ..., H, W]. If ``mask`` is None, its size is used.
        """
        if mask is None:
            mask = input.new_zeros(len(input), *input.shape[-2:])  # type: ignore[union-attr, arg-type]
        valid = (~mask.bool()).float()
        positions = torch.stack((valid.cumsum(dim=1), valid.cumsum(dim=2)), dim=-1)
        last_rows = valid.sum(dim=1, keepdim=True)
        last_columns = valid.sum(dim=2, keepdim=True)
        last = torch.stack(torch.broadcast_tensors(last_rows, last_columns), dim=-1)
        return self.encode(positions, last).permute(0, 3, 1, 2)

    def encode(self, positions: Tensor, last: Tensor) -> Tensor:
        """Return the embedding [..., 2·num_feats] of pixels in float32. The row and the column are encoded alone.

        Args:
            positions: [..., 2], the row and the column of each pixel, counted from 1.
            last: [..., 2], the last row in the pixel's column and the last column in its row.
        """
        if self.normalize:
            positions = (positions + self.offset) / (last + self.eps) * self.scale
        return sine_embedding(positions, self.num_feats, self.temperature).flatten(-2)
