"""Sparse convolution: pairs of input and output places for each tap of a kernel, products of matrices, and maxima."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .._arguments import (
    check_that,
    computation_dtype,
    empty_sum,
    is_index,
    numbers_to,
    places_in_groups,
    widened,
)
from .._declared import check_indices, declared
from .voxels import keys_of_rows, rows_of_keys

__all__ = [
    "get_indice_pairs",
    "indice_conv",
    "indice_conv_gradients",
    "indice_maxpool",
    "indice_maxpool_gradient",
]


MOST_TAPS = 4096  # of a kernel, as in mmcv


@declared(
    indices="integers",
    batch_size="integer, at least 0",
    out_shape="D integers, at least 0, at most 1048576",
    spatial_shape="D integers, at least 0, at most 1048576",
    ksize="D integers, at least 1",
    stride="D integers, at least 1",
    padding="D integers, at least 0",
    dilation="D integers, at least 1",
)
def get_indice_pairs(
    indices: Tensor,  # [N, 1 + D]
    batch_size: int,
    out_shape: Sequence[int],
    spatial_shape: Sequence[int],
    ksize: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    subm: bool = False,
    transpose: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # [M, 1 + D] int32, [K, 2, N] int32, [K] int32
    """Return the outputs of a sparse convolution, and which inputs reach which outputs by each tap of the kernel.

    Args:
        indices: [N, 1 + D]. The image of the batch and the place of each input. None is negative.
        batch_size: The size of the batch.
        out_shape: The size of the output in D dimensions, each at most 2^20.
        spatial_shape: The size of the input, likewise.
        ksize: The size of the kernel. K is its product, at most 4096.
        stride: The stride.
        padding: The padding. A submanifold convolution pads by half of its dilated kernel instead.
        dilation: The distance of the taps.
        subm: Whether the outputs are at the places of the inputs (submanifold convolution).
        transpose: Whether the convolution is transposed.

    Returns:
        [M, 1 + D], [K, 2, N] and [K], all int32. The places of the outputs in rising order (those of the
        inputs for a submanifold convolution), the indices of the inputs and the outputs of each tap, with -1 after the
        last pair, and the numbers of pairs.

    It is not differentiable. It is deterministic. On a GPU, the host waits for the number of pairs.

    Raises:
        ValueError: A size, type or index does not fit. The message names the argument.

    Source: Paper "SECOND" (Yan et al.). The argument order is mmcv's. A dilated submanifold convolution of mmcv is not
        centered, and this one is.
    """
    D = len(out_shape)
    check_that(indices.shape[1:] == (1 + D,), "get_indice_pairs", "indices", "be [N, {}]", indices, 1 + D)
    if subm:
        out_shape, stride = spatial_shape, [1] * D
        padding = [size // 2 * distance for size, distance in zip(ksize, dilation, strict=True)]
    N, K = len(indices), math.prod(ksize)
    check_that(K <= MOST_TAPS, "get_indice_pairs", "ksize", "have at most {} taps", ksize, MOST_TAPS)
    least = int(indices.amin()) if N else 0
    check_that(least >= 0, "get_indice_pairs", "indices", "be 0 or more", least)
    image, at = indices[:, 0].long(), indices[:, 1:].long().T[:, None]  # [N], [D, 1, N]
    numbers = torch.tensor([stride, padding, out_shape, dilation], dtype=torch.int64, device=indices.device)
    step, pad, extent, gap = numbers.view(4, D, 1, 1)
    tap = (
        torch.stack(torch.unravel_index(numbers_to(K, indices), tuple(ksize)))[:, :, None] * gap
    )  # [D, K, 1]
    # Broadcast to [D, K, N], a dimension, a tap and an input.
    shifted = at * step - pad + tap if transpose else at + pad - tap
    place = shifted if transpose else shifted.div(step, rounding_mode="floor")
    reaches = is_index(place, extent)
    if not transpose:
        reaches &= place * step == shifted
    reaches = reaches.all(0) & (image < batch_size)
    key = keys_of_rows(image, place, out_shape)
    if subm:
        outids = indices
        ranked, order = keys_of_rows(image, at[:, 0], out_shape).sort(stable=True)
        found = torch.searchsorted(ranked, key.contiguous(), right=True) - 1
        if N:
            reaches = reaches & (found >= 0) & (ranked[found.clamp(min=0)] == key)
        tap_of, source = reaches.nonzero(as_tuple=True)
        output = order[found[tap_of, source]]
    else:
        tap_of, source = reaches.nonzero(as_tuple=True)
        unique, output = key[tap_of, source].unique(return_inverse=True)
        outids = rows_of_keys(unique, out_shape).to(torch.int32)
    counts = reaches.sum(1)
    rank = places_in_groups(tap_of, counts)
    pairs = indices.new_full((K, 2, N), -1, dtype=torch.int32)
    pairs[tap_of, 0, rank], pairs[tap_of, 1, rank] = source.int(), output.int()
    return outids, pairs, counts.int()


def _of_each_tap(
    pairs: Tensor, counts: Tensor, inputs: int, outputs: int, inverse: bool = False
) -> list[tuple[int, Tensor, Tensor]]:
    """Return the tap, the inputs and the outputs of each tap that has pairs."""
    numbers, wide = counts.tolist(), pairs.long()
    P = pairs.shape[2]
    fits = all(0 <= number <= P for number in numbers)
    check_that(fits, "indice_conv", "indice_pair_num", "be in 0..{}", numbers, P)
    source, target = (1, 0) if inverse else (0, 1)
    counts_pair = numbers_to(P, pairs) < counts[:, None]
    check_indices("indice_conv", "indice_pairs", wide[:, source][counts_pair], inputs, "inputs and outputs")
    check_indices("indice_conv", "indice_pairs", wide[:, target][counts_pair], outputs, "inputs and outputs")
    return [(k, wide[k, source, :n], wide[k, target, :n]) for k, n in enumerate(numbers) if n > 0]


@declared(
    features="floating [N, C]",
    filters="floating",
    indice_pairs="integers [K, 2, P]",
    indice_pair_num="integers [K]",
    num_activate_out="integer, at least 0",
)
def indice_conv(
    features: Tensor,  # [N, C]
    filters: Tensor,  # [k1, k2, ..., C, O]
    indice_pairs: Tensor,  # [K, 2, N]
    indice_pair_num: Tensor,  # [K]
    num_activate_out: int,
    inverse: bool = False,
) -> Tensor:  # [M, O]
    """Return the sparse convolution of features.

    Args:
        features: [N, C]. The features of the inputs.
        filters: [k1, k2, ..., C, O]. The weights of each tap of a kernel of these sizes. Only the first K are used, as
            Cylinder3D gives the pairs of a smaller kernel.
        indice_pairs: [K, 2, N]. The pairs of ``get_indice_pairs``.
        indice_pair_num: [K]. Their numbers.
        num_activate_out: The number M of outputs.
        inverse: Whether inputs and outputs of the pairs are exchanged.

    Returns:
        [M, O]. The sums over the taps. Those of 16-bit types are of float32.

    It is differentiable with respect to the features and the filters.

    Raises:
        ValueError: A shape or type does not fit. The message names the argument.

    Source: Paper "SECOND" (Yan et al.). The argument order is mmcv's.
    """
    weights = _weights(features, filters, indice_pairs)
    dtype = computation_dtype(features)
    output = features.new_zeros(num_activate_out, weights.shape[2], dtype=dtype)
    wide = features.to(dtype)  # The gradient of an input is a sum over the taps.
    operands = weights.dtype
    for k, source, target in _of_each_tap(
        indice_pairs, indice_pair_num, len(features), num_activate_out, inverse
    ):
        product = wide[source].to(operands) @ weights[k]
        output = output.index_add_(0, target, product.to(dtype))
    return output.to(features) + empty_sum(features, weights)


def _weights(features: Tensor, filters: Tensor, pairs: Tensor) -> Tensor:  # [K, C, O]
    """Return the weights of the taps, in the type of the operands of products."""
    K, C = len(pairs), features.shape[1]
    fits = filters.dim() >= 3 and filters.shape[-2] == C and filters.shape[:-2].numel() >= K
    check_that(fits, "indice_conv", "filters", "be [*ksize, {}, O] with {} taps", filters, C, K)
    weights = filters.flatten(0, -3)[:K].to(features)
    return widened(weights, weights) if features.is_cpu else weights  # as in autocast_linear


@declared(
    "indice_conv",
    features="floating [N, C]",
    filters="floating",
    grad_output="floating [M, O]",
    indice_pairs="integers [K, 2, P]",
    indice_pair_num="integers [K]",
)
def indice_conv_gradients(
    features: Tensor,
    filters: Tensor,
    grad_output: Tensor,
    indice_pairs: Tensor,
    indice_pair_num: Tensor,
    inverse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the features and of the filters of ``indice_conv``."""
    weights = _weights(features, filters, indice_pairs)
    fits = grad_output.shape[1] == weights.shape[2]
    check_that(fits, "indice_conv", "grad_output", "be [M, O]", grad_output)
    dtype = computation_dtype(features)
    operands = weights.dtype
    grad_features = features.new_zeros(features.shape, dtype=dtype)
    grad_weights = weights.new_zeros(filters.flatten(0, -3).shape)
    for k, source, target in _of_each_tap(
        indice_pairs, indice_pair_num, len(features), len(grad_output), inverse
    ):
        grad = grad_output[target].to(operands)
        grad_features.index_add_(0, source, (grad @ weights[k].T).to(dtype))
        grad_weights[k] = features[source].T.to(operands) @ grad
    return grad_features.to(features), grad_weights.view(filters.shape).to(filters)


@declared(
    features="real [N, C]",
    indice_pairs="integers [K, 2, P]",
    indice_pair_num="integers [K]",
    num_activate_out="integer, at least 0",
)
def indice_maxpool(
    features: Tensor,  # [N, C]
    indice_pairs: Tensor,  # [K, 2, N]
    indice_pair_num: Tensor,  # [K]
    num_activate_out: int,
) -> Tensor:  # [M, C]
    """Return the largest feature of the inputs of each output, and at least 0, because places without input are 0.

    Args:
        features: [N, C]. The features of the inputs.
        indice_pairs: [K, 2, N]. The pairs of ``get_indice_pairs``.
        indice_pair_num: [K]. Their numbers.
        num_activate_out: The number M of outputs.

    Returns:
        [M, C]. The maxima.

    Its gradient is ``indice_maxpool_gradient``, as in mmcv.

    Raises:
        ValueError: A shape does not fit. The message names the argument.

    Source: Paper "SECOND" (Yan et al.). The argument order is mmcv's.
    """
    output = features.new_zeros(num_activate_out, features.shape[1])
    taps = _of_each_tap(indice_pairs, indice_pair_num, len(features), num_activate_out)
    for _, source, target in taps:
        # The outputs of a tap are different from each other.
        output[target] = output[target].maximum(features[source])
    return output


@declared(
    "indice_maxpool",
    features="real [N, C]",
    output="real [M, C]",
    grad_output="real [M, C]",
    indice_pairs="integers [K, 2, P]",
    indice_pair_num="integers [K]",
)
def indice_maxpool_gradient(
    features: Tensor, output: Tensor, grad_output: Tensor, indice_pairs: Tensor, indice_pair_num: Tensor
) -> Tensor:
    """Return the gradient of the features. Each input that has the value of an output receives its whole gradient."""
    grad = torch.zeros_like(features, dtype=computation_dtype(features))
    taps = _of_each_tap(indice_pairs, indice_pair_num, len(features), len(output))
    for _, source, target in taps:
        passed = torch.where(features[source] == output[target], grad_output[target], 0)
        grad.index_add_(0, source, passed.to(grad))
    return grad.to(features)
