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


@pytest.mark.parametrize("channels", [16, 8])
def test_biases_before_a_normalisation_are_taken_over_if_they_fit(channels):
    neck = ChannelMapper([4, 8], 16, norm_cfg={"type": "GN", "num_groups": 4})
    key, bias = "convs.1.conv.bias", torch.arange(channels, dtype=torch.float32)
    _, unexpected = neck.load_state_dict({key: bias}, strict=False)
    assert unexpected == ([] if channels == 16 else [key])
    assert channels != 16 or torch.equal(neck.state_dict()[key], bias)
