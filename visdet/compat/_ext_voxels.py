"""The functions of ``mmcv._ext`` for voxels and sparse convolution."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from visdet.ops.mmcv import sparse_conv
from visdet.ops.mmcv import voxels as voxel_ops

__all__ = [
    "dynamic_point_to_voxel_backward",
    "dynamic_point_to_voxel_forward",
    "dynamic_voxelize_forward",
    "fused_indice_conv_forward",
    "get_indice_pairs_2d_backward",
    "get_indice_pairs_2d_forward",
    "get_indice_pairs_3d_backward",
    "get_indice_pairs_3d_forward",
    "get_indice_pairs_4d_forward",
    "hard_voxelize_forward",
    "indice_conv_backward",
    "indice_conv_forward",
    "indice_maxpool_backward",
    "indice_maxpool_forward",
]


def hard_voxelize_forward(
    points: Tensor,
    voxel_size: Sequence[float] | Tensor,
    coors_range: Sequence[float] | Tensor,
    voxels: Tensor,
    coors: Tensor,
    num_points_per_voxel: Tensor,
    voxel_num: Tensor,
    max_points: int,
    max_voxels: int,
    NDim: int = 3,
    deterministic: bool = True,
) -> None:
    """Write the voxels to the first rows of the tensors, and their number to ``voxel_num``."""
    found, places, counts = voxel_ops.hard_voxelize(points, voxel_size, coors_range, max_points, max_voxels)
    count = len(found)
    for name, target, values in (
        ("voxels", voxels, found),
        ("coors", coors, places),
        ("num_points_per_voxel", num_points_per_voxel, counts),
    ):
        if target.shape[1:] != values.shape[1:] or len(target) < count:
            expected = [f"{count} or more", *values.shape[1:]]
            raise ValueError(
                f"mmcv._ext.hard_voxelize_forward: {name} must be [{', '.join(map(str, expected))}], got "
                f"{list(target.shape)}"
            )
        target[:count] = values
    voxel_num.fill_(count)


def dynamic_voxelize_forward(
    points: Tensor, voxel_size: Tensor, coors_range: Tensor, coors: Tensor, NDim: int = 3
) -> None:
    coors.copy_(voxel_ops.dynamic_voxelize(points, voxel_size, coors_range, NDim))


def dynamic_point_to_voxel_forward(feats: Tensor, coors: Tensor, reduce_type: str) -> list[Tensor]:
    return list(voxel_ops.scatter_to_voxels(feats, coors, reduce_type))


def dynamic_point_to_voxel_backward(
    grad_feats: Tensor,
    grad_reduced_feats: Tensor,
    feats: Tensor,
    reduced_feats: Tensor,
    coors_idx: Tensor,
    reduce_count: Tensor,
    reduce_type: str,
) -> None:
    """Write the gradient of the features. The first point with the largest feature of a voxel has its gradient."""
    grad_feats.zero_()
    inside = (coors_idx >= 0).nonzero()[:, 0]
    voxel = coors_idx[inside].long()
    if reduce_type != "max":
        grad = grad_reduced_feats[voxel]
        grad_feats[inside] = grad / reduce_count[voxel, None] if reduce_type == "mean" else grad
        return
    N = len(feats)
    is_largest = feats[inside] == reduced_feats[voxel]
    candidate = torch.where(is_largest, inside[:, None], N)
    first = candidate.new_full(reduced_feats.shape, N)
    first = first.scatter_reduce(0, voxel[:, None].expand_as(candidate), candidate, "amin")
    padded = torch.nn.functional.pad(grad_feats, (0, 0, 0, 1)).scatter(0, first, grad_reduced_feats)
    grad_feats.copy_(padded[:N])


def _pairs(has_grid: bool) -> Callable[..., list[Tensor]]:
    """Return an entry that finds pairs. mmcv's backward entries have a table of the grid, which is not needed here."""

    def entry(indices: Tensor, *arguments: Any) -> list[Tensor]:
        *sizes, _, subm, transpose = arguments[1:] if has_grid else arguments
        find: Callable[..., tuple[Tensor, ...]] = sparse_conv.get_indice_pairs
        return list(find(indices, *sizes, bool(subm), bool(transpose)))

    return entry


get_indice_pairs_2d_forward = get_indice_pairs_3d_forward = get_indice_pairs_4d_forward = _pairs(False)
get_indice_pairs_2d_backward = get_indice_pairs_3d_backward = _pairs(True)


def indice_conv_forward(
    features: Tensor,
    filters: Tensor,
    indicePairs: Tensor,
    indiceNum: Tensor,
    numActOut: int,
    _inverse: int,
    _subM: int,
) -> Tensor:
    return sparse_conv.indice_conv(features, filters, indicePairs, indiceNum, numActOut, bool(_inverse))


def indice_conv_backward(
    features: Tensor,
    filters: Tensor,
    outGrad: Tensor,
    indicePairs: Tensor,
    indiceNum: Tensor,
    _inverse: int,
    _subM: int,
) -> list[Tensor]:
    arguments = features, filters, outGrad, indicePairs, indiceNum
    return list(sparse_conv.indice_conv_gradients(*arguments, bool(_inverse)))


def fused_indice_conv_forward(features: Tensor, filters: Tensor, bias: Tensor, *arguments: Any) -> Tensor:
    return indice_conv_forward(features, filters, *arguments) + bias


def indice_maxpool_forward(features: Tensor, indicePairs: Tensor, indiceNum: Tensor, numAct: int) -> Tensor:
    return sparse_conv.indice_maxpool(features, indicePairs, indiceNum, numAct)


def indice_maxpool_backward(
    features: Tensor, outFeatures: Tensor, outGrad: Tensor, indicePairs: Tensor, indiceNum: Tensor
) -> Tensor:
    arguments = features, outFeatures, outGrad, indicePairs, indiceNum
    return sparse_conv.indice_maxpool_gradient(*arguments)
