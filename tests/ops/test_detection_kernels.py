"""Kernels of the detection operators: against their plain-torch definitions."""

import functools
from typing import NamedTuple

import pytest
import torch

from visdet.ops import roi_pool, sigmoid_focal_loss
from visdet.ops.carafe import carafe_reference
from visdet.ops.focal_loss import sigmoid_focal_loss_reference
from visdet.ops.roi_pool import roi_pool_reference, roi_pool_with_argmax
from visdet.ops.soft_nms import SOFT_METHODS, soft_nms_reference

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


@pytest.mark.parametrize("device", DEVICES)
def test_argmax_is_the_references(device):
    for case in (name for name in CASES if "roi_pool" in name):
        setup = CASES[case](torch.float32, device)
        expected = roi_pool_reference(*(a.cpu() if torch.is_tensor(a) else a for a in setup.arguments))
        for found, wanted in zip(setup.op(*setup.arguments), expected, strict=True):
            assert torch.equal(found.cpu(), wanted) and found.dtype == wanted.dtype


@pytest.mark.parametrize("device", DEVICES)
def test_not_a_number_is_never_the_maximum(device):
    values = torch.tensor(
        [[[[float("nan"), 1.0, -float("inf")], [2.0, float("nan"), float("inf")]]]], device=device
    )
    rois = torch.tensor(
        [[0.0, 0, 0, 0, 1], [0, 0, 0, 1, 0], [0, 0, 0, 0, 0], [0, 2, 0, 2, 0], [0, 0, 0, 2, 1]], device=device
    )
    pooled, argmax = roi_pool_with_argmax(values, rois, (1, 1), 1.0)
    assert argmax.flatten().tolist() == [3, 1, 0, 2, 5]
    assert pooled.flatten().nan_to_num(7.0).tolist() == [2, 1, 7, -float("inf"), float("inf")] or (
        pooled[2].isnan().all() and pooled[3].isneginf().all() and pooled[4].isposinf().all()
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_losses_of_extreme_logits(dtype, device):
    logits = torch.tensor(
        [[0.0, 1e-8, -1e-8, 30.0, -30.0, 87.5, -87.5, 700.0, -700.0, 1e30, -1e30]], dtype=dtype, device=device
    )
    for target in (11, 3, 4, 9):
        arguments = (logits, torch.tensor([target], device=device), logits.new_empty(0), 2.0, 0.25)
        found = torch.ops.visdet.sigmoid_focal_loss(*arguments)
        expected = sigmoid_focal_loss_reference(
            logits.double(), *arguments[1:2], logits.double().new_empty(0), 2.0, 0.25
        )
        rtol = 1e-12 if dtype == torch.float64 else 1e-5 if device == "cpu" else 5e-5  # __expf
        torch.testing.assert_close(found.double(), expected, rtol=rtol, atol=1e-37)
        grad = torch.ops.visdet.sigmoid_focal_loss_backward(torch.ones_like(logits), *arguments)
        assert grad.isfinite().all()
    nan = torch.full((1, 20), float("nan"), device=device, dtype=dtype)
    arguments = (nan, torch.tensor([0], device=device), logits.new_empty(0), 2.0, 0.25)
    assert torch.ops.visdet.sigmoid_focal_loss(*arguments).isnan().all()
    assert torch.ops.visdet.sigmoid_focal_loss_backward(torch.ones_like(nan), *arguments).isnan().all()


@pytest.mark.parametrize(
    ("case", "position", "replacement", "message"),
    [
        ("roi_pool", 0, lambda t: t[0], r"roi_pool: input must be \[B, C, H, W\], got \[3, 9, 11\]"),
        (
            "roi_pool",
            0,
            lambda t: t.int(),
            "roi_pool: input must be float64, float32, float16 or bfloat16, got Int",
        ),
        ("roi_pool", 1, lambda t: t[:, 1:], r"roi_pool: rois must be \[N, 5\], got \[7, 4\]"),
        (
            "roi_pool",
            1,
            lambda t: t.double(),
            "roi_pool: rois must be Float for input of type Float, got Double",
        ),
        ("roi_pool", 2, lambda _: 0, "roi_pool: output_size must be positive, got 0 x 2"),
        ("focal", 0, lambda t: t[0], r"sigmoid_focal_loss: input must be \[N, C\], got \[7\]"),
        ("focal", 0, lambda t: t.int(), "input must be float64, float32, float16 or bfloat16, got Int"),
        ("focal", 1, lambda t: t[1:], r"target must be \[13\], got \[12\]"),
        ("focal", 1, lambda t: t.int(), "target must be int64, got Int"),
        ("focal", 2, lambda t: t[1:], r"weight must be \[7\] or empty, got \[6\]"),
        ("focal", 2, lambda t: t.double(), "weight must be Float for input of type Float, got Double"),
        ("carafe", 0, lambda t: t[0], r"carafe: features must be \[B, C, H, W\], got \[6, 5, 7\]"),
        ("carafe", 0, lambda t: t.int(), "features must be float64, float32, float16 or bfloat16, got Int"),
        ("carafe", 1, lambda t: t[:, 1:], r"masks must be \[2, 18, 10, 14\], got \[2, 17, 10, 14\]"),
        ("carafe", 1, lambda t: t.double(), "masks must be Float, the type of features, got Double"),
        ("carafe", 2, lambda _: 2, "kernel_size must be odd and below 256, got 2"),
        ("carafe", 3, lambda _: 4, "features must have a multiple of 4 channels, got 6"),
        ("carafe", 4, lambda _: 0, "scale_factor must be from 1 to 255, got 0"),
    ],
)
def test_rejections(case, position, replacement, message):
    setup = CASES[case](torch.float32, "cpu")
    arguments = list(setup.arguments)
    arguments[position] = replacement(arguments[position])
    with pytest.raises(RuntimeError, match=message):
        setup.op(*arguments)


def soft_boxes(N, dtype, grid=False):
    generator = torch.Generator().manual_seed(N)
    corner = torch.rand(N, 2, generator=generator) * 60
    extent = torch.rand(N, 2, generator=generator) * 40 + 1
    scores = torch.rand(N, generator=generator)
    if grid:  # many equal overlaps and scores
        corner, extent, scores = corner.round(), torch.full_like(extent, 20), (scores * 8).round() / 8
    return torch.cat([corner, corner + extent], 1).to(dtype), scores.to(dtype)


@pytest.mark.parametrize("method", SOFT_METHODS)
def test_soft_nms_of_what_is_no_box(method):
    boxes, scores = soft_boxes(20, torch.float64)
    boxes[3], boxes[5, 2], boxes[7] = boxes[3, 0], float("nan"), float("inf")  # no area, no number, no end
    scores[2], scores[9], scores[11] = float("nan"), float("inf"), -float("inf")
    settings = (0.3, 0.5, 1e-3, SOFT_METHODS.index(method), 0)
    found, expected = (
        torch.ops.visdet.soft_nms(boxes, scores, None, *settings),
        soft_nms_reference(boxes, scores, *settings),
    )
    assert torch.equal(found[1], expected[1]) and found[1][-1] == 2
    torch.testing.assert_close(found[0], expected[0], equal_nan=True)


@pytest.mark.cuda
def test_more_elements_than_32_bits_count():
    rows = (1 << 31) // 1024 + 3
    logits = torch.zeros(rows, 1024, dtype=torch.bfloat16, device="cuda")
    target = torch.full((rows,), 1024, device="cuda")
    target[-1] = 1023
    logits[-1, 1023] = 3
    loss = torch.ops.visdet.sigmoid_focal_loss(logits, target, torch.empty(0, device="cuda"), 2.0, 0.25)
    expected = sigmoid_focal_loss(logits[-1:].float().cpu(), torch.tensor([1023]), reduction="none")
    torch.testing.assert_close(loss[-1:].float().cpu(), expected, rtol=1e-2, atol=1e-3)
    del loss, logits
    maps = torch.zeros(1, 1, 70, 70, device="cuda", dtype=torch.bfloat16)
    maps[0, 0, 69, 69] = 2
    regions = torch.tensor([[0.0, 69, 69, 69, 69]], device="cuda").expand((1 << 31) // 4900 + 5, 5)
    assert roi_pool(maps, regions, 70)[-1].eq(2).all()
