"""The functions of ``mmcv._ext`` for voxels and sparse convolution, and of mmdet3d's ``sparse_conv_ext`` up to 0.18."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from visdet import ops
from visdet.ops.mmcv import sparse_conv, voxels
from visdet.ops.mmcv.points_in_boxes import first_of_groups

from . import _mmcv_functions as own
from ._served import FirstRows, Result, computes, serves


@computes("mmcv._ext.dynamic_point_to_voxel_backward", "bev_ext.dynamic_point_to_voxel_backward")
def dynamic_point_to_voxel_backward(
    grad_feats: Result,
    grad_reduced_feats: Tensor,
    feats: Tensor,
    reduced_feats: Tensor,
    coors_idx: Tensor,
    reduce_count: Tensor,
    reduce_type: str,
) -> Tensor:
    """Return the gradient of the features. The first point with the largest feature of a voxel has its gradient."""
    inside = (coors_idx >= 0).nonzero()[:, 0]
    voxel = coors_idx[inside].long()
    zeros = torch.zeros_like(grad_feats)
    if reduce_type != "max":
        grad = grad_reduced_feats[voxel]
        return zeros.index_copy(
            0, inside, grad / reduce_count[voxel, None] if reduce_type == "mean" else grad
        )
    is_largest = feats[inside] == reduced_feats[voxel]
    first = first_of_groups(is_largest, voxel, inside, len(reduced_feats), len(feats))
    padded = F.pad(zeros, (0, 0, 0, 1)).scatter(0, first, grad_reduced_feats)
    return padded[: len(feats)]


@serves(
    voxels.scatter_to_voxels,
    "mmcv._ext.dynamic_point_to_voxel_forward",
    "bev_ext.dynamic_point_to_voxel_forward",
)
def dynamic_point_to_voxel_forward(feats: Tensor, coors: Tensor, reduce_type: str) -> Any: ...


@serves(ops.dynamic_voxelize, "mmcv._ext.dynamic_voxelize_forward", NDim="ndim")
def dynamic_voxelize_forward(
    points: Tensor, voxel_size: Any, coors_range: Any, coors: Result, NDim: int | None = None
) -> None: ...


@computes(
    "mmcv._ext.fused_indice_conv_forward",
    "sparse_conv_ext.fused_indice_conv_fp32",
    "sparse_conv_ext.fused_indice_conv_half",
)
def fused_indice_conv_forward(
    features: Tensor,
    filters: Tensor,
    bias: Tensor,
    indicePairs: Tensor,
    indiceNum: Tensor,
    numActOut: int,
    _inverse: bool,
    _subM: object,
) -> Tensor:
    return ops.indice_conv(features, filters, indicePairs, indiceNum, numActOut, _inverse) + bias


@serves(
    ops.get_indice_pairs,
    "mmcv._ext.get_indice_pairs_2d_backward",
    "mmcv._ext.get_indice_pairs_3d_backward",
    "sparse_conv_ext.get_indice_pairs_grid_2d",
    "sparse_conv_ext.get_indice_pairs_grid_3d",
)
def get_indice_pairs_2d_backward(
    indices: Tensor,
    grid: object,
    batch_size: int,
    out_shape: Any,
    spatial_shape: Any,
    ksize: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    out_padding: object,
    subm: bool,
    transpose: bool,
) -> Any: ...


@serves(
    ops.get_indice_pairs,
    "mmcv._ext.get_indice_pairs_2d_forward",
    "mmcv._ext.get_indice_pairs_3d_forward",
    "mmcv._ext.get_indice_pairs_4d_forward",
    "sparse_conv_ext.get_indice_pairs_2d",
    "sparse_conv_ext.get_indice_pairs_3d",
    "sparse_conv_ext.get_indice_pairs_4d",
)
def get_indice_pairs_2d_forward(
    indices: Tensor,
    batch_size: int,
    out_shape: Any,
    spatial_shape: Any,
    ksize: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    out_padding: object,
    subm: bool,
    transpose: bool,
) -> Any: ...


@serves(own.hard_voxelize, "mmcv._ext.hard_voxelize_forward")
def hard_voxelize_forward(
    points: Tensor,
    voxel_size: Any,
    coors_range: Any,
    voxels: FirstRows,
    coors: FirstRows,
    num_points_per_voxel: FirstRows,
    voxel_num: Result,
    max_points: int,
    max_voxels: int,
    NDim: object = None,
    deterministic: object = None,
) -> None: ...


@serves(
    sparse_conv.indice_conv_gradients,
    "mmcv._ext.indice_conv_backward",
    "sparse_conv_ext.indice_conv_backward_fp32",
    "sparse_conv_ext.indice_conv_backward_half",
    outGrad="grad_output",
    indicePairs="indice_pairs",
    indiceNum="indice_pair_num",
    _inverse="inverse",
)
def indice_conv_backward(
    features: Tensor,
    filters: Tensor,
    outGrad: Tensor,
    indicePairs: Tensor,
    indiceNum: Tensor,
    _inverse: bool,
    _subM: object,
) -> Any: ...


@serves(
    ops.indice_conv,
    "mmcv._ext.indice_conv_forward",
    "sparse_conv_ext.indice_conv_fp32",
    "sparse_conv_ext.indice_conv_half",
    indicePairs="indice_pairs",
    indiceNum="indice_pair_num",
    numActOut="num_activate_out",
    _inverse="inverse",
)
def indice_conv_forward(
    features: Tensor,
    filters: Tensor,
    indicePairs: Tensor,
    indiceNum: Tensor,
    numActOut: int,
    _inverse: bool,
    _subM: object,
) -> Any: ...


@serves(
    sparse_conv.indice_maxpool_gradient,
    "mmcv._ext.indice_maxpool_backward",
    "sparse_conv_ext.indice_maxpool_backward_fp32",
    "sparse_conv_ext.indice_maxpool_backward_half",
    outFeatures="output",
    outGrad="grad_output",
    indicePairs="indice_pairs",
    indiceNum="indice_pair_num",
)
def indice_maxpool_backward(
    features: Tensor, outFeatures: Tensor, outGrad: Tensor, indicePairs: Tensor, indiceNum: Tensor
) -> Any: ...


@serves(
    ops.indice_maxpool,
    "mmcv._ext.indice_maxpool_forward",
    "sparse_conv_ext.indice_maxpool_fp32",
    "sparse_conv_ext.indice_maxpool_half",
    indicePairs="indice_pairs",
    indiceNum="indice_pair_num",
    numAct="num_activate_out",
)
def indice_maxpool_forward(features: Tensor, indicePairs: Tensor, indiceNum: Tensor, numAct: int) -> Any: ...
