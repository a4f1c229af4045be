"""Inputs and tolerances for the tests of the detection operators."""

import functools
from typing import NamedTuple

import pytest
import torch

from visdet.ops.carafe import carafe_reference
from visdet.ops.focal_loss import sigmoid_focal_loss_reference
from visdet.ops.roi_pool import roi_pool_reference

DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda])]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


class Setup(NamedTuple):
    """An operator's overload, its reference, arguments, and which of them have gradients."""

    op: object
    reference: object
    arguments: tuple
    differentiable: tuple


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rois_of(N, B, H, W, seed=0):
    """Return regions, some across the border, one of no image and one without area."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.tensor([W, H], dtype=torch.float64)
    corner = (torch.rand(N, 2, generator=generator, dtype=torch.float64) * 1.4 - 0.3) * size
    extent = torch.rand(N, 2, generator=generator, dtype=torch.float64) * size
    rois = torch.cat([torch.randint(0, B, (N, 1), generator=generator), corner, corner + extent], 1)
    if N > 3:
        rois[1, 0], rois[2, 0] = B, -1
        rois[3, 3:] = rois[3, 1:3] - 2
    return rois


def make_roi_pool(dtype, device, B=2, C=3, H=9, W=11, N=7, PH=3, PW=2, scale=0.7):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    arguments = (
        draw(B, C, H, W).to(device, dtype),
        rois_of(N, B, H / scale, W / scale).to(device, wide),
        PH,
        PW,
        scale,
    )
    return Setup(torch.ops.visdet.roi_pool.default, roi_pool_reference, arguments, (0,))


def make_far_apart(dtype, device):
    """Two small regions in corners of a map: on the CPU each is laid out by itself."""
    setup = make_roi_pool(dtype, device, B=1, C=19, H=40, W=50, N=2, PH=3, PW=4, scale=1.0)
    rois = setup.arguments[1].new_tensor([[0, 1, 2, 6, 5], [0, 44.5, 33, 49, 41]])
    return setup._replace(arguments=(setup.arguments[0], rois, *setup.arguments[2:]))


def make_focal(dtype, device, N=13, C=7, gamma=2.0, weighted=True):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    target = torch.randint(-1, C + 2, (N,), generator=torch.Generator().manual_seed(1))
    weight = draw(C if weighted else 0, seed=2).abs().to(device, wide)
    arguments = ((draw(N, C) * 4).to(device, dtype), target.to(device), weight, gamma, 0.3)
    op = torch.ops.visdet.sigmoid_focal_loss.default
    return Setup(op, sigmoid_focal_loss_reference, arguments, (0,))


def make_carafe(dtype, device, B=2, C=6, H=5, W=7, K=3, G=2, s=2):
    masks = draw(B, G * K * K, H * s, W * s, seed=1)
    arguments = (draw(B, C, H, W).to(device, dtype), masks.to(device, dtype), K, G, s)
    return Setup(torch.ops.visdet.carafe.default, carafe_reference, arguments, (0, 1))


CASES = {
    "roi_pool": make_roi_pool,
    "roi_pool-large-bins": functools.partial(make_roi_pool, H=40, W=50, PH=1, PW=3, N=4, C=1),
    "roi_pool-many-bins": functools.partial(make_roi_pool, PH=14, PW=13, N=5, C=17, scale=1.0),
    "roi_pool-far-apart": make_far_apart,
    "roi_pool-one-pixel": functools.partial(make_roi_pool, H=1, W=1),
    "focal": make_focal,
    "focal-one-class": functools.partial(make_focal, N=333, C=1, weighted=False),
    "focal-80": functools.partial(make_focal, N=70, C=80, gamma=1.5, weighted=False),
    "focal-gamma-0": functools.partial(make_focal, N=5, C=33, gamma=0.0),
    "focal-packed": functools.partial(make_focal, N=9, C=64),
    "carafe": make_carafe,
    "carafe-wide": functools.partial(make_carafe, B=1, C=9, H=3, W=37, K=5, G=1),
    "carafe-one": functools.partial(make_carafe, B=1, C=2, H=1, W=1, K=7, G=2, s=3),
    "carafe-no-scale": functools.partial(make_carafe, C=20, G=1, K=1, s=1),
}
EMPTY = {
    "roi_pool-no-region": functools.partial(make_roi_pool, N=0),
    "roi_pool-no-channel": functools.partial(make_roi_pool, C=0),
    "roi_pool-no-image": functools.partial(make_roi_pool, B=1, H=0),
    "focal-no-row": functools.partial(make_focal, N=0),
    "focal-no-class": functools.partial(make_focal, C=0),
    "carafe-no-image": functools.partial(make_carafe, B=0),
    "carafe-no-channel": functools.partial(make_carafe, C=0),
    "carafe-no-row": functools.partial(make_carafe, H=0),
}


def first_of(result):
    return result[0] if isinstance(result, tuple) else result


def run(function, setup, grad_output=None, exact=False):
    """Return the output and the gradients, of the arguments in float64 on the CPU if ``exact``."""
    arguments = [
        a.double().cpu() if exact and isinstance(a, torch.Tensor) and a.is_floating_point()
        else a.cpu() if exact and isinstance(a, torch.Tensor) else a
        for a in setup.arguments
    ]  # fmt: skip
    leaves = [arguments[i].detach().clone().requires_grad_() for i in setup.differentiable]
    for i, leaf in zip(setup.differentiable, leaves, strict=True):
        arguments[i] = leaf
    output = first_of(function(*arguments))
    if grad_output is None:
        grad_output = draw(*output.shape, seed=5).to(output)
    return output.detach(), torch.autograd.grad(output, leaves, grad_output.to(output), allow_unused=True)


def assert_near(actual, expected, dtype):
    scale = max(expected.abs().max().item(), 1e-30) if expected.numel() else 1.0
    assert actual.shape == expected.shape and actual.dtype == dtype
    torch.testing.assert_close(actual.double().cpu() / scale, expected / scale, rtol=0, atol=TOLERANCE[dtype])
