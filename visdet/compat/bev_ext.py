"""The functions of the extensions that pool features of cameras or points into cells seen from above.

They are ``bev_pool_ext`` (BEVFusion), ``occ_pool_ext`` (OccFormer), ``bev_pool_v2_ext`` (BEVDet), ``bev_pool_v3_ext``
of depths and features (FlashOcc's successors), ``voxel_pooling_ext``, ``voxel_pooling_train_ext``
and ``voxel_pooling_inference_ext`` (BEVDepth), and ``voxel.voxel_layer`` (BEVFusion and mmdet3d up to 0.18).
``visdet.compat.extensions`` makes this module importable under these names, within any package.
"""

import torch
from torch import Tensor

from visdet import ops

from . import _mmcv_functions as mmcv_functions
from ._entries import functions_of
from .mmcv_ext import dynamic_point_to_voxel_backward, dynamic_point_to_voxel_forward


def _bev_pool_gradient(out_grad: Tensor, geom_feats: Tensor) -> Tensor:
    """Return the gradient of the features of the points, which is that of their cells [B, C, D, H, W]."""
    H, W, D, B = geom_feats.long().unbind(1)
    return out_grad[B, :, D, H, W]


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


def _voxel_pooling(
    geom_xyz: Tensor, input_features: Tensor, size: tuple[int, int, int], pos_memo: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the sums, and the image, the row and the column of each point that is inside the grid."""
    pooled = ops.voxel_pooling(geom_xyz, input_features, size)
    is_inside = ((geom_xyz >= 0) & (geom_xyz < geom_xyz.new_tensor(size))).all(2, keepdim=True)
    image = torch.arange(len(geom_xyz), device=geom_xyz.device)[:, None].expand(geom_xyz.shape[:2])
    place = torch.stack([image, geom_xyz[..., 1], geom_xyz[..., 0]], 2)
    return pooled, torch.where(is_inside, place.to(pos_memo.dtype), pos_memo)


def _voxel_pooling_of_products(
    shape: tuple[int, ...],  # images, cameras, depths, height, width
    num_channels: int,
    size: tuple[int, int, int],
    geom_xyz: Tensor,
    depth_features: Tensor,
    context_features: Tensor,
    output_features: Tensor,
) -> Tensor:
    """Return the sums of the products of each pixel's features and depth, without a tensor of the products' size."""
    B, cameras, depths, H, W = shape
    places, weights = geom_xyz.reshape(*shape, 3), depth_features.reshape(shape)
    wide = torch.promote_types(weights.dtype, torch.float32)
    pixels = context_features.reshape(B, cameras, num_channels, H, W).permute(0, 1, 3, 4, 2).to(wide)
    total = output_features.new_zeros(output_features.shape, dtype=wide)
    for d in range(depths):
        products = pixels * weights[:, :, d, :, :, None]
        total += ops.voxel_pooling(places[:, :, d].flatten(1, 3), products.flatten(1, 3), size)
    return total


_SIZES = "interval_lengths interval_starts b:B d:D h:H w:W"
_RANKS = "ranks_depth ranks_feat ranks_bev interval_lengths interval_starts"
_GRID = "num_voxel_x,num_voxel_y,num_voxel_z:size"
_POOLING = (
    _voxel_pooling,
    f"batch_size num_points num_channels {_GRID} geom_xyz input_features >output_features >pos_memo",
)
_FUNCTIONS = functions_of(
    "bev_ext",
    {
        "bev_pool_backward": (_bev_pool_gradient, f"out_grad geom_feats {_SIZES}"),
        "bev_pool_forward": (ops.bev_pool, f"x:feats geom_feats:coords {_SIZES}"),
        "bev_pool_v2_backward": (
            _bev_pool_v2,
            f"<out_grad:out depth>depth_grad feat>feat_grad depth feat {_RANKS}",
        ),
        "bev_pool_v2_forward": (_bev_pool_v2, f"depth feat >out {_RANKS}"),
        "bev_pool_v3_backward": (
            _bev_pool_v2,
            "<out_grad:out depth>depth_grad feat>feat_grad depth feat ranks_depth ranks_feat ranks_bev n_points "
            "ranks_depth_fs ranks_feat_fs ranks_bev_fs interval_starts_fs interval_lengths_fs",
        ),
        "bev_pool_v3_forward": (_bev_pool_v2, f"depth feat >out {_RANKS}"),
        "dynamic_voxelize": (ops.dynamic_voxelize, "points >coors voxel_size coors_range NDim?:ndim"),
        "hard_voxelize": (
            mmcv_functions.hard_voxelize,
            "points ~voxels ~coors ~num_points_per_voxel voxel_size coors_range max_points max_voxels NDim? "
            "deterministic?",
        ),
        "voxel_pooling_forward_wrapper": _POOLING,
        "voxel_pooling_inference_forward_wrapper": (
            _voxel_pooling_of_products,
            f"batch_size,num_cams,num_depth,num_height,num_width:shape num_channels {_GRID} geom_xyz "
            "depth_features context_features >output_features",
        ),
        "voxel_pooling_train_forward_wrapper": _POOLING,
    },
) | {
    "dynamic_point_to_voxel_backward": dynamic_point_to_voxel_backward,
    "dynamic_point_to_voxel_forward": dynamic_point_to_voxel_forward,
}
_FUNCTIONS |= {f"occ_pool_{way}": _FUNCTIONS[f"bev_pool_{way}"] for way in ("forward", "backward")}
globals().update(_FUNCTIONS)
__all__ = list(_FUNCTIONS)
