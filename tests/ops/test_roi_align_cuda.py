"""The CUDA kernels of roi_align and roi_align_rotated beside their definitions and beside torchvision."""

import math

import pytest
import torch
from test_roi_align_cpu import CASES as SMALL_CASES
from test_roi_align_cpu import TOLERANCE

from visdet.ops import roi_align, roi_align_rotated
from visdet.ops.roi_align import roi_align_reference
from visdet.ops.roi_align_rotated import roi_align_rotated_reference

pytestmark = pytest.mark.cuda
# Shapes [B, C, H, W], regions, and (output size, spatial scale, sampling ratio, aligned).
CASES = {
    **SMALL_CASES,
    "B1-C67-H40-W50-N60-odd-channels": ((1, 67, 40, 50), 60, ((7, 7), 1.0, 0, True)),
    "B1-C130-H40-W50-N9-two-slabs": ((1, 130, 40, 50), 9, ((7, 7), 1.0, 2, True)),
    "B3-C17-H90-W70-N20-sparse-samples": ((3, 17, 90, 70), 20, ((4, 3), 1.0, 2, True)),
    "B1-C3-H1-W300-N9-wider-than-a-window": ((1, 3, 1, 300), 9, ((2, 5), 1.0, 0, True)),
    "B1-C3-H200-W310-N9-some-windows": ((1, 3, 200, 310), 9, ((7, 7), 1.0, 0, True)),
    "B2-C5-H50-W60-N9-groups-of-rows": ((2, 5, 50, 60), 9, ((32, 32), 1.0, 0, True)),
    "B2-C5-H20-W30-N9-more-bins-than-lanes": ((2, 5, 20, 30), 9, ((40, 3), 1.0, 0, True)),
}


def make(name, dtype, turned):
    (B, C, H, W), N, settings = CASES[name]
    generator = torch.Generator().manual_seed(len(name))
    x = torch.randn(B, C, H, W, generator=generator).to(dtype)
    corner = torch.rand(N, 2, generator=generator) * torch.tensor([W + 2, H + 2]) - 2
    extent = torch.rand(N, 2, generator=generator) * torch.tensor([W, H])
    extent[-1] *= 0.05
    index = torch.randint(B, (N, 1), generator=generator)
    if turned:
        boxes = torch.cat([corner, extent], 1) / settings[1]
        numbers = [index, boxes, torch.rand(N, 1, generator=generator) * 14 - 7]
    else:
        corner[0], extent[0] = 1.0, -0.4  # backwards: nothing, or samples that go back
        numbers = [index, torch.cat([corner, corner + extent], 1) / settings[1]]
    rois = torch.cat(numbers, 1).to(torch.float64 if dtype == torch.float64 else torch.float32)
    return x.cuda(), rois.cuda(), settings


def both(function, x, rois, settings, gradient=None):
    x = x.detach().requires_grad_()
    output = function(x, rois, *settings)
    if gradient is None:
        gradient = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(x)
    return output.detach(), torch.autograd.grad(output, x, gradient)[0], gradient


def upright(function):
    return lambda x, rois, size, scale, ratio, aligned: function(x, rois, size, scale, ratio, "avg", aligned)


@pytest.fixture
def in_order():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def compare(turned, name, dtype):
    x, rois, settings = make(name, dtype, turned)
    function, reference = (
        (roi_align_rotated, roi_align_rotated_reference)
        if turned
        else (upright(roi_align), upright(roi_align_reference))
    )
    output, grad, gradient = both(function, x, rois, settings)
    assert output.dtype == grad.dtype == dtype and (turned or output.any())
    expected = both(reference, x.double(), rois.double(), settings, gradient.double())
    for found, wanted in zip((output, grad), expected[:2], strict=True):
        peak = max(wanted.abs().max().item(), 1)
        close = dict(rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * peak)
        torch.testing.assert_close(found.double(), wanted, **close)
    return both(function, x, rois, settings)[1]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("turned", [False, True], ids=["upright", "rotated"])
def test_kernels_match_the_definitions(turned, name, dtype):
    compare(turned, name, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("turned", [False, True], ids=["upright", "rotated"])
def test_gradients_in_order(turned, name, dtype, in_order):
    first = compare(turned, name, dtype)
    assert all(torch.equal(compare(turned, name, dtype), first) for _ in range(2))


@pytest.mark.parametrize("scale", [1e-40, 1e-20, 1.0, 1e30])
def test_gradients_in_order_of_any_size(scale, in_order):
    x, rois, settings = make("B2-C3-H9-W11-N7-adaptive", torch.float64, False)
    output, expected, gradient = both(upright(roi_align_reference), x, rois, settings)
    _, found, _ = both(upright(roi_align), x, rois, settings, gradient * scale)
    torch.testing.assert_close(found / scale, expected, rtol=1e-10, atol=1e-10)
    gradient[output[:, 1, 0, 0].abs().argmax(), 1, 0, 0] = math.nan
    _, found, _ = both(upright(roi_align), x, rois, settings, gradient)
    assert found.isnan().flatten(2).any(2).sum() == 1


@pytest.mark.parametrize("turned", [False, True], ids=["upright", "rotated"])
def test_regions_that_count_for_nothing(turned):
    x, rois, settings = make("B2-C3-H9-W11-N7-adaptive", torch.float32, turned)
    bad = rois[[1] * 6].clone()
    bad[0, 0], bad[1, 0], bad[2, 0], bad[3, 0] = -1, 2, 0.5, math.nan
    bad[4, 2], bad[5, -1] = math.nan, math.nan
    if turned:
        bad[5, -1] = math.inf
    huge = rois[[1] * 3].clone()
    huge[0, 3], huge[1, 1:5], huge[2, 1:3] = 1e30, math.inf, -1e9
    function = roi_align_rotated if turned else upright(roi_align)
    reference = roi_align_rotated_reference if turned else upright(roi_align_reference)
    output, grad, gradient = both(function, x, torch.cat([bad, huge]), settings)
    expected = both(reference, x, torch.cat([bad, huge]), settings, gradient)
    assert not output[:6].any()
    torch.testing.assert_close((output, grad), expected[:2], rtol=1e-4, atol=1e-4)


def test_gradients_numerically():
    for turned, function in ((False, upright(roi_align)), (True, roi_align_rotated)):
        x, rois, settings = make("B2-C3-H9-W11-N7-adaptive", torch.float64, turned)
        assert torch.autograd.gradcheck(
            lambda x, f=function, r=rois, s=settings: f(x, r, *s), x.requires_grad_(), nondet_tol=1e-12
        )


@pytest.mark.slow
def test_an_output_of_more_than_2_31_numbers():
    N = 172_000
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("it needs 24 GiB of memory")
    x = torch.randn(1, 256, 20, 30, device="cuda", dtype=torch.float16)
    rois = torch.tensor([[0, 1.0, 2, 20, 15]], device="cuda").expand(N, 5)
    output = roi_align(x, rois, 7)
    assert output.numel() > 1 << 31
    one = roi_align(x, rois[:1], 7)[0]
    assert one.any() and torch.equal(output[-1], one) and torch.equal(output[N // 2], one)
