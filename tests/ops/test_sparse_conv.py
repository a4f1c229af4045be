"""Sparse convolution, against the dense one."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.testing import assert_close

from tests.fuzz.problem import HALVES, Draw, Operator, Problem, generator_of, linear_problem
from visdet.ops import get_indice_pairs, indice_conv, indice_maxpool
from visdet.ops.mmcv.sparse_conv import indice_conv_gradients, indice_maxpool_gradient


def _draw_sparse(draw: Draw) -> Problem:
    B, shape = draw.size(2, 0), [draw.size(6, 0) for _ in range(3)]
    every = torch.cartesian_prod(*(torch.arange(size) for size in (B, *shape)))
    indices = every[torch.randperm(len(every), generator=draw.generator)[: draw.size(40)]].int()
    ksize, C = [draw.pick(1, 2, 3) for _ in range(3)], draw.size(4, 0)
    subm = draw.chance(0.4)
    features = draw.values(len(indices), C)
    given = {
        "features": features,
        "filters": draw.place(draw.numbers(*ksize, C, draw.size(4, 0)), features.dtype),
        "indices": indices.to(draw.device),
        "batch_size": B,
        "shape": shape,
        "stride": [1] * 3 if subm else [draw.pick(1, 2) for _ in range(3)],
        "padding": [size // 2 for size in ksize] if subm else [draw.pick(0, 1) for _ in range(3)],
        "subm": subm and all(size % 2 for size in ksize),
        "ksize": ksize,
    }
    problem = linear_problem("features", given, "filters")
    problem.epsilon, problem.error_factor = (
        torch.finfo(features.dtype).eps,
        64.0,
    )  # The product of a tap is rounded.
    return problem


def _out_shape(shape: list[int], ksize: list[int], stride: list[int], padding: list[int]) -> list[int]:
    return [
        max((n + 2 * p - k) // s + 1, 0) for n, k, s, p in zip(shape, ksize, stride, padding, strict=True)
    ]


def _put(grid: Tensor, places: Tensor, values: Tensor) -> Tensor:
    """Return a dense map with values [N, C] at places [N, 1 + D]."""
    return grid.index_put(tuple(places.long().T), values)


def _sparse(
    features: Tensor,
    filters: Tensor,
    indices: Tensor,
    batch_size: int,
    shape: list[int],
    stride: list[int],
    padding: list[int],
    subm: bool,
    ksize: list[int],
) -> Tensor:
    """Return the convolution as a dense map."""
    out = _out_shape(shape, ksize, stride, padding)
    places, pairs, counts = get_indice_pairs(
        indices, batch_size, out, shape, ksize, stride, padding, [1] * 3, subm
    )
    values = indice_conv(features, filters, pairs, counts, len(places))
    grid = values.new_zeros(batch_size, *(shape if subm else out), filters.shape[-1])
    return _put(grid, places, values)


def dense(indices: Tensor, features: Tensor, shape: Sequence[int], batch_size: int = 2) -> Tensor:
    grid = features.new_zeros(batch_size, *shape, features.shape[1])
    return _put(grid, indices, features).movedim(-1, 1)


def _dense(
    features: Tensor, filters: Tensor, indices: Tensor, batch_size: int, shape: list[int], **settings: Any
) -> Tensor:
    grid = dense(indices, features, shape, batch_size)
    out = _out_shape(shape, settings["ksize"], settings["stride"], settings["padding"])
    if 0 in out:
        empty = features.new_zeros(batch_size, *out, filters.shape[-1])
        return empty + features.sum() * 0 + filters.sum() * 0
    weight = filters.movedim((-1, -2), (0, 1))
    found = functional.conv3d(grid, weight, stride=settings["stride"], padding=settings["padding"])
    if not settings["subm"]:
        return found.movedim(1, -1)
    is_place = grid.new_zeros(batch_size, *shape, 1)
    return found.movedim(1, -1) * _put(is_place, indices, is_place.new_ones(1))


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor, pairs: Tensor, counts: Tensor, outputs: int) -> Tensor:
        pooled = indice_maxpool(features, pairs, counts, outputs)
        ctx.save_for_backward(features, pooled, pairs, counts)
        return pooled

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        features, pooled, *pairs = ctx.saved_tensors
        return indice_maxpool_gradient(features, pooled, grad, *pairs), None, None, None


def _draw_maxima(draw: Draw) -> Problem:
    given = _draw_sparse(draw).arguments
    del given["filters"]
    problem = linear_problem("features", given)
    problem.positions = ("features",)
    return problem


def _maxima(
    features: Tensor, indices: Tensor, batch_size: int, shape: list[int], ksize: list[int], **settings: Any
) -> Tensor:
    """Return the pooled features as a dense map."""
    stride, padding, subm = (settings[name] for name in ("stride", "padding", "subm"))
    out = shape if subm else _out_shape(shape, ksize, stride, padding)
    places, *pairs = get_indice_pairs(indices, batch_size, out, shape, ksize, stride, padding, [1] * 3, subm)
    values = _MaxPool.apply(features, *pairs, len(places))
    grid = values.new_zeros(batch_size, *out, features.shape[1])
    return _put(grid, places, values)


def _dense_maxima(
    features: Tensor, indices: Tensor, batch_size: int, shape: list[int], ksize: list[int], **settings: Any
) -> Tensor:
    """Return the maxima of windows. Every input that equals the maximum has the whole gradient."""
    grid = dense(indices, features, shape, batch_size)
    windows = functional.pad(grid, [size for size in reversed(settings["padding"]) for _ in range(2)])
    out = _out_shape(shape, ksize, settings["stride"], settings["padding"])
    if 0 in out:
        return features.new_zeros(batch_size, *out, features.shape[1]) + features.sum() * 0
    for dim, (size, stride) in enumerate(zip(ksize, settings["stride"], strict=True)):
        windows = windows.unfold(2 + dim, size, stride)
    windows = windows.flatten(5)
    largest = windows.detach().amax(5).clamp(min=0)
    is_largest = windows == largest[..., None]
    change = torch.where(is_largest, windows - windows.detach(), 0).sum(5)
    pooled = (largest + change).movedim(1, -1)
    if not settings["subm"]:
        return pooled
    is_place = grid.new_zeros(batch_size, *shape, 1, dtype=torch.bool)
    return torch.where(_put(is_place, indices, is_place.new_ones(1)), pooled, 0)


OPERATORS = (
    Operator(
        "indice_maxpool",
        _maxima,
        _draw_maxima,
        _dense_maxima,
        spoiled={"indices": ("rank", 1)},
        aliases=("get_indice_pairs",),
    ),
    Operator(
        "indice_conv",
        _sparse,
        _draw_sparse,
        _dense,
        spoiled={"features": (1,), "indices": ("rank", 1)},
        aliases=("get_indice_pairs",),
    ),
)


DENSE = {2: functional.conv2d, 3: functional.conv3d}


def places(shape):
    """Return 25 different places [25, 1 + D] of two images in any order."""
    every = torch.cartesian_prod(*map(torch.arange, (2, *shape)))
    return every[torch.randperm(len(every), generator=generator_of(0))[:25]].int()


# Shape, kernel, stride, padding, dilation, and whether the convolution is transposed.
CASES = [
    ((7, 8), (3, 3), (1, 1), (1, 1), (1, 1), False),
    ((7, 8), (3, 2), (2, 1), (1, 0), (1, 1), False),
    ((9, 8), (3, 3), (1, 1), (2, 2), (2, 2), False),
    ((5, 6, 7), (3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1), False),
    ((5, 6, 7), (3, 1, 1), (2, 1, 1), (0, 0, 0), (1, 1, 1), False),
    ((4, 5), (3, 3), (1, 1), (1, 1), (1, 1), True),
    ((4, 5), (3, 3), (2, 2), (1, 1), (1, 1), True),
]


@pytest.mark.parametrize("shape, ksize, stride, padding, dilation, transposed", CASES)
def test_convolution_is_the_dense_one(shape, ksize, stride, padding, dilation, transposed, device):
    indices, features = places(shape), torch.randn(25, 4, dtype=torch.float64)
    filters = torch.randn(*ksize, 4, 3, dtype=torch.float64)
    maps = dense(indices, features, shape)
    sizes = dict(stride=stride, padding=padding, dilation=dilation)
    if transposed:
        expected = functional.conv_transpose2d(maps, filters.movedim((-2, -1), (0, 1)), **sizes)
    else:
        expected = DENSE[len(shape)](maps, filters.movedim((-1, -2), (0, 1)), **sizes)
    out_shape = list(expected.shape[2:])
    settings = out_shape, list(shape), ksize, *sizes.values(), False, transposed
    outids, pairs, counts = get_indice_pairs(indices.to(device), 2, *settings)
    assert outids.dtype == pairs.dtype == counts.dtype == torch.int32
    assert len(outids.unique(dim=0)) == len(outids)
    result = indice_conv(features.to(device), filters.to(device), pairs, counts, len(outids))
    assert_close(dense(outids.cpu(), result.cpu(), out_shape), expected)
    # After the last pair of each tap there are -1.
    for pair, count in zip(pairs, counts.tolist(), strict=True):
        assert (pair[:, :count] >= 0).all() and (pair[:, count:] == -1).all()


def test_inverse_convolution_leads_back_to_the_inputs(device):
    shape, ksize = (7, 8), (2, 2)
    indices = places(shape).to(device)
    settings = [3, 4], list(shape), ksize, (2, 2), (0, 0), (1, 1)
    outids, pairs, counts = get_indice_pairs(indices, 2, *settings)
    filters, features = torch.randn(*ksize, 3, 4).to(device), torch.randn(25, 4).to(device)
    small = torch.randn(len(outids), 3).to(device)
    result = indice_conv(small, filters, pairs, counts, 25, inverse=True)
    # It is the adjoint of the convolution by the transposed filters.
    forward = indice_conv(features, filters.transpose(-1, -2), pairs, counts, len(outids))
    assert_close((result * features).sum(), (forward * small).sum())
    assert torch.equal(result.any(1), (pairs[:, 0, :, None] == torch.arange(25).to(device)).any(1).any(0))


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
    assert_close(torch.autograd.grad(result, (features, filters), grad), wanted)
    given = indice_conv_gradients(features.detach(), filters.detach(), grad, pairs, counts)
    assert_close(given, wanted)


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

    grad = torch.randn(sizes[1], 3, dtype=torch.float64)
    expected = torch.autograd.grad(convolve(features, filters), (features, filters), grad)
    given = indice_conv_gradients(features.detach(), filters.detach(), grad, pairs, counts, inverse)
    assert_close(given, expected)


@pytest.mark.parametrize("dtype", HALVES)
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


FEATURES, INDEX_PAIRS = torch.ones(3, 2), torch.zeros(9, 2, 3).int()
REFUSED = [
    (
        lambda: get_indice_pairs(torch.zeros(3, 3).int(), 1, [4, 4], [4, 4], [3], [1, 1], [1, 1], [1, 1]),
        r"ksize must be 2 integers, got \[3\]",
    ),
    (
        lambda: indice_conv(FEATURES, torch.ones(3, 3, 4, 5), INDEX_PAIRS, torch.ones(9).int(), 3),
        r"filters must be \[\*ksize, 2, O\] with 9 taps, got \[3, 3, 4, 5\]",
    ),
    (
        lambda: indice_conv(FEATURES, torch.ones(9, 2, 5), INDEX_PAIRS, torch.ones(8).int(), 3),
        r"indice_pair_num must be \[9\], got \[8\]",
    ),
]
