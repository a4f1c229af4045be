"""A feature pyramid whose levels are flattened into one sequence of pixels."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from visdet.execution.capture import keeps_tables
from visdet.ops.fused import give_rows

from ..layers.as_if_unpadded import Padding
from ..layers.positional_encoding import SinePositionalEncoding
from ..transfer import to_device


@dataclass(frozen=True)
class FlatPyramid:
    """The levels of a feature pyramid one after another, S = Σ H_l·W_l pixels, built once per batch.

    If no image is padded, tensors that are equal for all images have a leading axis of 1.

    Attributes:
        features: [B, S, C].
        positions: [B or 1, S, C], the positional encoding of each pixel plus the embedding of its level.
        padding_mask: [B, S] bool, True where a pixel is padding, or None if no image is padded.
        level_shapes: [L, 2] int64 (height, width). level_starts: [L] int64, the first row of each level.
        pixel_levels: [S] int64, the level of each pixel.
        centers: [B or 1, S, 2], pixel centres (x, y) in 0..1 of the image. In the padding they exceed 1.
        valid_ratios: [B or 1, L, 2], the fraction of each level's (width, height) that is not padding.
        is_as_if_unpadded: whether the maps are those of the images alone, and padding must not become a query.
    """

    features: Tensor
    positions: Tensor
    padding_mask: Tensor | None
    level_shapes: Tensor
    level_starts: Tensor
    pixel_levels: Tensor
    centers: Tensor
    valid_ratios: Tensor
    is_as_if_unpadded: bool = False

    @property
    def layout(self) -> dict[str, Any]:
        """The arguments of ``MultiScaleDeformableAttention`` that say where the levels and their padding lie."""
        return {
            "key_padding_mask": self.padding_mask,
            "spatial_shapes": self.level_shapes,
            "level_start_index": self.level_starts,
        }

    def on_levels(self, coordinates: Tensor) -> Tensor:
        """Return coordinates [B, Q, 2 or 4] in 0..1 of the image as [B, Q, L, 2 or 4] in 0..1 of each padded level."""
        ratios = self.valid_ratios.repeat(1, 1, coordinates.shape[-1] // 2)
        return coordinates.unsqueeze(-2) * ratios.unsqueeze(1)


def flatten_pyramid(
    feature_maps: Sequence[Tensor],
    image_sizes: Tensor | None,
    batch_size_px: tuple[int, int],
    positional_encoding: SinePositionalEncoding,
    level_embed: Tensor,
    alone: Padding | None = None,
) -> FlatPyramid:
    """Return the flattened pyramid of a batch.

    Args:
        feature_maps: [B, C, H_l, W_l] of each level.
        image_sizes: [B, 2], the (height, width) of each image without padding, or None if no image is padded.
        batch_size_px: the (height, width) of the padded images.
        positional_encoding: the encoding of pixels. level_embed: [L, C], the embeddings of the levels.
        alone: knows the sizes of the images on each level if they were computed as if they were not padded.
    """
    level_sizes = tuple(tuple(feature_map.shape[-2:]) for feature_map in feature_maps)
    pixels = _pixels(level_sizes, batch_size_px, level_embed.device)
    level_shapes = pixels.level_shapes
    rows_columns = pixels.rows_columns
    pixel_levels = pixels.level
    numbers = rows_columns + 1
    valid = level_shapes.unsqueeze(0)
    padding_mask = None
    if image_sizes is None:
        last = valid[:, pixel_levels]  # [1, S, 2]
        counted = numbers.unsqueeze(0)
    else:
        # The sizes [B, L, 2] (height, width) are those of the images' masks after nearest-neighbour downsampling.
        valid = (pixels.sources < image_sizes[:, None, :, None]).sum(-1)
        if alone is not None:
            valid = torch.stack([alone.sizes_on(size) for size in level_sizes], dim=1)
        last = valid[:, pixel_levels]  # [B, S, 2]
        is_valid = rows_columns < last
        padding_mask = ~is_valid.all(-1)
        # Rows are counted over the valid pixels of a column, and columns over those of a row, so that columns and rows
        # of padding count 0.
        counted = torch.minimum(numbers, last) * is_valid.flip(-1)
    embedding = torch.cat(
        [
            row.expand(height * width, -1)
            for row, (height, width) in zip(level_embed, level_sizes, strict=True)
        ]
    )
    encoded = _encoded(positional_encoding, counted, valid, pixels)
    features = torch.cat([feature_map.flatten(2).transpose(1, 2) for feature_map in feature_maps], dim=1)
    positions = encoded.to(features.dtype) + embedding
    give_rows(positions, level_embed, pixel_levels)
    return FlatPyramid(
        features=features,
        positions=positions,
        padding_mask=padding_mask,
        level_shapes=level_shapes,
        level_starts=pixels.level_starts,
        pixel_levels=pixel_levels,
        centers=((rows_columns + 0.5) / last).flip(-1),
        valid_ratios=(valid / level_shapes).flip(-1),
        is_as_if_unpadded=alone is not None,
    )


def _encoded(encoding: SinePositionalEncoding, counted: Tensor, sizes: Tensor, pixels: "_Pixels") -> Tensor:
    """Return the encoding of pixels [B, S, C] in float32, read from tables of the rows and the columns of each level.

    Args:
        encoding: the encoding. counted: [B, S, 2] int64, the row and the column of each pixel, counted from 1.
        sizes: [B, L, 2] int64, the last row and column that are counted on each level.
    """
    device = sizes.device
    batch, levels, _ = sizes.shape
    count = 1 + pixels.sources.shape[-1]
    steps = torch.arange(count, device=device).unsqueeze(-1)  # 0 is padding
    last = torch.where(steps == 0, 0, sizes.unsqueeze(2))  # [B, L, steps, 2]
    table = encoding.encode(steps.expand_as(last), last).unflatten(-1, (2, -1))
    image = torch.arange(batch, device=device).view(-1, 1, 1)
    axis = torch.arange(2, device=device)
    level = image * levels + pixels.level.unsqueeze(-1)  # [B, S, 1], among those of all images
    index = (level * count + counted) * 2 + axis
    return F.embedding(index, table.flatten(0, 3)).flatten(-2)


class _Pixels(NamedTuple):
    """Tables that are the same for all pyramids of one size.

    Attributes:
        level_shapes: [L, 2] int64 (height, width). level_starts: [L] int64.
        level: [S] int64, the level of each pixel. rows_columns: [S, 2] int64, its row and column in that level.
        sources: [L, 2, longest side] int64, the row or column of the images from which nearest-neighbour sampling
            takes each row or column of a level. Entries past the end of a level are greater than any image.
    """

    level_shapes: Tensor
    level_starts: Tensor
    level: Tensor
    rows_columns: Tensor
    sources: Tensor


@keeps_tables(max_sizes=64)
def _pixels(
    level_sizes: tuple[tuple[int, int], ...], batch_size_px: tuple[int, int], device: torch.device
) -> _Pixels:
    """Return the tables of a pyramid. They are kept, so that they are copied to the device only once."""
    with torch.inference_mode(False), torch.no_grad():
        shapes = torch.tensor(level_sizes)
        areas = shapes.prod(1)
        grids = [torch.cartesian_prod(*map(torch.arange, size)) for size in level_sizes]
        level = torch.cat([grid.new_full(grid.shape[:1], index) for index, grid in enumerate(grids)])
        sources = torch.full((len(level_sizes), 2, max(map(max, level_sizes))), torch.iinfo(torch.int64).max)
        for index, size in enumerate(level_sizes):
            for axis, length in enumerate(size):
                image_pixels = torch.arange(batch_size_px[axis], dtype=torch.float32)
                sources[index, axis, :length] = F.interpolate(image_pixels[None, None], size=length)
        tables = (shapes, areas.cumsum(0) - areas, level, torch.cat(grids), sources)
        return _Pixels(*(to_device(table, device) for table in tables))
