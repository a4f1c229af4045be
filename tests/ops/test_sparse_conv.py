"""Sparse convolution, against the dense one."""

import itertools

import pytest
import torch
from torch.nn import functional

from visdet.ops.mmcv.sparse_conv import (
    get_indice_pairs,
    indice_conv,
    indice_conv_gradients,
    indice_maxpool,
    indice_maxpool_gradient,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
DENSE = {2: functional.conv2d, 3: functional.conv3d}
DENSE_TRANSPOSED = {2: functional.conv_transpose2d, 3: functional.conv_transpose3d}


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def places(shape, count=25, batch_size=2, seed=0):
    """Return different places [count, 1 + D] in any order."""
    generator = torch.Generator().manual_seed(seed)
    every = list(itertools.product(range(batch_size), *map(range, shape)))
    return torch.tensor([every[i] for i in torch.randperm(len(every), generator=generator)[:count]]).int()


def dense(indices, features, shape, batch_size=2):
    grid = features.new_zeros(batch_size, *shape, features.shape[1])
    return grid.index_put(tuple(indices.long().T), features).movedim(-1, 1)


def values_at(maps, indices):
    return maps.movedim(1, -1)[tuple(indices.long().T)]


CASES = [
    ((7, 8), (3, 3), (1, 1), (1, 1), (1, 1)),
    ((7, 8), (3, 2), (2, 1), (1, 0), (1, 1)),
    ((9, 8), (3, 3), (1, 1), (2, 2), (2, 2)),
    ((5, 6, 7), (3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1)),
    ((5, 6, 7), (3, 1, 1), (2, 1, 1), (0, 0, 0), (1, 1, 1)),
]


@pytest.mark.parametrize("shape, ksize, stride, padding, dilation", CASES)
def test_convolution_is_the_dense_one(shape, ksize, stride, padding, dilation, device):
    indices, features = places(shape), torch.randn(25, 4, dtype=torch.float64)
    filters = torch.randn(*ksize, 4, 3, dtype=torch.float64)
    expected = DENSE[len(shape)](
        dense(indices, features, shape),
        filters.movedim((-1, -2), (0, 1)),
        stride=stride,
        padding=padding,
        dilation=dilation,
    )
    out_shape = list(expected.shape[2:])
    settings = out_shape, list(shape), ksize, stride, padding, dilation
    outids, pairs, counts = get_indice_pairs(indices.to(device), 2, *settings)
    assert outids.dtype == pairs.dtype == counts.dtype == torch.int32
    assert len(outids.unique(dim=0)) == len(outids)
    result = indice_conv(features.to(device), filters.to(device), pairs, counts, len(outids))
    torch.testing.assert_close(dense(outids.cpu(), result.cpu(), out_shape), expected)
    # After the last pair of each tap there are -1.
    for pair, count in zip(pairs, counts.tolist(), strict=True):
        assert (pair[:, :count] >= 0).all() and (pair[:, count:] == -1).all()


@pytest.mark.parametrize(
    "shape, ksize, dilation",
    [((7, 8), (3, 3), (1, 1)), ((9, 9), (3, 5), (2, 1)), ((4, 5, 6), (3, 3, 3), (1, 1, 1))],
)
def test_submanifold_convolution_is_the_dense_one_at_the_inputs(shape, ksize, dilation, device):
    indices, features = places(shape), torch.randn(25, 4, dtype=torch.float64)
    filters = torch.randn(*ksize, 4, 3, dtype=torch.float64)
    padding = [size // 2 * d for size, d in zip(ksize, dilation, strict=True)]
    maps = dense(indices, features, shape)
    full = DENSE[len(shape)](maps, filters.movedim((-1, -2), (0, 1)), padding=padding, dilation=dilation)
    ones = (1,) * len(shape)
    settings = list(shape), list(shape), ksize, ones, ones, dilation, True
    outids, pairs, counts = get_indice_pairs(indices.to(device), 2, *settings)
    assert torch.equal(outids.cpu(), indices)
    result = indice_conv(features.to(device), filters.to(device), pairs, counts, len(outids))
    torch.testing.assert_close(result.cpu(), values_at(full, indices))


@pytest.mark.parametrize("stride", [(1, 1), (2, 2)])
def test_transposed_convolution_is_the_dense_one(stride, device):
    shape, ksize, padding = (4, 5), (3, 3), (1, 1)
    indices, features = places(shape), torch.randn(25, 4, dtype=torch.float64)
    filters = torch.randn(*ksize, 4, 3, dtype=torch.float64)
    maps = dense(indices, features, shape)
    expected = functional.conv_transpose2d(maps, filters.permute(2, 3, 0, 1), stride=stride, padding=padding)
    out_shape = list(expected.shape[2:])
    settings = out_shape, list(shape), ksize, stride, padding, (1, 1), False, True
    outids, pairs, counts = get_indice_pairs(indices.to(device), 2, *settings)
    result = indice_conv(features.to(device), filters.to(device), pairs, counts, len(outids))
    torch.testing.assert_close(dense(outids.cpu(), result.cpu(), out_shape), expected)


def test_inverse_convolution_leads_back_to_the_inputs(device):
    shape, ksize = (7, 8), (2, 2)
    indices = places(shape).to(device)
    settings = [3, 4], list(shape), ksize, (2, 2), (0, 0), (1, 1)
    outids, pairs, counts = get_indice_pairs(indices, 2, *settings)
    small = torch.randn(len(outids), 3, device=device)
    filters = torch.randn(*ksize, 3, 4, device=device)
    result = indice_conv(small, filters, pairs, counts, 25, inverse=True)
    expected = torch.zeros(25, 4, device=device)
    for n, place in enumerate(indices.tolist()):
        b, y, x = place
        for m, target in enumerate(outids.tolist()):
            if target == [b, y // 2, x // 2]:
                expected[n] = small[m] @ filters[y % 2, x % 2]
    torch.testing.assert_close(result, expected)


def test_taps_without_pairs_are_not_used(device):
    pairs = torch.tensor([[[0, 1], [1, 0]], [[0, 1], [0, 1]]], dtype=torch.int32, device=device)
    counts = torch.tensor([2, 2], dtype=torch.int32, device=device)
    features = torch.rand(2, 3, device=device, requires_grad=True)
    filters = torch.rand(1, 1, 5, 3, 4, device=device, requires_grad=True)
    result = indice_conv(features, filters, pairs, counts, 2)
    expected = indice_conv(features, filters[:, :, :2], pairs, counts, 2)
    assert torch.equal(result, expected)
    grad = torch.rand_like(result)
    wanted = torch.autograd.grad(expected, (features, filters), grad)
    for one, other in zip(torch.autograd.grad(result, (features, filters), grad), wanted, strict=True):
        torch.testing.assert_close(one, other)
    given = indice_conv_gradients(features.detach(), filters.detach(), grad, pairs, counts)
    for one, other in zip(given, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_maxima_of_places_without_input_are_0(device):
    shape = (6, 6)
    indices, features = places(shape), torch.randn(25, 4)
    settings = [3, 3], list(shape), (2, 2), (2, 2), (0, 0), (1, 1)
    outids, pairs, counts = get_indice_pairs(indices.to(device), 2, *settings)
    pooled = indice_maxpool(features.to(device), pairs, counts, len(outids))
    expected = functional.max_pool2d(dense(indices, features, shape), 2).clamp(min=0)
    torch.testing.assert_close(pooled.cpu(), values_at(expected, outids.cpu()))
    grad = indice_maxpool_gradient(features.to(device), pooled, torch.ones_like(pooled), pairs, counts)
    is_largest = torch.zeros(25, 4)
    for n, (b, y, x) in enumerate(indices.tolist()):
        is_largest[n] = (features[n] == expected[b, :, y // 2, x // 2]).float()
    assert torch.equal(grad.cpu(), is_largest)


@pytest.mark.parametrize("inverse", [False, True])
def test_gradients_are_those_of_the_definition(inverse):
    indices = places((5, 6))
    settings = [5, 6], [5, 6], (3, 3), (1, 1), (1, 1), (1, 1)
    outids, pairs, counts = get_indice_pairs(indices, 2, *settings)
    sizes = (len(outids), 25) if inverse else (25, len(outids))
    features = torch.randn(sizes[0], 2, dtype=torch.float64, requires_grad=True)
    filters = torch.randn(3, 3, 2, 3, dtype=torch.float64, requires_grad=True)

    def convolve(features, filters):
        return indice_conv(features, filters, pairs, counts, sizes[1], inverse)

    assert torch.autograd.gradcheck(convolve, (features, filters))
    grad = torch.randn(sizes[1], 3, dtype=torch.float64)
    expected = torch.autograd.grad(convolve(features, filters), (features, filters), grad)
    given = indice_conv_gradients(features.detach(), filters.detach(), grad, pairs, counts, inverse)
    for one, other in zip(given, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_of_16_bits_are_of_float32(dtype, device):
    pairs = torch.zeros(3000, 2, 1, dtype=torch.int32, device=device)
    counts = torch.ones(3000, dtype=torch.int32, device=device)
    ones = torch.ones(1, 1, dtype=dtype, device=device)
    result = indice_conv(ones, torch.ones(3000, 1, 1, dtype=dtype, device=device), pairs, counts, 1)
    assert result.dtype == dtype and result.item() == torch.tensor(3000.0).to(dtype)


def test_nothing_and_places_outside(device):
    none = torch.zeros(0, 4, dtype=torch.int32, device=device)
    settings = [4, 4, 4], [4, 4, 4], (3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1)
    for subm in (False, True):
        outids, pairs, counts = get_indice_pairs(none, 1, *settings, subm)
        assert outids.shape == (0, 4) and pairs.shape == (27, 2, 0) and counts.sum() == 0
        features = torch.zeros(0, 2, device=device)
        filters = torch.zeros(3, 3, 3, 2, 5, device=device)
        assert indice_conv(features, filters, pairs, counts, 0).shape == (0, 5)
        filters.requires_grad_()
        indice_conv(features, filters, pairs, counts, 2).sum().backward()
        assert (filters.grad == 0).all()
    far = torch.tensor([[0, 9, 9, 9], [7, 0, 0, 0]], dtype=torch.int32, device=device)
    assert get_indice_pairs(far, 1, *settings)[0].shape == (0, 4)


def test_grids_of_more_than_2_to_the_31_places(device):
    indices = torch.tensor([[1, 4999, 4999, 4999], [0, 0, 0, 0]], dtype=torch.int32, device=device)
    size, ones = [5000] * 3, (1, 1, 1)
    outids, _, counts = get_indice_pairs(indices, 2, size, size, ones, ones, (0, 0, 0), ones)
    assert outids.tolist() == [[0, 0, 0, 0], [1, 4999, 4999, 4999]] and counts.tolist() == [2]
    found = get_indice_pairs(indices, 2, size, size, (3, 3, 3), ones, ones, ones, True)[2]
    assert found.sum() == 2


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda i: get_indice_pairs(i, 1, [4], [4], [3], [1], [1], [1]),
            r"indices must be \[N, 2\], got \[3, 3\]",
        ),
        (
            lambda i: get_indice_pairs(i, 1, [4, 4], [4, 4], [3], [1, 1], [1, 1], [1, 1]),
            r"ksize must have 2 numbers, got \[3\]",
        ),
        (
            lambda i: indice_conv(
                torch.ones(3, 2), torch.ones(3, 3, 4, 5), torch.zeros(9, 2, 3).int(), torch.ones(9).int(), 3
            ),
            r"filters must be \[\*ksize, 2, O\] with 9 taps, got \[3, 3, 4, 5\]",
        ),
        (
            lambda i: indice_conv(
                torch.ones(3, 2), torch.ones(9, 2, 5), torch.zeros(9, 2, 3).int(), torch.ones(8).int(), 3
            ),
            r"indice_pair_num must be \[9\], got \[8\]",
        ),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(3, 3, dtype=torch.int32))
