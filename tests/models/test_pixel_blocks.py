"""The first convolution on blocks of pixels is the same convolution."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from tests.fuzz.problem import generator_of
from visdet.models.layers.pixel_blocks import in_blocks, suits_blocks


@pytest.mark.parametrize("size", [(8, 8), (9, 6), (1, 11), (7, 13)])
@pytest.mark.parametrize("channels", [1, 3, 5])
def test_the_convolution_of_blocks_is_that_of_pixels(size, channels, device):
    generator = generator_of(sum(size))
    images = torch.randn(2, channels, *size, generator=generator, dtype=torch.float64).to(device)
    weight = torch.randn(6, channels, 7, 7, generator=generator, dtype=torch.float64).to(device)
    weights = weight.requires_grad_(), weight.detach().clone().requires_grad_()
    expected = F.conv2d(images, weights[0], stride=2, padding=3)
    found = F.conv2d(*in_blocks(images, weights[1]))
    assert_close(found, expected)
    gradient = torch.randn_like(expected)
    of_pixels, of_blocks = (
        torch.autograd.grad(output, leaf, gradient)[0]
        for output, leaf in zip((expected, found), weights, strict=True)
    )
    assert_close(of_blocks, of_pixels)


@pytest.mark.cuda
def test_blocks_serve_the_stem_of_a_resnet_in_16_bits():
    stem = nn.Conv2d(3, 64, 7, 2, 3, bias=False).cuda()
    images = torch.randn(1, 3, 32, 33, device="cuda")
    others = [nn.Conv2d(3, 64, 7, 2, 3), nn.Conv2d(3, 64, 3, 2, 1, bias=False), nn.Conv2d(5, 64, 7, 2, 3)]
    assert not suits_blocks(stem, images)
    with torch.autocast("cuda", torch.bfloat16):
        assert suits_blocks(stem, images)
        assert not any(suits_blocks(other.cuda(), images) for other in others)
        assert_close(F.conv2d(*in_blocks(images, stem.weight)), stem(images), rtol=2e-2, atol=2e-2)
