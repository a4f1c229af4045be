"""visdet::deform_conv2d, the CUDA kernels of both deformable convolutions, against the plain-torch definition."""

import itertools
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch.library import opcheck

from visdet.ops import (
    DeformConv2dPack,
    ModulatedDeformConv2dPack,
    _library,
    _torchvision,
    deform_conv2d,
    modulated_deform_conv2d,
)
from visdet.ops.deform_conv2d import deform_conv2d_reference

cuda = pytest.mark.cuda
# Of the greatest number: operands and result of the products are rounded to the type, by half an eps each, and so are
# the gradients of the columns; torch's float32 products sum thousands of terms.
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 2e-5,
    torch.bfloat16: 1.5 * torch.finfo(torch.bfloat16).eps,
    torch.float16: 1.5 * torch.finfo(torch.float16).eps,
}


class Case(NamedTuple):
    B: int = 2
    C: int = 16
    M: int = 8
    H: int = 6
    W: int = 7
    kernel: tuple = (3, 3)
    stride: tuple = (1, 1)
    padding: tuple = (1, 1)
    dilation: tuple = (1, 1)
    groups: int = 1
    G: int = 1
    step: int = 32
    masked: bool = True
    reach: float = 2.0  # pixels, of offsets

    @property
    def settings(self):
        return self.stride, self.padding, self.dilation, self.G

    def tensors(self, dtype, device="cuda"):
        """Return input, offset, mask and weight."""
        generator = torch.Generator().manual_seed(0)

        def draw(*shape):
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        KH, KW = self.kernel
        height, width = (
            (size + 2 * pad - dil * (k - 1) - 1) // step + 1
            for size, k, step, pad, dil in zip(
                (self.H, self.W), self.kernel, self.stride, self.padding, self.dilation, strict=True
            )
        )
        tensors = (
            draw(self.B, self.C, self.H, self.W),
            draw(self.B, self.G * 2 * KH * KW, height, width) * self.reach,
            draw(self.B, self.G * KH * KW, height, width).sigmoid() if self.masked else None,
            draw(self.M, self.C // self.groups, KH, KW),
        )
        return [None if t is None else t.to(device, dtype) for t in tensors]


CASES = {
    "usual": Case(),
    "no-mask": Case(masked=False),
    "no-offset": Case(reach=0.0),  # every tap of the padding at exactly -1
    "far": Case(reach=9.0),
    "settings": Case(C=4, M=6, kernel=(3, 2), stride=(2, 1), padding=(2, 1), dilation=(2, 1), groups=2, G=2),
    "groups": Case(B=3, C=24, M=6, groups=3, G=2, step=2),
    "narrow-groups": Case(B=3, C=32, M=8, groups=4, step=2),
    "group-of-each-channel": Case(C=6, M=6, groups=6, G=2),
    "deform-groups": Case(C=64, G=4),
    "in-turns": Case(B=5, step=2),
    "odd-channels": Case(C=13, M=5),
    "three-channels": Case(B=1, C=3, M=5, H=9, W=9, kernel=(5, 7), stride=(2, 2), padding=(3, 2), G=3),
    "wide": Case(B=1, C=264, H=3, W=3, groups=2),
    "one-tap": Case(kernel=(1, 1), padding=(0, 0)),
    "one-place": Case(H=3, W=3, padding=(0, 0)),
    "one-pixel": Case(H=1, W=1),
    "two-tiles": Case(H=17, W=23),
}


def run(case, tensors, grad_output=None):
    """Return output and gradients of the operator."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in tensors]
    output = torch.ops.visdet.deform_conv2d(*leaves, *case.settings, case.step)
    if grad_output is None:
        grad_output = gradient_of(output)
    return output.detach(), torch.autograd.grad(output, [t for t in leaves if t is not None], grad_output)


def gradient_of(output):
    generator = torch.Generator().manual_seed(5)
    return torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output)


def expect(case, tensors, grad_output):
    """Return the same in float64 on the CPU."""
    leaves = [None if t is None else t.detach().cpu().double().requires_grad_() for t in tensors]
    x, offset, mask, weight = leaves
    output = deform_conv2d_reference(x, offset, mask, weight, None, *case.settings)
    leaves = [t for t in leaves if t is not None]
    return output.detach(), torch.autograd.grad(output, leaves, grad_output.cpu().double())


def assert_near(found, wanted, dtype):
    assert found.shape == wanted.shape and found.dtype == dtype and found.is_contiguous()
    scale = max(wanted.abs().max().item(), 1e-30)
    torch.testing.assert_close(found.cpu().double() / scale, wanted / scale, rtol=0, atol=TOLERANCE[dtype])


@cuda
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_matches_the_definition(name, dtype):
    case = CASES[name]
    tensors = case.tensors(dtype)
    output, grads = run(case, tensors)
    expected, expected_grads = expect(case, tensors, gradient_of(output))
    assert_near(output, expected, dtype)
    for grad, wanted in zip(grads, expected_grads, strict=True):
        assert_near(grad, wanted, dtype)


@cuda
def test_gradients_numerically():
    case = CASES["settings"]
    x, offset, mask, weight = case.tensors(torch.float64)
    offset = (
        offset.floor() + 0.2 + 0.6 * torch.rand_like(offset)
    )  # off the whole pixels, where there is no slope
    leaves = [t.requires_grad_() for t in (x, offset, mask, weight)]
    assert torch.autograd.gradcheck(
        lambda *t: torch.ops.visdet.deform_conv2d(*t, *case.settings, case.step), leaves, nondet_tol=1e-10
    )


@cuda
@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=4))[1:])
def test_only_the_gradients_that_are_asked_for(needs):
    case = CASES["groups"]
    tensors = case.tensors(torch.float32)
    _, expected = run(case, tensors)
    leaves = [t.requires_grad_(is_needed) for t, is_needed in zip(tensors, needs, strict=True)]
    output = torch.ops.visdet.deform_conv2d(*leaves, *case.settings, case.step)
    output.backward(gradient_of(output))
    for leaf, is_needed, wanted in zip(leaves, needs, expected, strict=True):
        if is_needed:
            torch.testing.assert_close(leaf.grad, wanted, rtol=1e-4, atol=1e-4)
        else:
            assert leaf.grad is None


@cuda
def test_places_that_are_none_count_nothing():
    case = Case(C=8)
    x, offset, mask, weight = case.tensors(torch.float32)
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


@cuda
def test_half_precision_places_are_not_rounded():
    """At column 1000 float16 counts in halves of a pixel; a quarter must stay one."""
    x = (torch.arange(1024, device="cuda") % 2).half().view(1, 1, 1, 1024)
    offset = torch.zeros(1, 2, 1, 1024, dtype=torch.float16, device="cuda")
    offset[:, 1] = 0.25
    out = deform_conv2d(x, offset, torch.ones(1, 1, 1, 1, dtype=torch.float16, device="cuda"))
    assert out.flatten().tolist() == [0.25, 0.75] * 512


@cuda
@pytest.mark.parametrize("name", ["usual", "groups"])
def test_strides_do_not_matter(name):
    case = CASES[name]
    tensors = case.tensors(torch.float32)
    output, grads = run(case, tensors)
    moved = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in tensors]
    last = [tensors[0].to(memory_format=torch.channels_last), *tensors[1:]]
    sliced = [torch.stack([tensors[0], tensors[0] + 1], -1)[..., 0], *tensors[1:]]
    for changed in (moved, last, sliced):
        found, found_grads = run(case, changed)
        assert torch.equal(found, output)
        for grad, wanted in zip(found_grads, grads, strict=True):
            torch.testing.assert_close(grad, wanted, rtol=1e-4, atol=1e-4)
    one = torch.ones((), device="cuda").expand(output.shape)  # the gradient of a sum
    for grad, wanted in zip(run(case, tensors, one)[1], run(case, tensors, one.contiguous())[1], strict=True):
        torch.testing.assert_close(grad, wanted, rtol=1e-4, atol=1e-4)


@cuda
@pytest.mark.parametrize("start", [0, 1])
def test_channels_last_images_at_any_address(start):
    """Images of 9 numbers, taken one by one: they start where no pack of channels may be read."""
    case = Case(B=3, C=3, H=1, W=3, step=1)
    x, *others = case.tensors(torch.float16)
    room = x.new_empty(x.numel() + 1)
    odd = room[start : start + 27].view(3, 1, 3, 3).permute(0, 3, 1, 2).copy_(x)
    assert odd.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(run(case, [odd, *others])[0], run(case, [x, *others])[0])


@cuda
@pytest.mark.parametrize(
    "case", [Case(B=0), Case(M=0), Case(H=0, padding=(2, 1))], ids=["no-image", "no-output", "no-row"]
)
def test_sizes_of_zero(case):
    tensors = case.tensors(torch.float32)
    output, grads = run(case, tensors)
    assert not output.any()
    for tensor, grad in zip(tensors, grads, strict=True):
        assert grad.shape == tensor.shape and not grad.any()


@cuda
def test_more_elements_than_32_bits_count():
    x = torch.zeros(1, 1024, 1456, 1460, dtype=torch.float16, device="cuda")
    x[0, :, -1, -1] = torch.arange(1024) % 4 / 4  # sums of which float16 has exactly
    assert x.numel() > 1 << 31
    offset = torch.zeros(1, 2, *x.shape[2:], dtype=torch.float16, device="cuda")
    weight = torch.ones(1, 1024, 1, 1, dtype=torch.float16, device="cuda")
    settings = ([1, 1], [0, 0], [1, 1], 1, 32)
    out = torch.ops.visdet.deform_conv2d(x, offset, None, weight, *settings)
    assert out[0, 0, -1, -1] == 384 and out.count_nonzero() == 1
    grad = torch.zeros_like(out)
    grad[0, 0, -1, -1] = 2
    grad_x, _, _, grad_weight = torch.ops.visdet.deform_conv2d_backward(
        grad, x, offset, None, weight, *settings, True, True, True
    )
    assert grad_x[0, :, -1, -1].eq(2).all() and grad_x[0, :, -1].count_nonzero() == 1024
    assert torch.equal(grad_weight.flatten().cpu(), (torch.arange(1024) % 4 / 2).half())


@cuda
def test_memory_is_bounded_and_inputs_are_saved():
    x, offset, _, weight = Case(B=48, C=64, M=64, H=128, W=128, masked=False).tensors(torch.float32)
    leaves = [t.requires_grad_() for t in (x, offset, weight)]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = deform_conv2d(*leaves, padding=1)
    assert set(saved) == {t.data_ptr() for t in leaves}
    columns = 48 * 128 * 128 * 64 * 9 * 4
    assert torch.cuda.max_memory_allocated() - before < columns / 3
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out.sum().backward()
    assert torch.cuda.max_memory_allocated() - before < columns / 2


@cuda
def test_all_but_the_gradient_of_input_is_ordered():
    case = Case(C=64, M=16, H=20, W=21)
    tensors = case.tensors(torch.float32)
    (output, grads), (again, grads_again) = run(case, tensors), run(case, tensors)
    assert torch.equal(output, again)
    assert all(map(torch.equal, grads[1:], grads_again[1:]))


@cuda
def test_deterministic_algorithms_are_asked_for_before_the_forward():
    x, offset, mask, weight = Case().tensors(torch.float32)
    out = modulated_deform_conv2d(x.requires_grad_(), offset, mask, weight, padding=1)
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError, match=r"use_deterministic_algorithms\(True\) must be called before"):
            out.sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)


@cuda
def test_streams_and_graphs():
    case = CASES["in-turns"]
    tensors = case.tensors(torch.float32)
    settings = (*map(list, case.settings[:3]), case.G, case.step)
    expected = torch.ops.visdet.deform_conv2d(*tensors, *settings)
    grad = gradient_of(expected)

    def both():
        out = torch.ops.visdet.deform_conv2d(*tensors, *settings)
        return [
            out,
            *torch.ops.visdet.deform_conv2d_backward(grad, *tensors, *settings, True, True, True),
        ]

    wanted = both()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        on_stream = both()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    for tensor in captured:
        tensor.zero_()
    graph.replay()
    for results in (on_stream, captured):
        for found, one in zip(results, wanted, strict=True):
            torch.testing.assert_close(found, one, rtol=1e-4, atol=1e-4)


@pytest.mark.cuda(devices=2)
def test_second_device():
    case = CASES["usual"]
    expected = run(case, case.tensors(torch.float32, "cuda:0"))
    found = run(case, case.tensors(torch.float32, "cuda:1"))  # while device 0 is the current one
    for one, wanted in zip((found[0], *found[1]), (expected[0], *expected[1]), strict=True):
        assert one.device.index == 1
        torch.testing.assert_close(one.cpu(), wanted.cpu(), rtol=1e-4, atol=1e-4)


@cuda
@pytest.mark.parametrize("masked", [False, True])
def test_registration(masked):
    case = Case(masked=masked, reach=0.3)
    tensors = case.tensors(torch.float32)
    settings = (*map(list, case.settings[:3]), case.G, case.step)
    grad = gradient_of(torch.ops.visdet.deform_conv2d(*tensors, *settings))
    for needs in ((True, True, True), (False, True, False)):
        opcheck(torch.ops.visdet.deform_conv2d_backward.default, (grad, *tensors, *settings, *needs))
    for tensor in tensors:
        if tensor is not None:
            tensor.requires_grad_()
    opcheck(torch.ops.visdet.deform_conv2d.default, (*tensors, *settings))


@cuda
@pytest.mark.parametrize("pack", [DeformConv2dPack, ModulatedDeformConv2dPack])
def test_compile_export_and_autocast(pack):
    torch.manual_seed(0)
    layer = pack(16, 6, 3, padding=1, deform_groups=2).to("cuda")
    torch.nn.init.normal_(layer.conv_offset.weight, std=0.1)
    x = torch.randn(2, 16, 6, 7, device="cuda")
    with torch.no_grad():
        program = torch.export.export(layer, (x,))
        assert "visdet.deform_conv2d" in program.graph_module.code
        torch.testing.assert_close(program.module()(x), layer(x))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for size in (6, 9):
        x = torch.randn(1, 16, size, 7, device="cuda", requires_grad=True)
        expected, found = layer(x), compiled(x)
        torch.testing.assert_close(found, expected)
        grads = [torch.autograd.grad(out.square().sum(), x)[0] for out in (found, expected)]
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)
    with torch.autocast("cuda", torch.float16):
        half = layer(x)
        half.float().square().mean().backward()
    assert half.dtype == torch.float16 and layer.weight.grad.dtype == torch.float32
    torch.testing.assert_close(half.float(), expected, rtol=3e-2, atol=3e-2)


@cuda
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_the_offset_decides_the_type(dtype):
    x, offset, mask, weight = Case().tensors(torch.float32)
    bias = torch.randn(8, device="cuda")
    leaves = [t.requires_grad_() for t in (x, offset.to(dtype), mask, weight, bias)]
    out = modulated_deform_conv2d(*leaves, padding=1)
    assert out.dtype == dtype
    expected = deform_conv2d_reference(*(t.double() for t in leaves), (1, 1), (1, 1), (1, 1), 1)
    atol = TOLERANCE[dtype] * expected.abs().max().item()
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=atol)
    grads = torch.autograd.grad(out.sum(), leaves)
    assert [g.dtype for g in grads] == [t.dtype for t in leaves]


@cuda
def test_who_serves(monkeypatch):
    """visdet's kernels; torchvision or plain torch without the library."""
    x, offset, mask, weight = Case().tensors(torch.float32)
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


@cuda
def test_zero_offsets_are_the_convolution():
    x, offset, _, weight = Case(reach=0, masked=False).tensors(torch.float64)
    torch.testing.assert_close(deform_conv2d(x, offset, weight, padding=1), F.conv2d(x, weight, padding=1))


@cuda
@pytest.mark.parametrize(
    ("position", "change", "message"),
    [
        (0, lambda t: t[0], r"input must be \[B, C, H, W\], got \[16, 6, 7\]"),
        (0, lambda t: t.int(), "input must be float64, float32, float16 or bfloat16, got Int"),
        (0, lambda t: t[:, 1:], "input must have a multiple of 16 channels, got 15"),
        (0, lambda t: t[:, :, :0, :0], r"is too small for the kernel|offset must be"),
        (1, lambda t: t[:, 1:], r"offset must be \[2, 18, 6, 7\], got \[2, 17, 6, 7\]"),
        (1, lambda t: t.double(), "offset must have input's type Float, got Double"),
        (1, lambda t: t.cpu(), "offset must be on the device of input"),
        (2, lambda t: t[:, 1:], r"mask must be \[2, 9, 6, 7\], got \[2, 8, 6, 7\]"),
        (3, lambda t: t[0], r"weight must be \[M, C / groups, KH, KW\] with positive sizes, got \[16, 3, 3\]"),
        (3, lambda t: t[:7, :8], "weight must have a multiple of 2 output channels, got 7"),
        (3, lambda t: t.half(), "weight must have input's type Float, got Half"),
        (4, lambda _: [1], "stride, padding and dilation must be pairs"),
        (4, lambda _: [0, 1], "stride and dilation must be positive, padding must not be negative, got 0, 1, 1"),
        (5, lambda _: [-1, 1], "padding must not be negative, got 1, 1, -1"),
        (6, lambda _: [4, 1], r"input \[6, 7\] is too small for the kernel"),
        (7, lambda _: 3, "deform_groups must divide the 16 channels of input, got 3"),
        (8, lambda _: 0, "im2col_step must be at least 1, got 0"),
    ],
)  # fmt: skip
def test_rejections(position, change, message):
    arguments = [*Case().tensors(torch.float32), [1, 1], [1, 1], [1, 1], 1, 32]
    arguments[position] = change(arguments[position])
    with pytest.raises(RuntimeError, match=f"deform_conv2d: .*({message})"):
        torch.ops.visdet.deform_conv2d(*arguments)


@cuda
def test_rejection_of_gradients():
    arguments = [*Case().tensors(torch.float32), [1, 1], [1, 1], [1, 1], 1, 32]
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
