"""The functions of ``mmcv._ext`` for point clouds: neighbours, groups, boxes and pooling over boxes."""

import torch
from torch import Tensor

from visdet.ops import furthest_point_sample, furthest_point_sample_with_dist, point_neighbours
from visdet.ops._arguments import computation_dtype
from visdet.ops.gather_points import gather_gradient
from visdet.ops.mmcv import point_gathering, points_in_boxes

from ._gradients import add_gradients, choice, write

__all__ = [
    "assign_score_withk_backward",
    "assign_score_withk_forward",
    "ball_query_forward",
    "furthest_point_sampling_forward",
    "furthest_point_sampling_with_dist_forward",
    "gather_points_backward",
    "gather_points_forward",
    "group_points_backward",
    "group_points_forward",
    "knn_forward",
    "points_in_boxes_all_forward",
    "points_in_boxes_cpu_forward",
    "points_in_boxes_part_forward",
    "roiaware_pool3d_backward",
    "roiaware_pool3d_forward",
    "roipoint_pool3d_forward",
    "stack_ball_query_forward",
    "stack_group_points_backward",
    "stack_group_points_forward",
    "three_interpolate_backward",
    "three_interpolate_forward",
    "three_nn_forward",
]


def furthest_point_sampling_forward(
    points_tensor: Tensor, temp_tensor: Tensor, idx_tensor: Tensor, *, m: int, **sizes: int
) -> None:
    index = furthest_point_sample(points_tensor, m)
    write("furthest_point_sampling_forward", "idx_tensor", idx_tensor, index)


def furthest_point_sampling_with_dist_forward(
    points_tensor: Tensor, temp_tensor: Tensor, idx_tensor: Tensor, *, m: int, **sizes: int
) -> None:
    index = furthest_point_sample_with_dist(points_tensor, m)
    write("furthest_point_sampling_with_dist_forward", "idx_tensor", idx_tensor, index)


def ball_query_forward(
    new_xyz_tensor: Tensor,
    xyz_tensor: Tensor,
    idx_tensor: Tensor,
    *,
    min_radius: float,
    max_radius: float,
    nsample: int,
    **sizes: int,
) -> None:
    index = point_neighbours.ball_query(min_radius, max_radius, nsample, xyz_tensor, new_xyz_tensor)
    write("ball_query_forward", "idx_tensor", idx_tensor, index)


def stack_ball_query_forward(
    new_xyz_tensor: Tensor,
    new_xyz_batch_cnt: Tensor,
    xyz_tensor: Tensor,
    xyz_batch_cnt: Tensor,
    idx_tensor: Tensor,
    max_radius: float,
    nsample: int,
) -> None:
    index = point_neighbours.stack_ball_query(
        max_radius, nsample, xyz_tensor, xyz_batch_cnt, new_xyz_tensor, new_xyz_batch_cnt
    )
    write("stack_ball_query_forward", "idx_tensor", idx_tensor, index)


def knn_forward(
    xyz_tensor: Tensor,
    new_xyz_tensor: Tensor,
    idx_tensor: Tensor,
    dist2_tensor: Tensor,
    *,
    nsample: int,
    **sizes: int,
) -> None:
    index, distances = point_neighbours.knn(nsample, xyz_tensor, new_xyz_tensor)
    # A point that is farther than 1e5 is no neighbour in mmcv.
    is_far = distances >= 1e10
    write("knn_forward", "idx_tensor", idx_tensor, index.masked_fill(is_far, 0))
    write("knn_forward", "dist2_tensor", dist2_tensor, distances.masked_fill(is_far, 1e10))


def _three_of_each_image(count: int, known: Tensor, unknown: Tensor) -> tuple[Tensor, Tensor]:
    """Return what ``knn`` does, for points (image, x, y, z) and their neighbours in the same image, as SASSD means it.

    mmcv reads such points as if they had three numbers. A point without neighbours gets index 0 and 1e10.
    """
    index = unknown.new_zeros(*unknown.shape[:2], count, dtype=torch.int32)
    distances = unknown.new_full(index.shape, 1e10)
    for b, image in ((b, image) for b, points in enumerate(unknown) for image in points[:, 0].unique()):
        rows, columns = ((points[b, :, 0] == image).nonzero()[:, 0] for points in (unknown, known))
        if len(columns):
            found, squared = point_neighbours.knn(
                count, known[b, columns, 1:][None], unknown[b, rows, 1:][None]
            )
            index[b, rows], distances[b, rows] = columns[found[0].long()].int(), squared[0]
    return index, distances


def three_nn_forward(
    unknown_tensor: Tensor, known_tensor: Tensor, dist2_tensor: Tensor, idx_tensor: Tensor, **sizes: int
) -> None:
    nearest = _three_of_each_image if unknown_tensor.shape[-1] == 4 else point_neighbours.knn
    index, distances = nearest(3, known_tensor, unknown_tensor)
    write("three_nn_forward", "dist2_tensor", dist2_tensor, distances)
    write("three_nn_forward", "idx_tensor", idx_tensor, index)


def group_points_forward(points_tensor: Tensor, idx_tensor: Tensor, out_tensor: Tensor, **sizes: int) -> None:
    grouped = point_gathering.group_points(points_tensor, idx_tensor)
    write("group_points_forward", "out_tensor", out_tensor, grouped)


def group_points_backward(
    grad_out_tensor: Tensor, idx_tensor: Tensor, grad_points_tensor: Tensor, **sizes: int
) -> None:
    index = idx_tensor.flatten(1)[..., None]
    _write_gradient("group_points_backward", grad_out_tensor.flatten(2), index, grad_points_tensor)


def gather_points_forward(
    points_tensor: Tensor, idx_tensor: Tensor, out_tensor: Tensor, **sizes: int
) -> None:
    gathered = point_gathering.gather_points(points_tensor, idx_tensor)
    write("gather_points_forward", "out_tensor", out_tensor, gathered)


def gather_points_backward(
    grad_out_tensor: Tensor, idx_tensor: Tensor, grad_points_tensor: Tensor, **sizes: int
) -> None:
    _write_gradient("gather_points_backward", grad_out_tensor, idx_tensor[..., None], grad_points_tensor)


def _write_gradient(
    entry: str, grad_output: Tensor, index: Tensor, target: Tensor, weight: Tensor | None = None
) -> None:
    wide = grad_output.to(computation_dtype(grad_output))
    weight = None if weight is None else weight.to(wide.dtype)
    write(entry, "grad_points_tensor", target, gather_gradient(wide, target.shape, index, weight))


def stack_group_points_forward(
    features_tensor: Tensor,
    features_batch_cnt_tensor: Tensor,
    idx_tensor: Tensor,
    idx_batch_cnt_tensor: Tensor,
    out_tensor: Tensor,
    **sizes: int,
) -> None:
    arguments = features_tensor, features_batch_cnt_tensor, idx_tensor, idx_batch_cnt_tensor
    grouped = point_gathering.stack_group_points(*arguments)
    write("stack_group_points_forward", "out_tensor", out_tensor, grouped)


def stack_group_points_backward(
    grad_out_tensor: Tensor,
    idx_tensor: Tensor,
    idx_batch_cnt_tensor: Tensor,
    features_batch_cnt_tensor: Tensor,
    grad_features_tensor: Tensor,
    **sizes: int,
) -> None:
    counts = features_batch_cnt_tensor, idx_batch_cnt_tensor
    grad = point_gathering.stack_group_gradient(
        grad_out_tensor, grad_features_tensor, counts[0], idx_tensor, counts[1]
    )
    write("stack_group_points_backward", "grad_features_tensor", grad_features_tensor, grad)


def three_interpolate_forward(
    points_tensor: Tensor, idx_tensor: Tensor, weight_tensor: Tensor, out_tensor: Tensor, **sizes: int
) -> None:
    interpolated = point_gathering.three_interpolate(points_tensor, idx_tensor, weight_tensor)
    write("three_interpolate_forward", "out_tensor", out_tensor, interpolated)


def three_interpolate_backward(
    grad_out_tensor: Tensor,
    idx_tensor: Tensor,
    weight_tensor: Tensor,
    grad_points_tensor: Tensor,
    **sizes: int,
) -> None:
    entry = "three_interpolate_backward"
    _write_gradient(entry, grad_out_tensor, idx_tensor, grad_points_tensor, weight_tensor)


def assign_score_withk_forward(
    points: Tensor, centers: Tensor, scores: Tensor, knn_idx: Tensor, output: Tensor, **sizes: int
) -> None:
    assembled = point_gathering.assign_score_withk(scores, points, centers, knn_idx)
    write("assign_score_withk_forward", "output", output, assembled)


def assign_score_withk_backward(
    grad_out: Tensor,
    points: Tensor,
    centers: Tensor,
    scores: Tensor,
    knn_idx: Tensor,
    grad_points: Tensor,
    grad_centers: Tensor,
    grad_scores: Tensor,
    **sizes: int,
) -> None:
    def assemble(points: Tensor, centers: Tensor, scores: Tensor) -> Tensor:
        return point_gathering.assign_score_withk(scores, points, centers, knn_idx)

    outputs = [grad_points, grad_centers, grad_scores]
    add_gradients("assign_score_withk_backward", assemble, [points, centers, scores], grad_out, outputs)


def points_in_boxes_part_forward(
    boxes_tensor: Tensor, pts_tensor: Tensor, box_idx_of_points_tensor: Tensor
) -> None:
    index = points_in_boxes.points_in_boxes_part(pts_tensor, boxes_tensor)
    write("points_in_boxes_part_forward", "box_idx_of_points_tensor", box_idx_of_points_tensor, index)


def points_in_boxes_all_forward(
    boxes_tensor: Tensor, pts_tensor: Tensor, box_idx_of_points_tensor: Tensor
) -> None:
    index = points_in_boxes.points_in_boxes_all(pts_tensor, boxes_tensor)
    write("points_in_boxes_all_forward", "box_idx_of_points_tensor", box_idx_of_points_tensor, index)


def points_in_boxes_cpu_forward(boxes_tensor: Tensor, pts_tensor: Tensor, pts_indices_tensor: Tensor) -> None:
    index = points_in_boxes.points_in_boxes_all(pts_tensor[None], boxes_tensor[None])[0].T
    write("points_in_boxes_cpu_forward", "pts_indices_tensor", pts_indices_tensor, index)


_POOLS = ("max", "avg")


def roiaware_pool3d_forward(
    rois: Tensor,
    pts: Tensor,
    pts_feature: Tensor,
    argmax: Tensor,
    pts_idx_of_voxels: Tensor,
    pooled_features: Tensor,
    pool_method: int,
) -> None:
    entry = "roiaware_pool3d_forward"
    mode = choice(entry, "pool_method", pool_method, _POOLS)
    (D, H, W), most = pts_idx_of_voxels.shape[1:4], pts_idx_of_voxels.shape[4]
    collected = points_in_boxes.collect_points(rois, pts, (D, H, W), most)
    pooled, largest = points_in_boxes.pool_collected(collected, pts_feature, mode)
    write(entry, "pts_idx_of_voxels", pts_idx_of_voxels, collected)
    write(entry, "pooled_features", pooled_features, pooled)
    write(entry, "argmax", argmax, largest)


def roiaware_pool3d_backward(
    pts_idx_of_voxels: Tensor, argmax: Tensor, grad_out: Tensor, grad_in: Tensor, pool_method: int
) -> None:
    if grad_out.shape != argmax.shape:
        raise ValueError(
            f"mmcv._ext.roiaware_pool3d_backward: grad_out must be {list(argmax.shape)}, got "
            f"{list(grad_out.shape)}"
        )
    C = grad_in.shape[1]
    if choice("roiaware_pool3d_backward", "pool_method", pool_method, _POOLS) == "avg":
        voxel, point = points_in_boxes.pairs_of(pts_idx_of_voxels)
        count = pts_idx_of_voxels.flatten(0, 3)[:, :1].clamp(min=1)
        grad_in.index_add_(0, point, (grad_out.reshape(-1, C) / count)[voxel].to(grad_in.dtype))
    else:
        grad = grad_out.reshape(1, 1, -1).to(computation_dtype(grad_in))
        sizes, places = (1, 1, grad_in.numel()), points_in_boxes.places_of(argmax)
        grad_in.add_(gather_gradient(grad, sizes, places, zeros_outside=True).view(grad_in.shape))


def roipoint_pool3d_forward(
    xyz: Tensor, boxes3d: Tensor, pts_feature: Tensor, pooled_features: Tensor, pooled_empty_flag: Tensor
) -> None:
    samples = pooled_features.shape[2]
    pooled, is_empty = points_in_boxes.roipoint_pool3d(xyz, pts_feature, boxes3d, samples)
    write("roipoint_pool3d_forward", "pooled_features", pooled_features, pooled)
    write("roipoint_pool3d_forward", "pooled_empty_flag", pooled_empty_flag, is_empty)
