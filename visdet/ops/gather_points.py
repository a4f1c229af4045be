"""Features of chosen points, or their weighted sums: the operator behind grouping, gathering and interpolation."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _library, _registration
from ._arguments import is_index, numbers_to, starts_of
from .tracing import gradients_of

__all__ = ["gather_gradient", "gather_points_reference", "gathered", "stacked_indices"]


def gathered(
    features: Tensor,  # [B, C, N], or [N, C] for every b
    indices: Tensor,  # [B, M, K]
    weight: Tensor | None = None,  # [B, M, 3] for K = 3, or None for K = 1
    zeros_outside: bool = False,
) -> Tensor:  # [B, C, M]
    """Return the sum of weight[b, m, k] * features[b, c, indices[b, m, k]] over k, where no weights are ones.

    ``features`` and ``weight``, both float32 or both float64, have gradients of any order. On CUDA, the first one of
    ``features`` is a sum in any order, unless deterministic algorithms are asked for. Plain torch gathers other types.

    Args:
        zeros_outside: Whether a term whose index is not one of a point is 0. Otherwise it is a RuntimeError.
    """
    weight = features.new_empty(0) if weight is None else weight
    run: Any = _gather_points if features.is_floating_point() else gather_points_reference
    return run(features, _of_kernels(indices), weight, zeros_outside)


def gather_points_reference(features: Tensor, indices: Tensor, weight: Tensor, zeros_outside: bool) -> Tensor:
    """Return what ``gathered`` returns, in plain torch: the definition kernels are tested against. No weight: [0]."""
    is_shared, index = features.dim() == 2, indices.long()
    if zeros_outside:
        N = features.shape[0 if is_shared else 2]
        index = torch.where(is_index(index, N), index, N)
        features = F.pad(features, (0, 0, 0, 1) if is_shared else (0, 1))
    if is_shared:
        terms = features[index].permute(0, 3, 1, 2)
    else:
        terms = features.take_along_dim(index.flatten(1)[:, None], 2).unflatten(2, index.shape[1:])
    return (terms * weight[:, None]).sum(3) if weight.dim() == 3 else terms.squeeze(3)


def gather_gradient(
    grad_output: Tensor,  # [B, C, M]
    sizes: tuple[int, ...],  # of the features
    indices: Tensor,  # [B, M, K]
) -> Tensor:
    """Return the gradient of the features of ``gathered`` with zeros outside, which does not depend on them."""
    features = grad_output.new_zeros(()).expand(sizes)
    inputs = features, indices, grad_output.new_empty(0), True
    if _library.serves(features) and not _registration.needs_order(features):
        return torch.ops.visdet.gather_points_backward.default(grad_output, *inputs, True, False)[0]
    gradient, *_ = gradients_of(gather_points_reference, grad_output, inputs, (True, False, False, False))
    assert gradient is not None
    return gradient


def stacked_indices(
    indices: Tensor,  # [M, K]
    sizes: Tensor,  # [clouds] int32
    groups: Tensor,  # [clouds] int32
) -> Tensor:  # [M, K] int64
    """Return indices within clouds, which have ``sizes`` points and ``groups`` rows, as indices among all points.

    An index that is not one of a point of the cloud becomes -1.
    """
    return _stacked_indices(_of_kernels(indices), sizes, groups)


def _of_kernels(indices: Tensor) -> Tensor:
    """Return indices in a type that kernels take."""
    return indices if indices.dtype in (torch.int32, torch.int64) else indices.long()


def stacked_indices_reference(indices: Tensor, sizes: Tensor, groups: Tensor) -> Tensor:
    """Return what ``stacked_indices`` returns, in plain torch."""
    sizes, groups = sizes.long(), groups.long()
    cloud = numbers_to(len(groups), groups).repeat_interleave(groups)[:, None]
    return torch.where(is_index(indices, sizes[cloud]), indices + starts_of(sizes)[cloud], -1)


_gather_points = _registration.differentiable(
    "gather_points",
    lambda given: given.features.new_empty(
        given.indices.shape[0], given.features.shape[1], given.indices.shape[1]
    ),
    layouts={"indices": "[B, M, K]"},
    reference=gather_points_reference,
    elsewhere=gather_points_reference,
    needs_library=False,
)
_stacked_indices = _registration.without_gradient(
    "stacked_indices",
    "indices [M, K] int64",
    stacked_indices_reference,
    indices="[M, K]",
)
