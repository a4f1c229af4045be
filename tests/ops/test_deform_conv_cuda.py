"""What only the CUDA kernels of deform_conv2d have to show: sizes, memory, streams, devices, order."""

import pytest
import torch
from deform_conv_cases import CASES, TOLERANCE, Case, gradient_of, run

from visdet.ops import deform_conv2d, modulated_deform_conv2d
from visdet.ops.deform_conv2d import deform_conv2d_reference

cuda = pytest.mark.cuda


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
    x, offset, _, weight = Case(B=48, C=64, M=64, H=128, W=128, masked=False).tensors(torch.float32, "cuda")
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
    tensors = case.tensors(torch.float32, "cuda")
    (output, grads), (again, grads_again) = run(case, tensors), run(case, tensors)
    assert torch.equal(output, again)
    assert all(map(torch.equal, grads[1:], grads_again[1:]))


@cuda
def test_deterministic_algorithms_are_asked_for_before_the_forward():
    x, offset, mask, weight = Case().tensors(torch.float32, "cuda")
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
    tensors = case.tensors(torch.float32, "cuda")
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
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_the_offset_decides_the_type(dtype):
    x, offset, mask, weight = Case().tensors(torch.float32, "cuda")
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
def test_rejection_of_another_device():
    x, offset, mask, weight = Case().tensors(torch.float32, "cuda")
    with pytest.raises(RuntimeError, match="offset must be on the device of input"):
        torch.ops.visdet.deform_conv2d(x, offset.cpu(), mask, weight, [1, 1], [1, 1], [1, 1], 1, 32)
