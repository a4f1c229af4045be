"""Sine position embeddings of pixels and boxes."""

import math
from typing import Any

import torch
from mmengine.model import BaseModule
from torch import Tensor

from visdet.errors import InvalidInputError
from visdet.registry import MODELS

__all__ = ["SinePositionalEncoding", "sine_embedding"]


def sine_embedding(positions: Tensor, num_feats: int, temperature: float = 10000.0) -> Tensor:
    """Return sines and cosines of positions [...] at ``num_feats / 2`` wavelengths, [..., num_feats] in float32.

    Channel 2i is sin(position / temperature^(2i / num_feats)), channel 2i + 1 the cosine of the same angle.
    """
    channel = torch.arange(num_feats, dtype=torch.float32, device=positions.device)
    wavelength = temperature ** (2 * torch.div(channel, 2, rounding_mode="floor") / num_feats)
    angle = positions.float().unsqueeze(-1) / wavelength
    return torch.stack((angle[..., 0::2].sin(), angle[..., 1::2].cos()), dim=-1).flatten(-2)


@MODELS.register_module()
class SinePositionalEncoding(BaseModule):
    """Sine and cosine embedding of each pixel's row and column, counted over valid pixels from 1.

    Args:
        num_feats: channels for each of the two axes; even.
        temperature: base of the wavelengths.
        normalize: scale positions to 0..``scale`` by (position + offset) / (last position + eps) · scale.
        scale: full circle by default.

    Source: the DETR family; names and defaults are mmdet's.
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
        """Return the embedding [B, 2·num_feats, H, W], rows' channels first, in float32.

        Args:
            mask: [B, H, W] bool, True where a pixel is padding; None if there is none.
            input: [B, ..., H, W], read for its size where ``mask`` is None.
        """
        if mask is not None:
            valid = (~mask.bool()).float()
            rows, columns = valid.cumsum(dim=1), valid.cumsum(dim=2)
        elif input is not None:
            height, width = input.shape[-2:]
            rows = torch.arange(1, height + 1, dtype=torch.float32, device=input.device).view(1, height, 1)
            columns = torch.arange(1, width + 1, dtype=torch.float32, device=input.device).view(1, 1, width)
        else:
            raise ValueError(
                "SinePositionalEncoding: give mask [B, H, W] or input [B, ..., H, W], got neither"
            )
        if self.normalize:
            rows = (rows + self.offset) / (rows[:, -1:, :] + self.eps) * self.scale
            columns = (columns + self.offset) / (columns[:, :, -1:] + self.eps) * self.scale
        embeddings = [sine_embedding(axis, self.num_feats, self.temperature) for axis in (rows, columns)]
        if mask is None:  # each axis alone, spread over the map
            embeddings = [axis.expand(input.shape[0], height, width, -1) for axis in embeddings]
        return torch.cat(embeddings, dim=-1).permute(0, 3, 1, 2)
