"""Necks refuse feature maps that they were not built for."""

import pytest
import torch

from visdet.models.necks import FPN, ChannelMapper


@pytest.mark.parametrize("neck", [ChannelMapper([4, 8], 16), FPN([4, 8], 16, num_outs=2)])
def test_feature_maps_of_other_channels_are_named(neck):
    maps = [torch.zeros(1, 4, 8, 8), torch.zeros(1, 8, 4, 4)]
    assert [tuple(level.shape[:2]) for level in neck(maps)] == [(1, 16), (1, 16)]
    for given, channels in ((maps[:1], "4"), (maps[::-1], "8, 4")):
        with pytest.raises(ValueError, match=rf"in_channels is \[4, 8\], .* \[{channels}\]"):
            neck(given)
