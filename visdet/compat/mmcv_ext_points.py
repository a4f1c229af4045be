"""The functions of ``mmcv._ext`` for points, voxels and boxes in space (``mmcv_ext``)."""

from torch import Tensor

from visdet import ops
from visdet.ops.mmcv import point_gathering, point_sets

from . import _mmcv_functions as own
from ._served import FirstRows, Gradient, GradOutput, PoolMode, Result, serves


@serves(
    ops.assign_score_withk,
    "mmcv._ext.assign_score_withk_backward",
    points="point_features",
    centers="center_features",
    grad_points="point_features",
    grad_centers="center_features",
    grad_scores="scores",
)
def assign_score_withk_backward(
    grad_out: GradOutput,
    points: Tensor,
    centers: Tensor,
    scores: Tensor,
    knn_idx: Tensor,
    grad_points: Gradient,
    grad_centers: Gradient,
    grad_scores: Gradient,
) -> None: ...


@serves(
    ops.assign_score_withk,
    "mmcv._ext.assign_score_withk_forward",
    points="point_features",
    centers="center_features",
)
def assign_score_withk_forward(
    points: Tensor, centers: Tensor, scores: Tensor, knn_idx: Tensor, output: Result
) -> None: ...


@serves(
    ops.ball_query,
    "mmcv._ext.ball_query_forward",
    new_xyz_tensor="center_xyz",
    xyz_tensor="xyz",
    nsample="sample_num",
)
def ball_query_forward(
    new_xyz_tensor: Tensor,
    xyz_tensor: Tensor,
    idx_tensor: Result,
    min_radius: float,
    max_radius: float,
    nsample: int,
) -> None: ...


@serves(
    point_sets.squared_distances,
    "mmcv._ext.chamfer_distance_backward",
    idx1="nearest1",
    idx2="nearest2",
    grad_xyz1="xyz1",
    grad_xyz2="xyz2",
)
def chamfer_distance_backward(
    xyz1: Tensor,
    xyz2: Tensor,
    idx1: Tensor,
    idx2: Tensor,
    grad_dist1: GradOutput,
    grad_dist2: GradOutput,
    grad_xyz1: Gradient,
    grad_xyz2: Gradient,
) -> None: ...


@serves(
    point_sets.squared_distances,
    "chamfer_2d.chamfer_2d.backward",
    idx1="nearest1",
    idx2="nearest2",
    gradxyz1="xyz1",
    gradxyz2="xyz2",
)
def chamfer_2d_backward(
    xyz1: Tensor,
    xyz2: Tensor,
    gradxyz1: Gradient,
    gradxyz2: Gradient,
    graddist1: GradOutput,
    graddist2: GradOutput,
    idx1: Tensor,
    idx2: Tensor,
) -> None: ...


@serves(ops.chamfer_distance, "mmcv._ext.chamfer_distance_forward", "chamfer_2d.chamfer_2d.forward")
def chamfer_distance_forward(
    xyz1: Tensor, xyz2: Tensor, dist1: Result, dist2: Result, idx1: Result, idx2: Result
) -> None: ...


@serves(
    ops.furthest_point_sample,
    "mmcv._ext.furthest_point_sampling_forward",
    points_tensor="points_xyz",
    m="num_points",
)
def furthest_point_sampling_forward(
    points_tensor: Tensor, temp_tensor: object, idx_tensor: Result, m: int
) -> None: ...


@serves(
    ops.furthest_point_sample_with_dist,
    "mmcv._ext.furthest_point_sampling_with_dist_forward",
    points_tensor="points_dist",
    m="num_points",
)
def furthest_point_sampling_with_dist_forward(
    points_tensor: Tensor, temp_tensor: object, idx_tensor: Result, m: int
) -> None: ...


@serves(
    ops.gather_points, "mmcv._ext.gather_points_backward", idx_tensor="indices", grad_points_tensor="features"
)
def gather_points_backward(
    grad_out_tensor: GradOutput, idx_tensor: Tensor, grad_points_tensor: Gradient
) -> None: ...


@serves(ops.gather_points, "mmcv._ext.gather_points_forward", points_tensor="features", idx_tensor="indices")
def gather_points_forward(points_tensor: Tensor, idx_tensor: Tensor, out_tensor: Result) -> None: ...


@serves(
    ops.group_points, "mmcv._ext.group_points_backward", idx_tensor="indices", grad_points_tensor="features"
)
def group_points_backward(
    grad_out_tensor: GradOutput, idx_tensor: Tensor, grad_points_tensor: Gradient
) -> None: ...


@serves(ops.group_points, "mmcv._ext.group_points_forward", points_tensor="features", idx_tensor="indices")
def group_points_forward(points_tensor: Tensor, idx_tensor: Tensor, out_tensor: Result) -> None: ...


@serves(ops.boxes_overlap_bev, "mmcv._ext.iou3d_boxes_overlap_bev_forward")
def iou3d_boxes_overlap_bev_forward(boxes_a: Tensor, boxes_b: Tensor, ans_overlap: Result) -> None: ...


@serves(own.nms3d, "mmcv._ext.iou3d_nms3d_forward")
def iou3d_nms3d_forward(
    boxes: Tensor, keep: FirstRows, num_out: Result, nms_overlap_thresh: float
) -> None: ...


@serves(own.nms3d_normal, "mmcv._ext.iou3d_nms3d_normal_forward")
def iou3d_nms3d_normal_forward(
    boxes: Tensor, keep: FirstRows, num_out: Result, nms_overlap_thresh: float
) -> None: ...


@serves(own.knn, "mmcv._ext.knn_forward", xyz_tensor="xyz", new_xyz_tensor="center_xyz", nsample="k")
def knn_forward(
    xyz_tensor: Tensor, new_xyz_tensor: Tensor, idx_tensor: Result, dist2_tensor: Result, nsample: int
) -> None: ...


@serves(
    ops.points_in_boxes_all,
    "mmcv._ext.points_in_boxes_all_forward",
    boxes_tensor="boxes",
    pts_tensor="points",
)
def points_in_boxes_all_forward(
    boxes_tensor: Tensor, pts_tensor: Tensor, box_idx_of_points_tensor: Result
) -> None: ...


@serves(
    own.points_of_boxes, "mmcv._ext.points_in_boxes_cpu_forward", boxes_tensor="boxes", pts_tensor="points"
)
def points_in_boxes_cpu_forward(
    boxes_tensor: Tensor, pts_tensor: Tensor, pts_indices_tensor: Result
) -> None: ...


@serves(
    ops.points_in_boxes_part,
    "mmcv._ext.points_in_boxes_part_forward",
    boxes_tensor="boxes",
    pts_tensor="points",
)
def points_in_boxes_part_forward(
    boxes_tensor: Tensor, pts_tensor: Tensor, box_idx_of_points_tensor: Result
) -> None: ...


@serves(ops.points_in_polygons, "mmcv._ext.points_in_polygons_forward")
def points_in_polygons_forward(points: Tensor, polygons: Tensor, output: Result) -> None: ...


@serves(own.roiaware_gradient, "mmcv._ext.roiaware_pool3d_backward", pool_method="mode")
def roiaware_pool3d_backward(
    pts_idx_of_voxels: Tensor, argmax: Tensor, grad_out: Tensor, grad_in: Result, pool_method: PoolMode
) -> None: ...


@serves(own.roiaware_pool3d, "mmcv._ext.roiaware_pool3d_forward", pool_method="mode")
def roiaware_pool3d_forward(
    rois: Tensor,
    pts: Tensor,
    pts_feature: Tensor,
    argmax: Result,
    pts_idx_of_voxels: Result,
    pooled_features: Result,
    pool_method: PoolMode,
) -> None: ...


@serves(own.roipoint_pool3d, "mmcv._ext.roipoint_pool3d_forward")
def roipoint_pool3d_forward(
    xyz: Tensor, boxes3d: Tensor, pts_feature: Tensor, pooled_features: Result, pooled_empty_flag: Result
) -> None: ...


@serves(
    ops.stack_ball_query,
    "mmcv._ext.stack_ball_query_forward",
    new_xyz_tensor="center_xyz",
    new_xyz_batch_cnt="center_xyz_batch_cnt",
    xyz_tensor="xyz",
    nsample="sample_num",
)
def stack_ball_query_forward(
    new_xyz_tensor: Tensor,
    new_xyz_batch_cnt: Tensor,
    xyz_tensor: Tensor,
    xyz_batch_cnt: Tensor,
    idx_tensor: Result,
    max_radius: float,
    nsample: int,
) -> None: ...


@serves(
    point_gathering.stack_group_gradient,
    "mmcv._ext.stack_group_points_backward",
    grad_out_tensor="grad_output",
    idx_tensor="indices",
    idx_batch_cnt_tensor="indices_batch_cnt",
    features_batch_cnt_tensor="features_batch_cnt",
    grad_features_tensor="features",
)
def stack_group_points_backward(
    grad_out_tensor: Tensor,
    idx_tensor: Tensor,
    idx_batch_cnt_tensor: Tensor,
    features_batch_cnt_tensor: Tensor,
    grad_features_tensor: Result,
) -> None: ...


@serves(
    ops.stack_group_points,
    "mmcv._ext.stack_group_points_forward",
    features_tensor="features",
    features_batch_cnt_tensor="features_batch_cnt",
    idx_tensor="indices",
    idx_batch_cnt_tensor="indices_batch_cnt",
)
def stack_group_points_forward(
    features_tensor: Tensor,
    features_batch_cnt_tensor: Tensor,
    idx_tensor: Tensor,
    idx_batch_cnt_tensor: Tensor,
    out_tensor: Result,
) -> None: ...


@serves(
    ops.three_interpolate,
    "mmcv._ext.three_interpolate_backward",
    idx_tensor="indices",
    weight_tensor="weight",
    grad_points_tensor="features",
)
def three_interpolate_backward(
    grad_out_tensor: GradOutput, idx_tensor: Tensor, weight_tensor: Tensor, grad_points_tensor: Gradient
) -> None: ...


@serves(
    ops.three_interpolate,
    "mmcv._ext.three_interpolate_forward",
    points_tensor="features",
    idx_tensor="indices",
    weight_tensor="weight",
)
def three_interpolate_forward(
    points_tensor: Tensor, idx_tensor: Tensor, weight_tensor: Tensor, out_tensor: Result
) -> None: ...


@serves(own.three_nn, "mmcv._ext.three_nn_forward", unknown_tensor="unknown", known_tensor="known")
def three_nn_forward(
    unknown_tensor: Tensor, known_tensor: Tensor, dist2_tensor: Result, idx_tensor: Result
) -> None: ...
