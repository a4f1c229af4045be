"""The functions of the extensions that pool features of cameras or points into cells seen from above.

They are ``bev_pool_ext`` (BEVFusion), ``occ_pool_ext`` (OccFormer), ``bev_pool_v2_ext`` (BEVDet), ``bev_pool_v3_ext``
of depths and features (FlashOcc's successors), ``voxel_pooling_ext``, ``voxel_pooling_train_ext``
and ``voxel_pooling_inference_ext`` (BEVDepth), and ``voxel.voxel_layer`` (BEVFusion and mmdet3d up to 0.18).
``visdet.compat.extensions`` makes this module importable under these names, within any package.
"""

from typing import Any

import torch
from torch import Tensor

from visdet import ops

from . import _mmcv_functions as mmcv_functions
from . import mmcv_ext_voxels  # noqa: F401
from ._served import SERVED, FirstRows, Gradient, GradOutput, Result, computes, serves


def _bev_pool_v2(
    depth: Tensor,
    feat: Tensor,
    out: Tensor,
    ranks_depth: Tensor,
    ranks_feat: Tensor,
    ranks_bev: Tensor,
) -> Tensor:
    cells = out.shape[:-1]
    pooled = ops.bev_pool_v2(depth, feat, ranks_depth, ranks_feat, ranks_bev, cells.numel())
    return pooled.view(*cells, feat.shape[-1])


@serves(
    ops.bev_pool,
    "bev_ext.bev_pool_forward",
    "bev_ext.occ_pool_forward",
    x="feats",
    geom_feats="coords",
    b="B",
    d="D",
    h="H",
    w="W",
)
def bev_pool_forward(
    x: Tensor,
    geom_feats: Tensor,
    interval_lengths: object,
    interval_starts: object,
    b: int,
    d: int,
    h: int,
    w: int,
) -> Any: ...


@computes("bev_ext.bev_pool_backward", "bev_ext.occ_pool_backward")
def _bev_pool_gradient(
    out_grad: Tensor,
    geom_feats: Tensor,
    interval_lengths: object,
    interval_starts: object,
    b: object,
    d: object,
    h: object,
    w: object,
) -> Tensor:
    """Return the gradient of the features of the points, which is that of their cells [B, D, H, W, C]."""
    H, W, D, B = geom_feats.long().unbind(1)
    return out_grad[B, D, H, W]


@serves(_bev_pool_v2, "bev_ext.bev_pool_v2_forward", "bev_ext.bev_pool_v3_forward")
def bev_pool_v2_forward(
    depth: Tensor,
    feat: Tensor,
    out: Result,
    ranks_depth: Tensor,
    ranks_feat: Tensor,
    ranks_bev: Tensor,
    interval_lengths: object,
    interval_starts: object,
) -> None: ...


@serves(_bev_pool_v2, "bev_ext.bev_pool_v2_backward", out_grad="out", depth_grad="depth", feat_grad="feat")
def bev_pool_v2_backward(
    out_grad: GradOutput,
    depth_grad: Gradient,
    feat_grad: Gradient,
    depth: Tensor,
    feat: Tensor,
    ranks_depth: Tensor,
    ranks_feat: Tensor,
    ranks_bev: Tensor,
    interval_lengths: object,
    interval_starts: object,
) -> None: ...


@serves(_bev_pool_v2, "bev_ext.bev_pool_v3_backward", out_grad="out", depth_grad="depth", feat_grad="feat")
def bev_pool_v3_backward(
    out_grad: GradOutput,
    depth_grad: Gradient,
    feat_grad: Gradient,
    depth: Tensor,
    feat: Tensor,
    ranks_depth: Tensor,
    ranks_feat: Tensor,
    ranks_bev: Tensor,
    n_points: object,
    ranks_depth_fs: object,
    ranks_feat_fs: object,
    ranks_bev_fs: object,
    interval_starts_fs: object,
    interval_lengths_fs: object,
) -> None: ...


@serves(ops.dynamic_voxelize, "bev_ext.dynamic_voxelize", NDim="ndim")
def dynamic_voxelize(
    points: Tensor, coors: Result, voxel_size: Any, coors_range: Any, NDim: int | None = None
) -> None: ...


@serves(mmcv_functions.hard_voxelize, "bev_ext.hard_voxelize")
def hard_voxelize(
    points: Tensor,
    voxels: FirstRows,
    coors: FirstRows,
    num_points_per_voxel: FirstRows,
    voxel_size: Any,
    coors_range: Any,
    max_points: int,
    max_voxels: int,
    NDim: object = None,
    deterministic: object = None,
) -> Any: ...


@computes("bev_ext.voxel_pooling_forward_wrapper", "bev_ext.voxel_pooling_train_forward_wrapper")
def voxel_pooling(
    batch_size: object,
    num_points: object,
    num_channels: object,
    num_voxel_x: int,
    num_voxel_y: int,
    num_voxel_z: int,
    geom_xyz: Tensor,
    input_features: Tensor,
    output_features: Result,
    pos_memo: Result,
) -> tuple[Tensor, Tensor]:
    """Return the sums, and the image, the row and the column of each point that is inside the grid."""
    size = num_voxel_x, num_voxel_y, num_voxel_z
    pooled = ops.voxel_pooling(geom_xyz, input_features, size)
    is_inside = ((geom_xyz >= 0) & (geom_xyz < geom_xyz.new_tensor(size))).all(2, keepdim=True)
    image = torch.arange(len(geom_xyz), device=geom_xyz.device)[:, None].expand(geom_xyz.shape[:2])
    place = torch.stack([image, geom_xyz[..., 1], geom_xyz[..., 0]], 2)
    return pooled, torch.where(is_inside, place.to(pos_memo.dtype), pos_memo)


@computes("bev_ext.voxel_pooling_inference_forward_wrapper")
def voxel_pooling_of_products(
    batch_size: int,
    num_cams: int,
    num_depth: int,
    num_height: int,
    num_width: int,
    num_channels: int,
    num_voxel_x: int,
    num_voxel_y: int,
    num_voxel_z: int,
    geom_xyz: Tensor,
    depth_features: Tensor,
    context_features: Tensor,
    output_features: Result,
) -> Tensor:
    """Return the sums of the products of each pixel's features and depth, without a tensor of the products' size."""
    shape = (batch_size, num_cams, num_depth, num_height, num_width)
    size = (num_voxel_x, num_voxel_y, num_voxel_z)
    places = geom_xyz.reshape(*shape, 3)
    weights = depth_features.reshape(shape)
    wide = mmcv_functions.wide_type(weights)
    maps = context_features.reshape(batch_size, num_cams, num_channels, num_height, num_width)
    pixels = maps.permute(0, 1, 3, 4, 2).to(wide)
    total = output_features.new_zeros(output_features.shape, dtype=wide)
    for d in range(num_depth):
        products = pixels * weights[:, :, d, :, :, None]
        total += ops.voxel_pooling(places[:, :, d].flatten(1, 3), products.flatten(1, 3), size)
    return total


globals().update(SERVED["bev_ext"])
__all__ = list(SERVED["bev_ext"])
