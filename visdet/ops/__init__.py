"""Operators, which are functions of tensors on CPU and CUDA. This package needs no other package than torch."""

from typing import TYPE_CHECKING, NoReturn

from ._library import NotBuiltError, build_info
from .batched_nms import batched_nms, register_nms
from .box_iou_rotated import box_iou_quadri, box_iou_rotated
from .box_key_points import box_key_points, box_key_points_reference
from .carafe import CARAFE, CARAFENaive, CARAFEPack, carafe, carafe_naive
from .cast_rays import cast_rays, render_rays
from .deform_conv2d import deform_conv2d
from .deform_roi_pool import (
    DeformRoIPool,
    DeformRoIPoolPack,
    ModulatedDeformRoIPoolPack,
    deform_roi_pool,
)
from .deformable_aggregation import (
    deformable_aggregation,
    deformable_aggregation_function,
    deformable_aggregation_reference,
    feature_maps_format,
)
from .deformable_aggregation_fused import deformable_aggregation_fused, deformable_aggregation_fused_reference
from .deformable_aggregation_with_depth import (
    deformable_aggregation_with_depth,
    deformable_aggregation_with_depth_reference,
)
from .explain import explain
from .focal_loss import SigmoidFocalLoss, SoftmaxFocalLoss, sigmoid_focal_loss, softmax_focal_loss
from .furthest_point_sample import furthest_point_sample, furthest_point_sample_with_dist
from .gaussian_field import gaussian_field, gaussian_field_reference
from .iou3d import boxes_iou3d, boxes_overlap_bev, nms3d, nms3d_normal
from .mahalanobis_distance import mahalanobis_distance, mahalanobis_distance_reference
from .mmcv.bbox_overlaps import bbox_overlaps
from .mmcv.corner_pool import CornerPool, corner_pool
from .mmcv.deform_conv_layers import (
    DeformConv2d,
    DeformConv2dPack,
    ModulatedDeformConv2d,
    ModulatedDeformConv2dPack,
)
from .mmcv.diff_iou_rotated import diff_iou_rotated_2d, diff_iou_rotated_3d
from .mmcv.local_aggregate import local_aggregate, local_aggregate_prob, local_aggregate_prob_sq
from .mmcv.masked_conv2d import MaskedConv2d, masked_conv2d
from .mmcv.point_gathering import (
    assign_score_withk,
    gather_points,
    group_points,
    stack_group_points,
    three_interpolate,
)
from .mmcv.point_sample import (
    SimpleRoIAlign,
    abs_img_point_to_rel_img_point,
    bilinear_grid_sample,
    denormalize,
    generate_grid,
    normalize,
    point_sample,
    rel_roi_point_to_abs_img_point,
    rel_roi_point_to_rel_img_point,
)
from .mmcv.point_sets import (
    chamfer_distance,
    convex_giou,
    convex_iou,
    min_area_polygons,
    points_in_polygons,
)
from .mmcv.points_in_boxes import points_in_boxes_all, points_in_boxes_part, roiaware_pool3d, roipoint_pool3d
from .mmcv.riroi_align_rotated import RiRoIAlignRotated, riroi_align_rotated
from .mmcv.rotated_features import active_rotated_filter, rotated_feature_align
from .mmcv.saconv import ConvAWS2d, SAConv2d
from .mmcv.sparse_conv import get_indice_pairs, indice_conv, indice_maxpool
from .mmcv.voxels import (
    bev_pool,
    bev_pool_v2,
    dynamic_scatter,
    dynamic_voxelize,
    hard_voxelize,
    voxel_pooling,
)
from .modulated_deform_conv2d import modulated_deform_conv2d
from .ms_deform_attn import ms_deform_attn, ms_deform_attn_reference
from .ms_deform_attn_fused import ms_deform_attn_fused, ms_deform_attn_fused_reference
from .nms import nms, nms_match
from .nms_rotated import nms_quadri, nms_rotated
from .point_neighbours import ball_query, knn, stack_ball_query, three_nn
from .roi_align import RoIAlign, roi_align
from .roi_align_rotated import RoIAlignRotated, roi_align_rotated
from .roi_pool import RoIPool, roi_pool
from .sample_dot import sample_dot, sample_dot_reference
from .sample_sum import sample_sum, sample_sum_reference
from .soft_nms import soft_nms

__all__ = [
    "CARAFE",
    "CARAFENaive",
    "CARAFEPack",
    "ConvAWS2d",
    "CornerPool",
    "DeformConv2d",
    "DeformConv2dPack",
    "DeformRoIPool",
    "DeformRoIPoolPack",
    "MaskedConv2d",
    "ModulatedDeformConv2d",
    "ModulatedDeformConv2dPack",
    "ModulatedDeformRoIPoolPack",
    "NotBuiltError",
    "RiRoIAlignRotated",
    "RoIAlign",
    "RoIAlignRotated",
    "RoIPool",
    "SAConv2d",
    "SigmoidFocalLoss",
    "SimpleRoIAlign",
    "SoftmaxFocalLoss",
    "abs_img_point_to_rel_img_point",
    "active_rotated_filter",
    "assign_score_withk",
    "ball_query",
    "batched_nms",
    "bbox_overlaps",
    "bev_pool",
    "bev_pool_v2",
    "bilinear_grid_sample",
    "box_iou_quadri",
    "box_iou_rotated",
    "box_key_points",
    "box_key_points_reference",
    "boxes_iou3d",
    "boxes_overlap_bev",
    "build_info",
    "carafe",
    "carafe_naive",
    "cast_rays",
    "chamfer_distance",
    "convex_giou",
    "convex_iou",
    "corner_pool",
    "deform_conv2d",
    "deform_roi_pool",
    "deformable_aggregation",
    "deformable_aggregation_function",
    "deformable_aggregation_fused",
    "deformable_aggregation_fused_reference",
    "deformable_aggregation_reference",
    "deformable_aggregation_with_depth",
    "deformable_aggregation_with_depth_reference",
    "denormalize",
    "diff_iou_rotated_2d",
    "diff_iou_rotated_3d",
    "dynamic_scatter",
    "dynamic_voxelize",
    "explain",
    "feature_maps_format",
    "furthest_point_sample",
    "furthest_point_sample_with_dist",
    "gather_points",
    "gaussian_field",
    "gaussian_field_reference",
    "generate_grid",
    "get_indice_pairs",
    "group_points",
    "hard_voxelize",
    "indice_conv",
    "indice_maxpool",
    "knn",
    "local_aggregate",
    "local_aggregate_prob",
    "local_aggregate_prob_sq",
    "mahalanobis_distance",
    "mahalanobis_distance_reference",
    "masked_conv2d",
    "min_area_polygons",
    "modulated_deform_conv2d",
    "ms_deform_attn",
    "ms_deform_attn_fused",
    "ms_deform_attn_fused_reference",
    "ms_deform_attn_reference",
    "nms",
    "nms3d",
    "nms3d_normal",
    "nms_match",
    "nms_quadri",
    "nms_rotated",
    "normalize",
    "point_sample",
    "points_in_boxes_all",
    "points_in_boxes_part",
    "points_in_polygons",
    "register_nms",
    "rel_roi_point_to_abs_img_point",
    "rel_roi_point_to_rel_img_point",
    "render_rays",
    "riroi_align_rotated",
    "roi_align",
    "roi_align_rotated",
    "roi_pool",
    "roiaware_pool3d",
    "roipoint_pool3d",
    "rotated_feature_align",
    "sample_dot",
    "sample_dot_reference",
    "sample_sum",
    "sample_sum_reference",
    "sigmoid_focal_loss",
    "soft_nms",
    "softmax_focal_loss",
    "stack_ball_query",
    "stack_group_points",
    "three_interpolate",
    "three_nn",
    "voxel_pooling",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> NoReturn:
        try:
            from visdet.near_names import unknown_attribute
        except ImportError:  # A kernel of Hugging Face's package has this folder alone.
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
        raise unknown_attribute(__name__, name, __all__)
