"""Activations, resampling filters, and labels that grow."""

import pytest
import torch

from visdet.compat import mmcv_ext
from visdet.ops.mmcv.filtered_activations import ACTIVATIONS, bias_act, upfirdn2d
from visdet.ops.mmcv.label_growth import contour_expand, pixel_group


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("clamp", [-1.0, 0.6])
def test_derivatives_of_activations_are_those_of_autograd(act, clamp, device):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4, dtype=torch.float64, device=device, requires_grad=True)
    bias = torch.randn(3, dtype=torch.float64, device=device)
    y = bias_act(x, bias, 1, act, 0.2, 1.4, clamp)
    dy = torch.randn_like(y).requires_grad_()
    (dx,) = torch.autograd.grad(y, x, dy, create_graph=True)
    number = list(ACTIVATIONS).index(act) + 1
    empty, rest = x.new_empty(0), (1, number, 0.2, 1.4, clamp)
    assert torch.equal(mmcv_ext.bias_act(x.detach(), bias, empty, empty, empty, 0, *rest), y)
    # The wrapper gives the result where that is enough, and otherwise the input.
    known = (
        (empty, empty, y.detach()) if act in ("linear", "relu", "lrelu") else (bias, x.detach(), y.detach())
    )
    given = mmcv_ext.bias_act(dy.detach(), known[0], known[1], known[2], empty, 1, *rest)
    torch.testing.assert_close(given, dx.detach())
    if act not in ("linear", "relu", "lrelu"):
        ddx = torch.randn_like(dx)
        (expected,) = torch.autograd.grad(dx, x, ddx)
        second = mmcv_ext.bias_act(ddx, bias, x.detach(), y.detach(), dy.detach(), 2, *rest)
        torch.testing.assert_close(second, expected)


@pytest.mark.parametrize("grad", [0, 1])
def test_fused_bias_leakyrelu(grad, device):
    x, bias = torch.randn(2, 3, 4, 5, device=device), torch.randn(3, device=device)
    refer = torch.randn_like(x)
    total = x + bias[:, None, None]
    sign = refer if grad else total
    expected = torch.where(sign > 0, total, total * 0.2) * 1.5
    given = mmcv_ext.fused_bias_leakyrelu(x, bias, refer, act=3, grad=grad, alpha=0.2, scale=1.5)
    torch.testing.assert_close(given, expected)


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize(
    "up, down, padding", [((2, 1), (1, 2), (1, 2, 0, 1)), ((1, 3), (2, 1), (2, -1, -1, 3))]
)
def test_upfirdn2d_is_the_loop(up, down, padding, flip, device):
    x = torch.randn(1, 2, 5, 6, dtype=torch.float64)
    taps = torch.randn(2, 3, dtype=torch.float64)
    H, W = 5 * up[1] + padding[2] + padding[3], 6 * up[0] + padding[0] + padding[1]
    spread = torch.zeros(1, 2, H, W, dtype=torch.float64)
    for i in range(5):
        for j in range(6):
            y, c = i * up[1] + padding[2], j * up[0] + padding[0]
            if 0 <= y < H and 0 <= c < W:
                spread[:, :, y, c] = x[:, :, i, j]
    rows = []
    for y in range(0, H - 1, down[1]):
        for c in range(0, W - 2, down[0]):
            window = spread[:, :, y : y + 2, c : c + 3]
            rows.append((window * (taps if flip else taps.flip(0, 1))).sum((2, 3)) * 1.5)
    given = upfirdn2d(x.to(device), taps.to(device), up, down, padding, flip, 1.5)
    torch.testing.assert_close(given.cpu(), torch.stack(rows, 2).view_as(given))


def test_a_filter_of_one_dimension_acts_along_both(device):
    x, taps = torch.randn(1, 2, 7, 8, device=device), torch.randn(3, device=device)
    once = upfirdn2d(x, taps, (2, 2), (1, 2), (1, 2, 3, 0), gain=4.0)
    outer = upfirdn2d(x, torch.outer(taps, taps), (2, 2), (1, 2), (1, 2, 3, 0), gain=4.0)
    torch.testing.assert_close(once, outer)
    with pytest.raises(
        ValueError, match=r"filter must not be larger than the padded map \[7, 8\], got \[9, 1\]"
    ):
        upfirdn2d(x, torch.ones(9, 1, device=device))


@pytest.mark.parametrize("clamp", [float("inf"), 0.4])
def test_filtered_lrelu_passes_its_signs_to_the_gradient(clamp, device):
    x = torch.randn(1, 2, 6, 6, dtype=torch.float64, device=device, requires_grad=True)
    bias = torch.randn(2, dtype=torch.float64, device=device)
    up, down = (torch.rand(4, dtype=torch.float64, device=device) for _ in range(2))
    wide = upfirdn2d(x + bias[:, None, None], up, (2, 2), (1, 1), (2, 1, 2, 1), gain=4.0)
    leaky = torch.nn.functional.leaky_relu(wide * 1.3, 0.1).clamp(-clamp, clamp)
    expected = upfirdn2d(leaky, down, (1, 1), (2, 2))
    empty, sizes = x.new_empty(0), (2, 2, 2, 1, 2, 1)
    y, signs, code = mmcv_ext.filtered_lrelu(
        x.detach(), up, down, bias, empty, *sizes, 0, 0, 1.3, 0.1, clamp, False, True
    )
    assert code == 0
    torch.testing.assert_close(y, expected)
    # As mmcv's wrapper calls it for the gradient: filters exchanged, and signs at an offset.
    dy = torch.randn_like(y)
    pad = [3 + 3 - 2, 6 * 2 - y.shape[3] * 2 + 2 - 1] * 2
    back = (down, up, bias.new_zeros(2), signs, 2, 2, *pad, -3 + 2, -3 + 2, 1.3 * 4 / 4, 0.1)
    given = mmcv_ext.filtered_lrelu(dy, *back, float("inf"), True, False)[0]
    torch.testing.assert_close(given, torch.autograd.grad(expected, x, dy)[0])


def pixel_queue(score, mask, embedding, label, contour, count, threshold):
    """Return the labels by a queue of pixels."""
    H, W = score.shape
    means = {k: embedding[label == k].mean(0) for k in range(1, count)}
    text = label.clone()
    queue = [(y, x) for y in range(H) for x in range(W) if label[y, x] > 0 and contour[y, x]]
    for y, x in queue:
        for dy, dx in ((-1, 0), (1, 0), (0, -1), (0, 1)):
            v, u = y + dy, x + dx
            is_free = 0 <= v < H and 0 <= u < W and mask[v, u] and text[v, u] == 0
            if is_free and (means[int(text[y, x])] - embedding[v, u]).square().sum() < threshold**2:
                text[v, u] = text[y, x]
                queue.append((v, u))
    return text


def test_pixel_group_is_a_queue(device):
    generator = torch.Generator().manual_seed(0)
    H, W = 14, 17
    score, embedding = torch.rand(H, W, generator=generator), torch.rand(H, W, 2, generator=generator)
    mask = torch.rand(H, W, generator=generator) < 0.8
    label = torch.zeros(H, W, dtype=torch.int32)
    label[2:4, 2:5], label[9:12, 10:13], label[3:5, 12:14] = 1, 2, 3
    contour = (label > 0).to(torch.uint8)
    contour[10, 11] = 0
    text = pixel_queue(score, mask, embedding, label, contour, 4, 0.6)
    given = (tensor.to(device) for tensor in (score, mask, embedding, label, contour))
    groups = pixel_group(*given, 4, 0.6)
    assert groups[0] == [0, 0]
    for k in range(1, 4):
        y, x = (text == k).nonzero(as_tuple=True)
        assert groups[k][1] == len(y) and groups[k][2::2] == x.tolist() and groups[k][3::2] == y.tolist()
        assert groups[k][0] == pytest.approx(float(score[text == k].mean()))
    with pytest.raises(ValueError, match="kernel_label must be below kernel_region_num 2, got 3"):
        pixel_group(score, mask, embedding, label, contour, 2, 0.6)


def test_contour_expand_is_a_queue_for_each_kernel(device):
    generator = torch.Generator().manual_seed(1)
    H, W = 13, 15
    kernels = torch.rand(3, H, W, generator=generator)
    label = torch.zeros(H, W, dtype=torch.int32)
    label[3:5, 3:6], label[8:11, 9:12], label[0, 0] = 1, 2, 3
    masks = torch.stack([(kernels[0] < 0.9), (kernels[1] < 0.7), label > 0]).to(torch.uint8)
    text = torch.where(label == 3, 0, label)
    queue = [(y, x) for y in range(H) for x in range(W) if text[y, x] > 0]
    for kernel in (masks[1], masks[0]):
        later = []
        for y, x in queue:
            is_edge = True
            for dy, dx in ((-1, 0), (1, 0), (0, -1), (0, 1)):
                v, u = y + dy, x + dx
                if 0 <= v < H and 0 <= u < W and kernel[v, u] and text[v, u] == 0:
                    queue.append((v, u))
                    text[v, u] = text[y, x]
                    is_edge = False
            if is_edge:
                later.append((y, x))
        queue = later
    assert contour_expand(masks.to(device), label.to(device), 2, 3) == text.tolist()
