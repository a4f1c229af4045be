"""Border and Bezier alignment, precise RoI pooling, attention masks, correlation and shifts, against loops."""

import math

import pytest
import torch
from torch.nn import functional

from visdet.ops.mmcv.aligned_pooling import bezier_align, border_align, prroi_pool
from visdet.ops.mmcv.map_correlation import correlation, psa_mask, tin_shift

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def maps(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sample(plane, y, x):
    """Return the bilinear sample of a map [H, W] by the border rule of RoIAlign."""
    H, W = plane.shape
    if not (-1 <= y <= H and -1 <= x <= W):
        return 0.0
    y, x = min(max(y, 0), H - 1), min(max(x, 0), W - 1)
    y0, x0 = int(y), int(x)
    y1, x1 = min(y0 + 1, H - 1), min(x0 + 1, W - 1)
    fy, fx = y - y0, x - x0
    top = plane[y0, x0] * (1 - fx) + plane[y0, x1] * fx
    return float(top * (1 - fy) + (plane[y1, x0] * (1 - fx) + plane[y1, x1] * fx) * fy)


def test_border_align_is_the_loop(device):
    input, boxes = maps(2, 8, 6, 7), torch.rand(2, 5, 4, dtype=torch.float64) * 9 - 1
    expected = torch.zeros(2, 2, 5, 4, dtype=torch.float64)
    for b in range(2):
        for n, (x1, y1, x2, y2) in enumerate(boxes[b].tolist()):
            starts = [(x1, y1, x2, y1), (x1, y1, x1, y2), (x2, y2, x1, y2), (x2, y2, x2, y1)]
            for e, (xa, ya, xb, yb) in enumerate(starts):
                for c in range(2):
                    plane = input[b, 2 * e + c]
                    steps = [i / 4 for i in range(5)]
                    line = [sample(plane, ya + t * (yb - ya), xa + t * (xb - xa)) for t in steps]
                    expected[b, c, n, e] = max(line)
    torch.testing.assert_close(border_align(input.to(device), boxes.to(device), 4).cpu(), expected)


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("ratio", [0, 2])
def test_bezier_align_is_the_loop(aligned, ratio, device):
    input, curves = maps(2, 2, 9, 10), torch.rand(3, 17, dtype=torch.float64) * 11 - 1
    curves[:, 0] = torch.tensor([0, 1, 1])
    PH, PW, scale = 2, 3, 0.8
    expected = torch.zeros(3, 2, PH, PW, dtype=torch.float64)
    for n, (image, *numbers) in enumerate(curves.tolist()):
        points = [(x * scale, y * scale) for x, y in zip(numbers[::2], numbers[1::2], strict=True)]
        upper, lower = points[:4], points[:3:-1]
        sides = [max(abs(c[0][d] - c[3][d]) for c in (upper, lower)) for d in range(2)]
        w, h = (side if aligned else max(side, 1) for side in sides)
        across, down = (ratio or math.ceil(w / PW)), (ratio or math.ceil(h / PH))
        for i in range(PH):
            for j in range(PW):
                u, v = j / PW, i / PH
                basis = [(1 - u) ** 3, 3 * u * (1 - u) ** 2, 3 * u * u * (1 - u), u**3]
                ends = [
                    [sum(k * p[d] for k, p in zip(basis, curve, strict=True)) for d in range(2)]
                    for curve in (upper, lower)
                ]
                x, y = (a * (1 - v) + b * v - 0.5 * aligned for a, b in zip(*ends, strict=True))
                ys = [y + h / PH * ((k + 0.5) / down - 0.5) for k in range(down)]
                xs = [x + w / PW * ((k + 0.5) / across - 0.5) for k in range(across)]
                for c in range(2):
                    values = [sample(input[int(image), c], row, column) for row in ys for column in xs]
                    expected[n, c, i, j] = sum(values) / len(values)
    given = bezier_align(input.to(device), curves.to(device), (PH, PW), scale, ratio, aligned)
    torch.testing.assert_close(given.cpu(), expected)


def test_curves_of_no_image_are_0(device):
    input = maps(1, 2, 9, 10).to(device)
    assert bezier_align(input, torch.zeros(0, 17, device=device), (2, 3)).shape == (0, 2, 2, 3)
    broken = torch.full((2, 17), math.nan, device=device)
    broken[1] = 5
    assert (bezier_align(input, broken, (2, 3), 1.0, 2) == 0).all()


def test_prroi_pool_is_the_integral(device):
    input = maps(2, 3, 6, 7)
    rois = torch.tensor([[0, 1.2, 0.7, 5.1, 4.4], [1, -1, -2, 3, 9], [1, 2, 2, 2, 5], [9, 0, 0, 3, 3]])
    pooled = prroi_pool(input.to(device), rois.double().to(device), (2, 3), 0.9).cpu()
    padded = functional.pad(input, (9, 9, 9, 9))
    for n, (b, *corners) in enumerate(rois[:2].tolist()):
        x1, y1, x2, y2 = (c * 0.9 for c in corners)
        steps = 200
        for i in range(2):
            for j in range(3):
                ys = y1 + (y2 - y1) * (i + (torch.arange(steps) + 0.5) / steps) / 2
                xs = x1 + (x2 - x1) * (j + (torch.arange(steps) + 0.5) / steps) / 3
                values = [
                    sample(padded[int(b), 0], float(y) + 9, float(x) + 9) for y in ys[::8] for x in xs[::8]
                ]
                assert abs(sum(values) / len(values) - pooled[n, 0, i, j]) < 0.05
    assert (pooled[2:] == 0).all()


@pytest.mark.parametrize("psa_type", ["collect", "distribute"])
def test_psa_mask_is_the_loop(psa_type, device):
    H, W, MH, MW = 4, 5, 3, 5
    input = maps(2, MH * MW, H, W)
    input[0, 2 * MW + 2, 0, 0] = torch.nan  # This is the attention of two pixels, and of no others.
    expected = torch.zeros(2, H * W, H, W, dtype=torch.float64)
    for h in range(H):
        for w in range(W):
            for i in range(MH):
                for j in range(MW):
                    y, x = h + i - (MH - 1) // 2, w + j - (MW - 1) // 2
                    if 0 <= y < H and 0 <= x < W:
                        value = input[:, i * MW + j, h, w]
                        if psa_type == "collect":
                            expected[:, y * W + x, h, w] = value
                        else:
                            expected[:, h * W + w, y, x] = value
    result = psa_mask(input.to(device), psa_type, (MH, MW)).cpu()
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "kernel, patch, stride, padding, dilation, dilation_patch",
    [
        ((1, 1), (3, 3), (1, 1), (0, 0), (1, 1), (1, 1)),
        ((3, 2), (3, 5), (2, 1), (1, 2), (1, 1), (2, 1)),
        ((3, 3), (1, 3), (1, 1), (2, 2), (2, 2), (1, 3)),
    ],
)
def test_correlation_is_the_loop(kernel, patch, stride, padding, dilation, dilation_patch, device):
    one, other = maps(1, 2, 6, 7), maps(1, 2, 6, 7, seed=1)
    given = correlation(
        one.to(device), other.to(device), kernel, patch, stride, padding, dilation, dilation_patch
    )
    expected = torch.zeros_like(given, device="cpu")
    for i, j, oh, ow in torch.cartesian_prod(*map(torch.arange, expected.shape[1:])).tolist():
        for ki in range(kernel[0]):
            for kj in range(kernel[1]):
                y, x = (
                    oh * stride[0] - padding[0] + ki * dilation[0],
                    ow * stride[1] - padding[1] + kj * dilation[1],
                )
                y2 = y + i * dilation_patch[0] - dilation_patch[0] * (patch[0] - 1) // 2
                x2 = x + j * dilation_patch[1] - dilation_patch[1] * (patch[1] - 1) // 2
                if 0 <= y < 6 and 0 <= x < 7 and 0 <= y2 < 6 and 0 <= x2 < 7:
                    expected[0, i, j, oh, ow] += (one[0, :, y, x] * other[0, :, y2, x2]).sum()
    torch.testing.assert_close(given.cpu(), expected)


def test_tin_shift_is_the_loop(device):
    input, shift = maps(2, 4, 6, 3), torch.tensor([[0, 1, -2], [3, -1, 9]], dtype=torch.int32)
    expected = torch.zeros_like(input)
    for b in range(2):
        for t in range(4):
            for c in range(6):
                to = t + int(shift[b, c // 2])
                if 0 <= to < 4:
                    expected[b, to, c] = input[b, t, c]
    assert torch.equal(tin_shift(input.to(device), shift.to(device)).cpu(), expected)


def test_gradients():
    check = torch.autograd.gradcheck
    boxes = torch.rand(1, 3, 4, dtype=torch.float64) * 5
    assert check(lambda x: border_align(x, boxes, 3), maps(1, 4, 5, 6).requires_grad_())
    curve = torch.rand(2, 17, dtype=torch.float64) * 5
    curve[:, 0] = 0
    assert check(lambda x: bezier_align(x, curve, (2, 3)), maps(1, 2, 5, 6).requires_grad_())
    rois = torch.tensor([[0, 0.3, 0.6, 4.1, 3.3]], dtype=torch.float64)

    def pool(x, corners):
        return prroi_pool(x, torch.cat([rois[:, :1], corners], 1), (2, 2), 0.7)

    assert check(pool, (maps(1, 2, 5, 6).requires_grad_(), rois[:, 1:].clone().requires_grad_()))
    for psa_type in ("collect", "distribute"):
        assert check(lambda x, how=psa_type: psa_mask(x, how, (3, 3)), maps(1, 9, 3, 4).requires_grad_())
    pair = maps(1, 2, 4, 5).requires_grad_(), maps(1, 2, 4, 5, seed=1).requires_grad_()
    settings = (3, 3), (3, 3), (1, 1), (1, 1), (1, 1), (2, 2)
    assert check(lambda one, other: correlation(one, other, *settings), pair)
    assert check(lambda x: tin_shift(x, torch.tensor([[1, -1]])), maps(1, 3, 2, 2).requires_grad_())


@pytest.mark.parametrize("shape", [(0, 4, 3, 3), (2, 0, 3, 3), (2, 4, 0, 3), (2, 4, 3, 3)])
@pytest.mark.parametrize("N", [0, 3])
def test_border_align_of_empties(shape, N):
    input = torch.zeros(shape, requires_grad=True)
    pooled = border_align(input, torch.ones(shape[0], N, 4), 2)
    assert pooled.shape == (shape[0], shape[1] // 4, N, 4) and not pooled.any()
    assert torch.autograd.grad(pooled.sum(), input)[0].shape == shape


def test_correlation_of_no_pixels():
    x = torch.zeros(1, 2, 0, 3)
    assert correlation(x, x, *[(1, 1)] * 3, (1, 0), *[(1, 1)] * 2).tolist() == [[[[[0] * 3] * 2]]]


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda x: border_align(x[:, :3], x[:, 0, :, :4], 2),
            r"input must be \[B, 4 \* C, H, W\], got",
        ),
        (lambda x: border_align(x, x[:, 0, :, :4], 0), "pool_size must be at least 1, got 0"),
        (lambda x: border_align(x.int(), x[:, 0, :, :4], 2), "input must be of a floating-point type on cpu"),
        (lambda x: border_align(x, x[:, 0], 2), r"boxes must be \[1, N, 4\], got \[1, 5, 6\]"),
        (lambda x: bezier_align(x, x[0, 0], (2, 2)), r"beziers must be \[N, 17\], got \[5, 6\]"),
        (lambda x: prroi_pool(x[0], x[0, 0], (2, 2)), r"prroi_pool: features must be \[B, C, H, W\]"),
        (lambda x: prroi_pool(x, x[0, 0], (2, 2)), r"prroi_pool: rois must be \[N, 5\]"),
        (lambda x: prroi_pool(x, x[0, 0, :, :5], (0, 2)), "prroi_pool: output_size must be positive"),
        (lambda x: psa_mask(x, "share", (2, 2)), "psa_type must be 'collect' or 'distribute', got 'share'"),
        (lambda x: psa_mask(x, "collect", (3, 3)), r"input must be \[B, 9, H, W\], got \[1, 4, 5, 6\]"),
        (
            lambda x: correlation(x, x[:, :2], *[(1, 1)] * 6),
            r"input2 must be \[1, 4, 5, 6\], got \[1, 2, 5, 6\]",
        ),
        (lambda x: psa_mask(x, "collect", (-2, -2)), r"mask_size must be at least 1, got \(-2, -2\)"),
        (
            lambda x: correlation(x, x, (1, 1), (1, 1), (0, 1), *[(1, 1)] * 3),
            r"stride must be at least 1, got \(0",
        ),
        (lambda x: correlation(x, x, *[(1, 1)] * 3, (-1, 0), *[(1, 1)] * 2), "padding must be at least 0"),
        (
            lambda x: correlation(x, x, (9, 1), (1, 1), (1, 1), (1, 0), (1, 1), (1, 1)),
            r"input1 must hold a window of \[9, 1\] with its padding, got \[7, 6\]",
        ),
        (lambda x: correlation(x, x.int(), *[(1, 1)] * 6), "input2 must be of a floating-point type"),
        (lambda x: tin_shift(x, torch.zeros(1, 4)), "shift must hold integers, got torch.float32"),
        (
            lambda x: tin_shift(x, torch.zeros(1, 4).int()),
            "C must be a multiple of the 4 groups of shift, got 5",
        ),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(1, 4, 5, 6))
