"""The kernels of features of chosen points against their definition, forward and backward, and their refusals."""

import pytest
import torch

from visdet.ops import _library
from visdet.ops.gather_points import (
    gather_gradient,
    gather_points_reference,
    gathered,
    stacked_indices,
    stacked_indices_reference,
)
from visdet.ops.mmcv.point_gathering import gather_points, group_points, three_interpolate

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
LAYOUTS = {"of each image": (3, 20, 9), "shared": (9, 20)}


@pytest.fixture(params=DEVICES)
def device(request):
    if not _library.is_loaded(request.param):
        pytest.skip("the library is not built")
    return request.param


def inputs(layout, dtype, index_dtype, has_weight, zeros_outside, device, M=50):
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(LAYOUTS[layout], generator=generator, dtype=dtype).mT.contiguous().mT
    low, high = (-2, 12) if zeros_outside else (0, 9)
    index = torch.randint(low, high, (3, M, 3 if has_weight else 1), generator=generator, dtype=index_dtype)
    weight = (
        torch.randn(3, M, 3, generator=generator, dtype=dtype).transpose(1, 2).contiguous().transpose(1, 2)
    )
    weight = weight if has_weight else features.new_empty(0)
    return features.to(device), index.to(device), weight.to(device), zeros_outside


@pytest.mark.parametrize("has_weight, zeros_outside", [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("M", [0, 50, 5000])
def test_kernels_are_the_definition(M, layout, dtype, index_dtype, has_weight, zeros_outside, device):
    features, *others = inputs(layout, dtype, index_dtype, has_weight, zeros_outside, device, M)
    leaves = [one.requires_grad_() for one in (features, others[1]) if one.numel()]
    expected, found = gather_points_reference(features, *others), gathered(features, *others)
    same = torch.testing.assert_close if has_weight and device == "cuda" else torch.equal
    assert same(found, expected) is not False  # torch adds up three numbers on CUDA in another order.
    assert torch.equal(torch.ops.visdet.gather_points(features, *others), found)
    grad = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, leaves, grad)
    close = dict(rtol=0, atol=2e-3 if dtype == torch.float32 else 1e-11)  # of sums of up to 5000 numbers
    torch.testing.assert_close(torch.autograd.grad(found, leaves, grad), wanted, **close)
    torch.testing.assert_close(gather_gradient(grad, features.shape, *others), wanted[0], **close)


@pytest.mark.parametrize("has_weight", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_deterministic_gradients(layout, has_weight, device):
    features, *others = inputs(layout, torch.float32, torch.int32, has_weight, False, device, 5000)
    features.requires_grad_()
    grads = []
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(3):
            output = gathered(features, *others)
            grads += [*torch.autograd.grad(output.square().sum(), features)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(grads[0], grads[1]) and torch.equal(grads[0], grads[2])
    expected = torch.autograd.grad(gather_points_reference(features, *others).square().sum(), features)[0]
    torch.testing.assert_close(grads[0], expected, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_indices_within_clouds(dtype, device):
    index = torch.randint(-2, 9, (23, 5), dtype=dtype, device=device)
    sizes, groups = (
        torch.tensor(counts, dtype=torch.int32, device=device)
        for counts in ([3, 0, 7, 5, 0], [0, 9, 4, 10, 0])
    )
    found = stacked_indices(index, sizes, groups)
    assert torch.equal(found, stacked_indices_reference(index, sizes, groups))
    assert found[0].tolist() == [-1] * 5 and found.max() == 14  # The second cloud has no points.
    none = torch.empty(0, dtype=torch.int32, device=device)
    assert stacked_indices(index[:0], none, none).shape == (0, 5)


@pytest.mark.parametrize("call", [group_points, gather_points, three_interpolate])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("bad", [-1, 9, 2**31 - 1])
def test_an_index_of_no_point_is_an_error(call, dtype, bad):
    index = torch.zeros(2, 5, 3, dtype=dtype)
    index[1, 4, 2] = bad
    index = index[..., 2] if call is gather_points else index
    weight = (torch.rand(2, 5, 3),) if call is three_interpolate else ()
    with pytest.raises(RuntimeError, match=f"{call.__name__}: indices must be in 0..8, got {bad}"):
        call(torch.rand(2, 4, 9), index, *weight)


F, I, W = torch.zeros(2, 4, 9), torch.zeros(2, 5, 1, dtype=torch.int32), torch.zeros(0)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((F.half(), I, W), "features must be float64 or float32, got Half"),
        ((F[:1], I, W), r"features must be \[B, C, N\] = \[2, C, N\], got \[1, 4, 9\]"),
        ((F, I[0], W), r"indices must be \[B, M, K\], got \[5, 1\]"),
        ((F, I.float(), W), "indices must be int32 or int64, got Float"),
        ((F, I.expand(2, 5, 2), W), r"indices must be \[B, M, 1\] or \[B, M, 3\], got \[2, 5, 2\]"),
        ((F, I, torch.zeros(2, 5, 1)), r"weight must be \[0\], got \[2, 5, 1\]"),
        ((F, I.expand(2, 5, 3), W), r"weight must be \[B, M, 3\] = \[2, 5, 3\], got \[0\]"),
        ((F, I.expand(2, 5, 3), torch.zeros(2, 5, 3).double()), "weight must be Float, the type of features"),
    ],
)
def test_messages(arguments, message):
    _library.require_cpu()
    with pytest.raises(RuntimeError, match=f"gather_points: {message}"):
        torch.ops.visdet.gather_points(*arguments, False)
    with pytest.raises(RuntimeError, match=f"gather_points_backward: {message}"):
        torch.ops.visdet.gather_points_backward(F, *arguments, False, True, True)


def test_messages_of_stacked_indices():
    _library.require_cpu()
    run, index, count = torch.ops.visdet.stacked_indices, I[0], torch.zeros(1, dtype=torch.int32)
    for arguments, message in (
        ((I, count, count), r"indices must be \[M, K\]"),
        ((index, count.long(), count), "sizes must be int32, got Long"),
        ((index, count, count[:0]), r"groups must be \[clouds\] = \[1\], got \[0\]"),
        ((index, count[:0], count[:0]), "sizes must have a cloud"),
    ):
        with pytest.raises(RuntimeError, match=f"stacked_indices: {message}"):
            run(*arguments)
