"""Activations, resampling filters, and labels that grow."""

import pytest
import torch
from torch.nn.functional import conv2d, pad
from torch.testing import assert_close

from visdet.compat import mmcv_ext
from visdet.ops.mmcv.filtered_activations import ACTIVATIONS, bias_act, upfirdn2d
from visdet.ops.mmcv.label_growth import contour_expand, pixel_group


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("clamp", [-1.0, 0.6])
def test_derivatives_of_activations_are_those_of_autograd(act, clamp, device):
    x = torch.randn(2, 3, 4, dtype=torch.float64, device=device, requires_grad=True)
    bias = torch.randn(3, dtype=torch.float64, device=device)
    y = bias_act(x, bias, 1, act, 0.2, 1.4, clamp)
    dy = torch.randn_like(y).requires_grad_()
    (dx,) = torch.autograd.grad(y, x, dy, create_graph=True)
    number = list(ACTIVATIONS).index(act) + 1
    empty, rest = x.new_empty(0), (1, number, 0.2, 1.4, clamp)
    input, output, is_of_output = x.detach(), y.detach(), act in ("linear", "relu", "lrelu")
    assert torch.equal(mmcv_ext.bias_act(input, bias, empty, empty, empty, 0, *rest), y)
    # The wrapper gives the result where that is enough, and otherwise the input.
    known = (empty, empty) if is_of_output else (bias, input)
    given = mmcv_ext.bias_act(dy.detach(), *known, output, empty, 1, *rest)
    assert_close(given, dx.detach())
    if not is_of_output:
        ddx = torch.randn_like(dx)
        (expected,) = torch.autograd.grad(dx, x, ddx)
        second = mmcv_ext.bias_act(ddx, bias, input, output, dy.detach(), 2, *rest)
        assert_close(second, expected)


@pytest.mark.parametrize("grad", [0, 1])
def test_fused_bias_leakyrelu(grad, device):
    x, bias = torch.randn(2, 3, 4, 5, device=device), torch.randn(3, device=device)
    refer = torch.randn_like(x)
    total = x + bias[:, None, None]
    sign = refer if grad else total
    expected = torch.where(sign > 0, total, total * 0.2) * 1.5
    given = mmcv_ext.fused_bias_leakyrelu(x, bias, refer, act=3, grad=grad, alpha=0.2, scale=1.5)
    assert_close(given, expected)


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize(
    "up, down, padding", [((2, 1), (1, 2), (1, 2, 0, 1)), ((1, 3), (2, 1), (2, -1, -1, 3))]
)
def test_upfirdn2d_is_a_convolution(up, down, padding, flip, device):
    x = torch.randn(1, 2, 5, 6, dtype=torch.float64)
    taps = torch.randn(2, 3, dtype=torch.float64)
    spread = x.new_zeros(2, 1, 5 * up[1], 6 * up[0])
    spread[:, 0, :: up[1], :: up[0]] = x[0]
    filters = (taps if flip else taps.flip(0, 1)) * 1.5
    expected = conv2d(pad(spread, padding), filters[None, None])[None, :, 0, :: down[1], :: down[0]]
    given = upfirdn2d(x.to(device), taps.to(device), up, down, padding, flip, 1.5)
    assert_close(given.cpu(), expected)


def test_a_filter_of_one_dimension_acts_along_both(device):
    x, taps = torch.randn(1, 2, 7, 8, device=device), torch.randn(3, device=device)
    once = upfirdn2d(x, taps, (2, 2), (1, 2), (1, 2, 3, 0), gain=4.0)
    outer = upfirdn2d(x, torch.outer(taps, taps), (2, 2), (1, 2), (1, 2, 3, 0), gain=4.0)
    assert_close(once, outer)
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
    assert_close(y, expected)
    # As mmcv's wrapper calls it for the gradient: filters exchanged, and signs at an offset.
    dy = torch.randn_like(y)
    pad = [3 + 3 - 2, 6 * 2 - y.shape[3] * 2 + 2 - 1] * 2
    back = (down, up, bias.new_zeros(2), signs, 2, 2, *pad, -3 + 2, -3 + 2, 1.3 * 4 / 4, 0.1)
    given = mmcv_ext.filtered_lrelu(dy, *back, float("inf"), True, False)[0]
    assert_close(given, torch.autograd.grad(expected, x, dy)[0])


def picture(rows):
    return torch.tensor([[int(number) for number in row] for row in rows.split()], dtype=torch.int32)


def test_pixel_group_grows_from_contours_to_near_embeddings(device):
    """The means of the kernels are 3, 5 and 4, and numbers less than 2 apart are near; the third has no contour."""
    label = picture("1100022 1100022 0000000 0000000 3300000")
    contour = picture("1100011 0100011 0000000 0000000 0000000")
    mask = picture("1111111 1101111 1111111 1111110 1111111")
    embedding = picture("2444455 2454455 1444647 4494444 4444413")[..., None].float()
    text = picture("1111222 1102222 0111220 1101220 3311200")
    score = torch.arange(35.0).view(5, 7)
    given = [tensor.to(device) for tensor in (score, mask, embedding, label, contour)]
    groups = pixel_group(*given, 4, 2.0)
    assert groups[0] == [0, 0]
    for k in range(1, 4):
        y, x = (text == k).nonzero(as_tuple=True)
        mean, count, *places = groups[k]
        assert count == len(y) and places[::2] == x.tolist() and places[1::2] == y.tolist()
        assert mean == pytest.approx(float(score[text == k].mean()))
    with pytest.raises(ValueError, match="kernel_label must be below kernel_region_num 2, got 3"):
        pixel_group(*given, 2, 2.0)


def test_contour_expand_grows_through_each_kernel_and_drops_small_labels(device):
    label = picture("1000000 1000002 0000002 0003000").to(device)
    larger = picture("1110111 1110011 0000001 0000001").to(device)
    kernels = torch.stack([torch.ones_like(label), larger, (label > 0).int()])
    expected = picture("1111222 1111222 1111222 1112222")
    assert contour_expand(kernels, label, 2, 3) == expected.tolist()
    assert contour_expand(kernels[::2], label, 2, 3)[2] == [1, 1, 1, 2, 2, 2, 2]
