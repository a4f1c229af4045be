"""Splitting images by OpenCV where their channels lie side by side, and by torch elsewhere."""

import pytest
import torch

from tests.fuzz.problem import generator_of
from visdet.datasets.transforms.formatting import split_channels


def image(shape, dtype, layout):
    """Return random values [C, H, W] with the strides of a layout."""
    C, H, W = shape
    values = torch.randint(0, 256, (C, H + 2, W + 3), generator=generator_of(0)).to(dtype)
    if layout != "planar":
        values = values.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    if layout == "every second column":
        values = values.repeat_interleave(2, 2)[..., ::2]
    return (
        values[:, 1 : H + 1, 2 : W + 2]
        if layout == "crop"
        else values[:, :H, :W].clone(memory_format=torch.preserve_format)
    )


@pytest.mark.parametrize("layout", ["planar", "interleaved", "crop", "every second column"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64, torch.int16])
@pytest.mark.parametrize(
    "shape", [(3, 5, 7), (1, 4, 4), (4, 3, 2), (5, 6, 3), (3, 1, 1), (3, 0, 4), (3, 33, 40)]
)
def test_values_are_those_of_torch(shape, dtype, layout):
    given = image(shape, dtype, layout)
    before = given.clone()
    split = split_channels(given)
    assert split.is_contiguous() and torch.equal(split, given) and split.dtype == dtype
    assert torch.equal(given, before)
