"""Necks refuse feature maps that they were not built for."""

import pytest
import torch

from visdet.models.necks import FPN, ChannelMapper


@pytest.mark.parametrize("neck", [ChannelMapper([4, 8], 16), FPN([4, 8], 16, num_outs=2)])
def test_feature_maps_of_other_channels_are_named(neck):
    maps = [torch.zeros(1, 4, 8, 8), torch.zeros(1, 8, 4, 4)]
    assert [tuple(level.shape[:2]) for level in neck(maps)] == [(1, 16), (1, 16)]
    with pytest.raises(ValueError, match="inputs must be 2 feature maps, got 1"):
        neck(maps[:1])
    with pytest.raises(
        ValueError, match=r"in_channels is \[4, 8\], but the feature maps have \[8, 4\] channels"
    ):
        neck(maps[::-1])
