"""A feature pyramid as one sequence of pixels."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from visdet.errors import InvalidInputError

from ..transfer import to_device

__all__ = ["FlatPyramid", "flatten_pyramid"]


@dataclass(frozen=True)
class FlatPyramid:
    """The levels of a feature pyramid one after another, S = Σ H_l·W_l pixels, built once per batch.

    A leading axis of 1 stands for the whole batch where no image is padded.

    Attributes:
        features: [B, S, C].
        positions: [B or 1, S, C], the position of each pixel plus the embedding of its level.
        padding_mask: [B, S] bool, True where a pixel is padding; None where no image is padded.
        level_shapes: [L, 2] int64 (height, width). level_starts: [L] int64, the first row of each level.
        centers: [B or 1, S, 2], pixel centres (x, y) in 0..1 of the image; beyond 1 in the padding.
        valid_ratios: [B or 1, L, 2], the part of each level's (width, height) that is image.
    """

    features: Tensor
    positions: Tensor
    padding_mask: Tensor | None
    level_shapes: Tensor
    level_starts: Tensor
    centers: Tensor
    valid_ratios: Tensor

    @property
    def reference_points(self) -> Tensor:
        """Each pixel's centre in every level, [B or 1, S, L, 2] (x, y) in 0..1 of the padded level."""
        return self.on_levels(self.centers)

    def on_levels(self, coordinates: Tensor) -> Tensor:
        """Return coordinates [B, Q, 2 or 4] in 0..1 of the image as [B, Q, L, 2 or 4] in 0..1 of each padded level."""
        ratios = self.valid_ratios.repeat(1, 1, coordinates.shape[-1] // 2)
        return coordinates.unsqueeze(-2) * ratios.unsqueeze(1)


def flatten_pyramid(
    feature_maps: Sequence[Tensor],
    image_sizes: Sequence[tuple[int, int]],
    batch_size_px: tuple[int, int],
    positional_encoding: Callable[[Tensor | None, Tensor], Tensor],
    level_embed: Tensor,
) -> FlatPyramid:
    """Return the flattened pyramid of a batch.

    Args:
        feature_maps: [B, C, H_l, W_l] of each level.
        image_sizes: (height, width) of each image without padding.
        batch_size_px: (height, width) of the padded images.
        positional_encoding: (mask [B, H, W] or None, map) -> [B, C, H, W].
        level_embed: [L, C].
    """
    if len(feature_maps) != len(level_embed):
        raise InvalidInputError(
            f"num_feature_levels is {len(level_embed)}, but the neck returns {len(feature_maps)} feature maps"
        )
    device = feature_maps[0].device
    is_padded = any(tuple(size) != tuple(batch_size_px) for size in image_sizes)
    sizes = to_device(image_sizes, device) if is_padded else None
    masks, positions, centers, ratios = [], [], [], []
    for feature_map, embedding in zip(feature_maps, level_embed, strict=True):
        height, width = feature_map.shape[-2:]
        x, y = _pixel_centers(height, width, device)
        if sizes is None:
            encoded = positional_encoding(None, feature_map[:1])
            centers.append(torch.stack((x / width, y / height), dim=-1).unsqueeze(0))
            ratios.append(centers[-1].new_ones(1, 2))
        else:
            rows, columns = _valid_pixels(sizes, batch_size_px, (height, width))
            mask = ~(rows.unsqueeze(2) & columns.unsqueeze(1))
            masks.append(mask.flatten(1))
            encoded = positional_encoding(mask, feature_map)
            valid_height, valid_width = rows.sum(1, keepdim=True), columns.sum(1, keepdim=True)  # [B, 1]
            centers.append(torch.stack((x / valid_width, y / valid_height), dim=-1))
            ratios.append(torch.cat((valid_width / width, valid_height / height), dim=-1))
        positions.append(encoded.to(feature_map.dtype).flatten(2).transpose(1, 2) + embedding)
    level_shapes = to_device([tuple(feature_map.shape[-2:]) for feature_map in feature_maps], device)
    areas = level_shapes.prod(1)
    return FlatPyramid(
        features=torch.cat([feature_map.flatten(2).transpose(1, 2) for feature_map in feature_maps], dim=1),
        positions=torch.cat(positions, dim=1),
        padding_mask=torch.cat(masks, dim=1) if is_padded else None,
        level_shapes=level_shapes,
        level_starts=areas.cumsum(0) - areas,
        centers=torch.cat(centers, dim=1),
        valid_ratios=torch.stack(ratios, dim=1),
    )


def _valid_pixels(
    sizes: Tensor, batch_size_px: tuple[int, int], level_shape: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Return which rows [B, H] and columns [B, W] of a level show the image, by nearest-neighbour downsampling.

    Args:
        sizes: [B, 2] (height, width) of the images in pixels.
    """
    axes = []
    for axis in (0, 1):
        pixels = torch.arange(batch_size_px[axis], device=sizes.device)
        is_valid = (pixels < sizes[:, axis, None]).float()
        axes.append(F.interpolate(is_valid.unsqueeze(1), size=level_shape[axis]).squeeze(1).bool())
    return axes[0], axes[1]


def _pixel_centers(height: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return x and y of the centres of a map's pixels, each [H * W] float32 in pixels, row by row."""
    y = torch.arange(height, dtype=torch.float32, device=device) + 0.5
    x = torch.arange(width, dtype=torch.float32, device=device) + 0.5
    return x.repeat(height), y.repeat_interleave(width)
