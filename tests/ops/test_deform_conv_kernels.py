"""visdet::deform_conv2d on both devices, against the plain-torch definition."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from deform_conv_cases import CASES, TOLERANCE, Case, assert_near, expect, gradient_of, run

from visdet.ops import (
    DeformConv2dPack,
    ModulatedDeformConv2dPack,
    _library,
    _torchvision,
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
@pytest.mark.parametrize("name", ["usual", "groups"])
def test_strides_do_not_matter(device, name):
    case = CASES[name]
    tensors = case.tensors(torch.float32, device)
    output, grads = run(case, tensors)
    moved = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in tensors]
    last = [tensors[0].to(memory_format=torch.channels_last), *tensors[1:]]
    sliced = [torch.stack([tensors[0], tensors[0] + 1], -1)[..., 0], *tensors[1:]]
    shifted = [torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape) for t in tensors]
    for changed in (moved, last, sliced, shifted):
        found, found_grads = run(case, changed)
        assert torch.equal(found, output)
        for grad, wanted in zip(found_grads, grads, strict=True):
            torch.testing.assert_close(grad, wanted, rtol=1e-4, atol=1e-4)
    one = torch.ones((), device=device).expand(output.shape)  # the gradient of a sum
    for grad, wanted in zip(run(case, tensors, one)[1], run(case, tensors, one.contiguous())[1], strict=True):
        torch.testing.assert_close(grad, wanted, rtol=1e-4, atol=1e-4)


@devices
@pytest.mark.parametrize("start", [0, 1])
def test_channels_last_images_at_any_address(device, start):
    """Images of 9 numbers, taken one by one: they start where no pack of channels may be read."""
    case = Case(B=3, C=3, H=1, W=3, step=1)
    x, *others = case.tensors(torch.float16, device)
    room = x.new_empty(x.numel() + 1)
    odd = room[start : start + 27].view(3, 1, 3, 3).permute(0, 3, 1, 2).copy_(x)
    assert odd.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(run(case, [odd, *others])[0], run(case, [x, *others])[0])


@devices
@pytest.mark.parametrize(
    "case", [Case(B=0), Case(M=0), Case(H=0, padding=(2, 1))], ids=["no-image", "no-output", "no-row"]
)
def test_sizes_of_zero(device, case):
    tensors = case.tensors(torch.float32, device)
    output, grads = run(case, tensors)
    assert not output.any()
    for tensor, grad in zip(tensors, grads, strict=True):
        assert grad.shape == tensor.shape and not grad.any()


@devices
@pytest.mark.parametrize("pack", [DeformConv2dPack, ModulatedDeformConv2dPack])
def test_compile_export_and_autocast(device, pack):
    torch.manual_seed(0)
    layer = pack(16, 6, 3, padding=1, deform_groups=2).to(device)
    torch.nn.init.normal_(layer.conv_offset.weight, std=0.1)
    x = torch.randn(2, 16, 6, 7, device=device)
    with torch.no_grad():
        program = torch.export.export(layer, (x,))
        assert "visdet.deform_conv2d" in program.graph_module.code
        torch.testing.assert_close(program.module()(x), layer(x))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for size in (6, 9):
        x = torch.randn(1, 16, size, 7, device=device, requires_grad=True)
        expected, found = layer(x), compiled(x)
        torch.testing.assert_close(found, expected)
        grads = [torch.autograd.grad(out.square().sum(), x)[0] for out in (found, expected)]
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)
    with torch.autocast(device, torch.float16):
        half = layer(x)
        half.float().square().mean().backward()
    assert half.dtype == torch.float16 and layer.weight.grad.dtype == torch.float32
    torch.testing.assert_close(half.float(), expected, rtol=3e-2, atol=3e-2)


@devices
def test_who_serves(device, monkeypatch):
    """visdet's kernels; torchvision or plain torch without the library."""
    x, offset, mask, weight = Case().tensors(torch.float32, device)
    asked = []

    def serves_gradients(*_):
        asked.append(True)
        return False

    monkeypatch.setattr(_torchvision, "serves_gradients", serves_gradients)
    served = modulated_deform_conv2d(x, offset, mask, weight, padding=1)
    assert not asked
    monkeypatch.setattr(_library, "is_loaded", lambda name: False)
    plain = modulated_deform_conv2d(x, offset, mask, weight, padding=1)
    assert asked
    torch.testing.assert_close(served, plain, rtol=1e-4, atol=1e-4)


@devices
def test_zero_offsets_are_the_convolution(device):
    x, offset, _, weight = Case(reach=0, masked=False).tensors(torch.float64, device)
    torch.testing.assert_close(deform_conv2d(x, offset, weight, padding=1), F.conv2d(x, weight, padding=1))


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


@devices
def test_rejection_of_gradients(device):
    arguments = [*Case().tensors(torch.float32, device), [1, 1], [1, 1], [1, 1], 1, 32]
    grad = torch.ops.visdet.deform_conv2d(*arguments)
    with pytest.raises(RuntimeError, match=r"grad_output must be \[2, 8, 6, 7\], got \[1, 8, 6, 7\]"):
        torch.ops.visdet.deform_conv2d_backward(grad[1:], *arguments, True, True, True)


def test_shapes_without_data():
    x, offset, mask, weight = Case(H=9, stride=(2, 1)).tensors(torch.float16, "meta")
    out = torch.ops.visdet.deform_conv2d(x, offset, mask, weight, [2, 1], [1, 1], [1, 1], 1, 32)
    assert out.shape == (2, 8, 5, 7) and out.dtype == torch.float16
    grads = torch.ops.visdet.deform_conv2d_backward(
        out, x, offset, mask, weight, [2, 1], [1, 1], [1, 1], 1, 32, True, False, True
    )
    assert [list(g.shape) for g in grads] == [list(x.shape), [0], [0], list(weight.shape)]
