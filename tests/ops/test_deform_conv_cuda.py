"""What only the CUDA kernels of deform_conv2d have to show: sizes, memory, streams, devices, order."""

import pytest
import torch
from deform_conv_cases import Case, run

from visdet.ops import deform_conv2d, modulated_deform_conv2d

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
