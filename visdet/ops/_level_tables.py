"""The tables of a flattened pyramid's levels (shapes and first rows) in the form that the attention kernels read."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from ._arguments import integer_table, starts_of
from ._library import CONSTANTS

__all__ = ["MAX_HOST_LEVELS", "level_starts_of", "level_tables", "rows_of_tables"]

# A CUDA kernel takes the tables of up to this many levels as an argument. It reads longer tables from the device.
MAX_HOST_LEVELS = CONSTANTS.get("max_host_levels", 0)


def level_starts_of(level_shapes: Tensor) -> Tensor:
    """Return the first row [L] of each level [L, 2] (height, width) of a flattened pyramid without gaps."""
    return starts_of(level_shapes.prod(1))


def rows_of_tables(level_shapes: Tensor, level_starts: Tensor) -> Iterator[tuple[Any, Any]]:
    """Return the rows of both tables, side by side, as lists and numbers of Python."""
    return zip(level_shapes.tolist(), level_starts.tolist(), strict=True)


def level_tables(
    value: Tensor,
    level_shapes: Tensor | Sequence[Sequence[int]],  # [L, 2] (height, width)
    level_starts: Tensor | Sequence[int] | None,  # [L]
) -> tuple[Tensor, Tensor]:
    """Return both tables as int64 tensors that a kernel for ``value`` can read.

    For ``value`` on the CPU they are on the CPU. For ``value`` on a GPU each stays where it is, on the CPU or on the
    GPU, unless there are more than ``MAX_HOST_LEVELS`` levels, whose tables are copied to the GPU.

    Raises:
        RuntimeError: the shapes are not [L, 2].
        TypeError: a table is neither a tensor nor a sequence of integers.
    """
    device = value.device
    expected = "a sequence of integers"
    shapes = integer_table("ms_deform_attn", "level_shapes", level_shapes, expected, value)
    if shapes.dim() != 2:
        raise RuntimeError(
            f"ms_deform_attn: level_shapes must be [L, 2] (height, width), got {list(shapes.shape)}"
        )
    if level_starts is None:
        starts = level_starts_of(shapes)
    else:
        starts = integer_table("ms_deform_attn", "level_starts", level_starts, expected, value)
    if value.is_cuda:
        if shapes.shape[0] > MAX_HOST_LEVELS:
            shapes = shapes.to(device, non_blocking=True)
            starts = starts.to(device, non_blocking=True)
    elif device.type == "cpu":
        shapes, starts = shapes.to("cpu"), starts.to("cpu")
    return shapes, starts
