"""Necks refuse feature maps that they were not built for."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from visdet.models.layers.twice_as_large import add_twice_as_large
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


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_repeated_values_keep_their_type_under_autocast(mode, monkeypatch):
    """A map in float32 would take twice the memory, and be rounded before the next convolution."""
    neck, casts, interpolate = FPN([4, 8], 16, num_outs=2, upsample_cfg={"mode": mode}), [], F.interpolate

    def note(level, *arguments, **options):
        casts.append(torch.is_autocast_enabled("cpu"))
        return interpolate(level, *arguments, **options)

    monkeypatch.setattr(F, "interpolate", note)
    levels = [torch.randn(1, 4, 8, 8), torch.randn(1, 8, 4, 4)]
    with torch.autocast("cpu", torch.bfloat16):
        outs = neck(levels)
    assert outs[0].dtype is torch.bfloat16
    neck(levels)
    assert casts == [mode != "nearest", False]


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_a_map_is_added_to_one_twice_as_large(layout, device):
    finer, coarser = (
        torch.randn(2, 4, *size).to(device, memory_format=layout).requires_grad_()
        for size in ((6, 10), (3, 5))
    )
    total = add_twice_as_large(finer, coarser)
    expected = finer + F.interpolate(coarser, (6, 10), mode="nearest")
    assert torch.equal(total, expected) and total.is_contiguous(memory_format=layout)
    grad = torch.randn_like(total)
    found, true = (torch.autograd.grad(one, (finer, coarser), grad) for one in (total, expected))
    assert_close(found, true)


@pytest.mark.cuda
def test_training_under_autocast_on_a_gpu_gives_the_maps_and_gradients_of_a_cpu():
    neck = FPN([4, 8], 16, num_outs=2)
    maps = [torch.randn(2, 4, 80, 96), torch.randn(2, 8, 40, 48)]
    results = []
    for device, layout in (("cpu", torch.contiguous_format), ("cuda", torch.channels_last)):
        neck = neck.to(device, memory_format=layout)
        inputs = [level.to(device, memory_format=layout).requires_grad_() for level in maps]
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            outs = neck(tuple(inputs))
        wanted = [*inputs, *neck.parameters()]
        grads = torch.autograd.grad([out.float().square().mean() for out in outs], wanted)
        results.append([one.detach().float().cpu() for one in (*outs, *grads)])
    for expected, found in zip(*results, strict=True):
        assert (found - expected).norm() < 0.02 * expected.norm()
