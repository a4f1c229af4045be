"""visdet::deform_conv2d on both devices, against the plain-torch definition."""

import itertools

import pytest
import torch
from deform_conv_cases import CASES, TOLERANCE, Case, assert_near, expect, gradient_of, run

from visdet.ops import (
    deform_conv2d,
    modulated_deform_conv2d,
)

devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])


@devices
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_matches_the_definition(device, name, dtype):
    case = CASES[name]
    tensors = case.tensors(dtype, device)
    output, grads = run(case, tensors)
    expected, expected_grads = expect(case, tensors, gradient_of(output))
    assert_near(output, expected, dtype)
    for grad, wanted in zip(grads, expected_grads, strict=True):
        assert_near(grad, wanted, dtype)


@devices
def test_gradients_numerically(device):
    case = CASES["settings"]
    x, offset, mask, weight = case.tensors(torch.float64, device)
    offset = (
        offset.floor() + 0.2 + 0.6 * torch.rand_like(offset)
    )  # off the whole pixels, where there is no slope
    leaves = [t.requires_grad_() for t in (x, offset, mask, weight)]
    assert torch.autograd.gradcheck(
        lambda *t: torch.ops.visdet.deform_conv2d(*t, *case.settings, case.step), leaves, nondet_tol=1e-10
    )


@devices
@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=4))[1:])
def test_only_the_gradients_that_are_asked_for(device, needs):
    case = CASES["groups"]
    tensors = case.tensors(torch.float32, device)
    _, expected = run(case, tensors)
    leaves = [t.requires_grad_(is_needed) for t, is_needed in zip(tensors, needs, strict=True)]
    output = torch.ops.visdet.deform_conv2d(*leaves, *case.settings, case.step)
    output.backward(gradient_of(output))
    for leaf, is_needed, wanted in zip(leaves, needs, expected, strict=True):
        if is_needed:
            torch.testing.assert_close(leaf.grad, wanted, rtol=1e-4, atol=1e-4)
        else:
            assert leaf.grad is None


@devices
def test_places_that_are_none_count_nothing(device):
    case = Case(C=8)
    x, offset, mask, weight = case.tensors(torch.float32, device)
    flat = offset.flatten()
    for i, value in enumerate([float("nan"), float("inf"), -float("inf"), 1e30, -1e30, 3e9, -3e9]):
        flat[i * 11 :: 97] = value
    tensors = (x, offset, mask, weight)
    output, grads = run(case, tensors)
    expected, expected_grads = expect(case, tensors, gradient_of(output))
    for found, wanted in zip((output, *grads), (expected, *expected_grads), strict=True):
        assert_near(found, wanted, torch.float32)
    is_none = ~(offset.abs() < 100)
    assert is_none.sum() > 50 and not grads[1][is_none].any()


@devices
def test_half_precision_places_are_not_rounded(device):
    """At column 1000 float16 counts in halves of a pixel; a quarter must stay one."""
    x = (torch.arange(1024, device=device) % 2).half().view(1, 1, 1, 1024)
    offset = torch.zeros(1, 2, 1, 1024, dtype=torch.float16, device=device)
    offset[:, 1] = 0.25
    out = deform_conv2d(x, offset, torch.ones(1, 1, 1, 1, dtype=torch.float16, device=device))
    assert out.flatten().tolist() == [0.25, 0.75] * 512


@devices
def test_gradients_of_columns_may_pass_the_range_of_float16(device):
    """The product of weight and gradient is 16 * 100 * 100 = 160000; what becomes of it fits into float16."""
    ones = {"dtype": torch.float16, "device": device}
    x, mask = torch.full((1, 8, 6, 6), 0.01, **ones), torch.full((1, 9, 6, 6), 0.01, **ones)
    offset, weight = torch.full((1, 18, 6, 6), 0.25, **ones), torch.full((16, 8, 3, 3), 100.0, **ones)
    grad_output = torch.full((1, 16, 6, 6), 100.0, **ones)
    results = {}
    for dtype in (torch.float16, torch.float64):
        leaves = [t.to(dtype, copy=True).requires_grad_() for t in (x, offset, mask, weight)]
        modulated_deform_conv2d(*leaves, bias=None, padding=1).backward(grad_output.to(dtype))
        results[dtype] = [leaf.grad.double() for leaf in leaves]
    for grad, wanted in zip(results[torch.float16], results[torch.float64], strict=True):
        assert wanted.abs().max() < 65504
        torch.testing.assert_close(grad, wanted, rtol=5e-3, atol=5e-3 * wanted.abs().max().item())


@devices
@pytest.mark.parametrize(
    ("position", "change", "message"),
    [
        (0, lambda t: t[0], r"input must be \[B, C, H, W\], got \[16, 6, 7\]"),
        (0, lambda t: t.int(), "input must be float64, float32, float16 or bfloat16, got Int"),
        (0, lambda t: t[:, 1:], "input must have a multiple of 16 channels, got 15"),
        (0, lambda t: t[:, :, :0, :0], r"is too small for the kernel|offset must be"),
        (1, lambda t: t[:, 1:], r"offset must be \[2, 18, 6, 7\], got \[2, 17, 6, 7\]"),
        (1, lambda t: t.double(), "offset must be Float, the type of input, got Double"),
        (2, lambda t: t[:, 1:], r"mask must be \[2, 9, 6, 7\], got \[2, 8, 6, 7\]"),
        (3, lambda t: t[0], r"weight must be \[M, C / groups, KH, KW\] with positive sizes, got \[16, 3, 3\]"),
        (3, lambda t: t[:7, :8], "weight must have a multiple of 2 output channels, got 7"),
        (3, lambda t: t.half(), "weight must be Float, the type of input, got Half"),
        (4, lambda _: [1], "stride, padding and dilation must be pairs"),
        (4, lambda _: [0, 1], "stride and dilation must be positive, padding must not be negative, got 0, 1, 1"),
        (5, lambda _: [-1, 1], "padding must not be negative, got 1, 1, -1"),
        (6, lambda _: [4, 1], r"input \[6, 7\] is too small for the kernel"),
        (7, lambda _: 3, "deform_groups must divide the 16 channels of input, got 3"),
        (8, lambda _: 0, "im2col_step must be at least 1, got 0"),
    ],
)  # fmt: skip
def test_rejections(device, position, change, message):
    arguments = [*Case().tensors(torch.float32, device), [1, 1], [1, 1], [1, 1], 1, 32]
    arguments[position] = change(arguments[position])
    with pytest.raises(RuntimeError, match=f"deform_conv2d: .*({message})"):
        torch.ops.visdet.deform_conv2d(*arguments)
