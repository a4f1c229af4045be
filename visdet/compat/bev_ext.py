"""The functions of the extensions that pool features of cameras or points into cells seen from above.

They are ``bev_pool_ext`` (BEVFusion), ``bev_pool_v2_ext`` (BEVDet), ``voxel_pooling_ext``, ``voxel_pooling_train_ext``
and ``voxel_pooling_inference_ext`` (BEVDepth), and ``voxel.voxel_layer`` (BEVFusion and mmdet3d up to 0.18).
``visdet.compat.extensions`` makes this module importable under these names, within any package.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from visdet.ops.mmcv import voxels as voxel_ops

from ._ext_voxels import (
    dynamic_point_to_voxel_backward,
    dynamic_point_to_voxel_forward,
    hard_voxelize_forward,
)
from ._gradients import add_gradients, write

__all__ = [
    "bev_pool_backward",
    "bev_pool_forward",
    "bev_pool_v2_backward",
    "bev_pool_v2_forward",
    "dynamic_point_to_voxel_backward",
    "dynamic_point_to_voxel_forward",
    "dynamic_voxelize",
    "hard_voxelize",
    "voxel_pooling_forward_wrapper",
    "voxel_pooling_inference_forward_wrapper",
    "voxel_pooling_train_forward_wrapper",
]


def bev_pool_forward(
    x: Tensor,
    geom_feats: Tensor,
    interval_lengths: Tensor,
    interval_starts: Tensor,
    b: int,
    d: int,
    h: int,
    w: int,
) -> Tensor:
    return voxel_ops.bev_pool(x, geom_feats, b, d, h, w)


def bev_pool_backward(
    out_grad: Tensor,
    geom_feats: Tensor,
    interval_lengths: Tensor,
    interval_starts: Tensor,
    b: int,
    d: int,
    h: int,
    w: int,
) -> Tensor:
    def pool(x: Tensor) -> Tensor:
        return voxel_ops.bev_pool(x, geom_feats, b, d, h, w)

    grad = out_grad.new_zeros(len(geom_feats), out_grad.shape[-1])
    add_gradients("bev_pool_ext.bev_pool_backward", pool, [torch.zeros_like(grad)], out_grad, [grad])
    return grad


def bev_pool_v2_forward(
    depth: Tensor,
    feat: Tensor,
    out: Tensor,
    ranks_depth: Tensor,
    ranks_feat: Tensor,
    ranks_bev: Tensor,
    interval_lengths: Tensor,
    interval_starts: Tensor,
) -> None:
    cells = out.shape[:-1].numel()
    pooled = voxel_ops.bev_pool_v2(depth, feat, ranks_depth, ranks_feat, ranks_bev, cells)
    write("bev_pool_v2_ext.bev_pool_v2_forward", "out", out, pooled.view(*out.shape[:-1], feat.shape[-1]))


def bev_pool_v2_backward(
    out_grad: Tensor,
    depth_grad: Tensor,
    feat_grad: Tensor,
    depth: Tensor,
    feat: Tensor,
    ranks_depth: Tensor,
    ranks_feat: Tensor,
    ranks_bev: Tensor,
    interval_lengths: Tensor,
    interval_starts: Tensor,
) -> None:
    cells = out_grad.shape[:-1].numel()

    def pool(depth: Tensor, feat: Tensor) -> Tensor:
        return voxel_ops.bev_pool_v2(depth, feat, ranks_depth, ranks_feat, ranks_bev, cells)

    grad = out_grad.reshape(cells, -1)
    add_gradients("bev_pool_v2_ext.bev_pool_v2_backward", pool, [depth, feat], grad, [depth_grad, feat_grad])


def voxel_pooling_forward_wrapper(
    batch_size: int,
    num_points: int,
    num_channels: int,
    num_voxel_x: int,
    num_voxel_y: int,
    num_voxel_z: int,
    geom_xyz: Tensor,
    input_features: Tensor,
    output_features: Tensor,
    pos_memo: Tensor,
) -> None:
    """Write the sums, and the image, the row and the column of each point that is inside the grid."""
    size = (int(num_voxel_x), int(num_voxel_y), int(num_voxel_z))
    pooled = voxel_ops.voxel_pooling(geom_xyz, input_features, size)
    write("voxel_pooling_ext.voxel_pooling_forward_wrapper", "output_features", output_features, pooled)
    is_inside = ((geom_xyz >= 0) & (geom_xyz < geom_xyz.new_tensor(size))).all(2, keepdim=True)
    image = torch.arange(batch_size, device=geom_xyz.device)[:, None].expand(batch_size, num_points)
    place = torch.stack([image, geom_xyz[..., 1], geom_xyz[..., 0]], 2)
    pos_memo.copy_(torch.where(is_inside, place, pos_memo))


voxel_pooling_train_forward_wrapper = voxel_pooling_forward_wrapper


def voxel_pooling_inference_forward_wrapper(
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
    output_features: Tensor,
) -> None:
    """Write the sums of the products of each pixel's features and depth, without a tensor of the products' size."""
    shape = (batch_size, num_cams, num_depth, num_height, num_width)
    places = geom_xyz.reshape(*shape, 3)
    depths = depth_features.reshape(shape)
    contexts = context_features.reshape(batch_size, num_cams, num_channels, num_height, num_width)
    size = (int(num_voxel_x), int(num_voxel_y), int(num_voxel_z))
    wide = torch.promote_types(depths.dtype, torch.float32)
    total = output_features.new_zeros(output_features.shape, dtype=wide)
    pixels = contexts.permute(0, 1, 3, 4, 2).to(wide)
    for d in range(num_depth):
        products = pixels * depths[:, :, d, :, :, None]
        total += voxel_ops.voxel_pooling(places[:, :, d].flatten(1, 3), products.flatten(1, 3), size)
    output_features.copy_(total)


def hard_voxelize(
    points: Tensor,
    voxels: Tensor,
    coors: Tensor,
    num_points_per_voxel: Tensor,
    voxel_size: Sequence[float],
    coors_range: Sequence[float],
    max_points: int,
    max_voxels: int,
    NDim: int = 3,
    deterministic: bool = True,
) -> int:
    """Write the voxels to the first rows of the tensors, and return their number."""
    count = torch.zeros((), dtype=torch.int64)
    outputs = voxels, coors, num_points_per_voxel, count
    hard_voxelize_forward(points, voxel_size, coors_range, *outputs, max_points, max_voxels, NDim)
    return int(count)


def dynamic_voxelize(
    points: Tensor, coors: Tensor, voxel_size: Sequence[float], coors_range: Sequence[float], NDim: int = 3
) -> None:
    found = voxel_ops.dynamic_voxelize(points, voxel_size, coors_range, NDim)
    write("voxel_layer.dynamic_voxelize", "coors", coors, found)
