"""The functions of ``mmcv._ext``, under mmcv's names and with mmcv's arguments.

Like mmcv's compiled functions, they write into the tensors that mmcv's wrappers allocate. Any other name is that of a
function that raises a NotImplementedError when it is called, because ``mmcv.ops`` looks up all its functions at its
import.
"""

from visdet import ops
from visdet.ops.mmcv import (
    aligned_pooling,
    label_growth,
    map_correlation,
    point_gathering,
    point_sets,
    sparse_conv,
    voxels,
)
from visdet.ops.mmcv.diff_iou_rotated import sorted_vertices
from visdet.ops.mmcv.filtered_activations import ACTIVATIONS, upfirdn2d
from visdet.ops.roi_pool import roi_pool_with_argmax

from . import _mmcv_activations as activations
from . import _mmcv_functions as own
from ._deferred import deferred
from ._entries import functions_of
from .msda_ext import get_compiler_version, ms_deform_attn_forward
from .msda_ext import get_cuda_version as get_compiling_cuda_version

_SIZE = "pooled_height,pooled_width:output_size spatial_scale"
_ALIGNED = "aligned_height,aligned_width:output_size spatial_scale sampling_ratio"
_ROTATED = f"{_SIZE} sampling_ratio aligned clockwise"
_ORIENTED = "pooled_height,pooled_width:out_size spatial_scale num_samples num_orientations clockwise"
_CARAFE = "kernel_size group_size scale_factor"
DEFORM = (
    "kW kH dW|dH:stride padW|padH:padding dilationW|dilationH:dilation group:groups "
    "deformable_group:deform_groups"
)
MODULATED = (
    "stride_h,stride_w:stride pad_h,pad_w:padding dilation_h,dilation_w:dilation group:groups "
    "deformable_group:deform_groups with_bias"
)
_CORRELATION = (
    "kH,kW:kernel_size patchH,patchW:patch_size padH,padW:padding dilationH,dilationW:dilation "
    "dilation_patchH,dilation_patchW:dilation_patch dH,dW:stride"
)
_LEVELS = "value shapes:spatial_shapes starts:level_start_index locations:sampling_loc weights:attn_weight"
_PAIRS = "batch_size out_shape spatial_shape ksize stride padding dilation out_padding subm transpose"
_PAIRED = "indicePairs:indice_pairs indiceNum:indice_pair_num"
_CONV = f"{_PAIRED} numActOut:num_activate_out _inverse:inverse _subM"
_ACTS = "act=" + "/".join(["", *ACTIVATIONS])  # counted from 1
_PSA = "psa_type=collect/distribute h_mask,w_mask:mask_size"

_FUNCTIONS = functions_of(
    "mmcv._ext",
    {
        "active_rotated_filter_backward": (ops.active_rotated_filter, "<grad_out indices input>grad_in"),
        "active_rotated_filter_forward": (ops.active_rotated_filter, "input indices >output"),
        "assign_score_withk_backward": (
            ops.assign_score_withk,
            "<grad_out points:point_features centers:center_features scores knn_idx point_features>grad_points "
            "center_features>grad_centers scores>grad_scores",
        ),
        "assign_score_withk_forward": (
            ops.assign_score_withk,
            "points:point_features centers:center_features scores knn_idx >output",
        ),
        "ball_query_forward": (
            ops.ball_query,
            "new_xyz_tensor:center_xyz xyz_tensor:xyz >idx_tensor min_radius max_radius nsample:sample_num",
        ),
        "bbox_overlaps": (ops.bbox_overlaps, "bboxes1 bboxes2 >ious mode=iou/iof aligned offset"),
        "bezier_align_backward": (
            aligned_pooling.bezier_align,
            f"<grad_output rois:beziers input>grad_input {_ALIGNED} aligned",
        ),
        "bezier_align_forward": (
            aligned_pooling.bezier_align,
            f"input rois:beziers >output {_ALIGNED} aligned",
        ),
        "bias_act": (activations.bias_act, f"input bias xref yref dy grad dim {_ACTS} alpha gain clamp"),
        "border_align_backward": (
            aligned_pooling.border_samples,
            "<grad_output boxes argmax_idx:argmax input>grad_input pool_size",
        ),
        "border_align_forward": (
            aligned_pooling.border_samples,
            "input boxes >output >argmax_idx pool_size",
        ),
        "box_iou_quadri": (own.box_iou_quadri, "boxes1 boxes2 >ious mode_flag:mode=iou/iof aligned"),
        "box_iou_rotated": (own.box_iou_rotated, "boxes1 boxes2 >ious mode_flag:mode=iou/iof aligned"),
        "carafe_backward": (
            ops.carafe,
            "<grad_output rfeatures:features masks rgrad_output rgrad_input_hs rgrad_input rgrad_masks "
            f"features>grad_input masks>grad_masks {_CARAFE}",
        ),
        "carafe_forward": (
            own.carafe,
            f"features masks >rfeatures routput rmasks >output {_CARAFE}",
        ),
        "carafe_naive_backward": (
            ops.carafe,
            f"<grad_output features masks features>grad_input masks>grad_masks {_CARAFE}",
        ),
        "carafe_naive_forward": (ops.carafe, f"features masks >output {_CARAFE}"),
        "chamfer_distance_backward": (
            point_sets.squared_distances,
            "xyz1 xyz2 idx1:nearest1 idx2:nearest2 <grad_dist1 <grad_dist2 xyz1>grad_xyz1 xyz2>grad_xyz2",
        ),
        "chamfer_distance_forward": (ops.chamfer_distance, "xyz1 xyz2 >dist1 >dist2 >idx1 >idx2"),
        "contour_expand": (
            label_growth.contour_expand,
            "kernel_mask internal_kernel_label min_kernel_area kernel_num",
        ),
        "convex_giou": (own.convex_giou, "pointsets polygons >output"),
        "convex_iou": (ops.convex_iou, "pointsets polygons >ious"),
        "correlation_backward": (
            map_correlation.correlation,
            f"<grad_output input1 input2 input1>grad_input1 input2>grad_input2 {_CORRELATION}",
        ),
        "correlation_forward": (map_correlation.correlation, f"input1 input2 >output {_CORRELATION}"),
        "deform_conv_backward_input": (
            ops.deform_conv2d,
            f"input offset <grad_output input>grad_input offset>grad_offset weight columns {DEFORM}",
        ),
        "deform_conv_backward_parameters": (
            own.scaled_deform_conv,
            f"input offset <grad_output weight>grad_weight columns ones {DEFORM} scale",
        ),
        "deform_conv_forward": (ops.deform_conv2d, f"input weight offset >output columns ones {DEFORM}"),
        "deform_roi_pool_backward": (
            ops.deform_roi_pool,
            "<grad_output input rois offset input>grad_input offset>grad_offset "
            f"{_SIZE} sampling_ratio gamma",
        ),
        "deform_roi_pool_forward": (
            ops.deform_roi_pool,
            f"input rois offset >output {_SIZE} sampling_ratio gamma",
        ),
        "diff_iou_rotated_sort_vertices_forward": (sorted_vertices, "vertices mask num_valid"),
        "dynamic_point_to_voxel_backward": (
            own.voxels_gradient,
            ">grad_feats grad_reduced_feats feats reduced_feats coors_idx reduce_count reduce_type",
        ),
        "dynamic_point_to_voxel_forward": (voxels.scatter_to_voxels, "feats coors reduce_type"),
        "dynamic_voxelize_forward": (ops.dynamic_voxelize, "points voxel_size coors_range >coors NDim?:ndim"),
        "filtered_lrelu": (
            activations.filtered_lrelu,
            "x fu fd b si up down px0 px1 py0 py1 sx sy gain slope clamp flip_filters writeSigns",
        ),
        "filtered_lrelu_act_": (
            activations.filtered_lrelu_act_,
            "x si sx sy gain slope clamp writeSigns",
        ),
        "furthest_point_sampling_forward": (
            ops.furthest_point_sample,
            "points_tensor:points_xyz temp_tensor >idx_tensor m:num_points",
        ),
        "furthest_point_sampling_with_dist_forward": (
            ops.furthest_point_sample_with_dist,
            "points_tensor:points_dist temp_tensor >idx_tensor m:num_points",
        ),
        "fused_bias_leakyrelu": (
            activations.fused_bias_leakyrelu,
            "input bias refer act=/linear/relu/lrelu grad alpha scale",
        ),
        "fused_indice_conv_forward": (own.biased_indice_conv, f"features filters bias {_CONV}"),
        "gather_points_backward": (
            ops.gather_points,
            "<grad_out_tensor idx_tensor:indices features>grad_points_tensor",
        ),
        "gather_points_forward": (
            ops.gather_points,
            "points_tensor:features idx_tensor:indices >out_tensor",
        ),
        "get_compiler_version": (get_compiler_version, ""),
        "get_compiling_cuda_version": (get_compiling_cuda_version, ""),
        "get_indice_pairs_2d_backward": (ops.get_indice_pairs, f"indices grid {_PAIRS}"),
        "get_indice_pairs_2d_forward": (ops.get_indice_pairs, f"indices {_PAIRS}"),
        "get_indice_pairs_3d_backward": (ops.get_indice_pairs, f"indices grid {_PAIRS}"),
        "get_indice_pairs_3d_forward": (ops.get_indice_pairs, f"indices {_PAIRS}"),
        "get_indice_pairs_4d_forward": (ops.get_indice_pairs, f"indices {_PAIRS}"),
        "group_points_backward": (
            ops.group_points,
            "<grad_out_tensor idx_tensor:indices features>grad_points_tensor",
        ),
        "group_points_forward": (ops.group_points, "points_tensor:features idx_tensor:indices >out_tensor"),
        "hard_voxelize_forward": (
            own.hard_voxelize,
            "points voxel_size coors_range ~voxels ~coors ~num_points_per_voxel >voxel_num max_points "
            "max_voxels NDim? deterministic?",
        ),
        "indice_conv_backward": (
            sparse_conv.indice_conv_gradients,
            f"features filters outGrad:grad_output {_PAIRED} _inverse:inverse _subM",
        ),
        "indice_conv_forward": (ops.indice_conv, f"features filters {_CONV}"),
        "indice_maxpool_backward": (
            sparse_conv.indice_maxpool_gradient,
            f"features outFeatures:output outGrad:grad_output {_PAIRED}",
        ),
        "indice_maxpool_forward": (ops.indice_maxpool, f"features {_PAIRED} numAct:num_activate_out"),
        "iou3d_boxes_overlap_bev_forward": (ops.boxes_overlap_bev, "boxes_a boxes_b >ans_overlap"),
        "iou3d_nms3d_forward": (own.nms3d, "boxes ~keep >num_out nms_overlap_thresh"),
        "iou3d_nms3d_normal_forward": (own.nms3d_normal, "boxes ~keep >num_out nms_overlap_thresh"),
        "knn_forward": (
            own.knn,
            "xyz_tensor:xyz new_xyz_tensor:center_xyz >idx_tensor >dist2_tensor nsample:k",
        ),
        "masked_col2im_forward": (
            own.masked_col2im,
            "col mask_h_idx mask_w_idx >output:output height width channels",
        ),
        "masked_im2col_forward": (
            own.masked_im2col,
            "features mask_h_idx mask_w_idx >data_col kernel_h kernel_w pad_h pad_w",
        ),
        "min_area_polygons": (ops.min_area_polygons, "pointsets >polygons"),
        "modulated_deform_conv_backward": (
            own.modulated_deform_conv,
            "input weight bias ones offset mask columns input>grad_input weight>grad_weight bias>grad_bias "
            f"offset>grad_offset mask>grad_mask <grad_output:output {MODULATED}",
        ),
        "modulated_deform_conv_forward": (
            own.modulated_deform_conv,
            f"input weight bias ones offset mask >output columns {MODULATED}",
        ),
        "ms_deform_attn_backward": (
            ms_deform_attn_forward,
            f"{_LEVELS} <grad_output value>grad_value sampling_loc>grad_locations attn_weight>grad_weights "
            "im2col_step",
        ),
        "ms_deform_attn_forward": (ms_deform_attn_forward, f"{_LEVELS} im2col_step"),
        "nms": (own.nms, "boxes scores iou_threshold offset"),
        "nms_match": (own.nms_match, "dets iou_threshold"),
        "nms_quadri": (own.nms_quadri, "dets scores order dets_sorted iou_threshold multi_label"),
        "nms_rotated": (own.nms_rotated, "dets scores order dets_sorted labels iou_threshold multi_label"),
        "pixel_group": (
            label_growth.pixel_group,
            "score mask embedding kernel_label kernel_contour kernel_region_num distance_threshold",
        ),
        "points_in_boxes_all_forward": (
            ops.points_in_boxes_all,
            "boxes_tensor:boxes pts_tensor:points >box_idx_of_points_tensor",
        ),
        "points_in_boxes_cpu_forward": (
            own.points_of_boxes,
            "boxes_tensor:boxes pts_tensor:points >pts_indices_tensor",
        ),
        "points_in_boxes_part_forward": (
            ops.points_in_boxes_part,
            "boxes_tensor:boxes pts_tensor:points >box_idx_of_points_tensor",
        ),
        "points_in_polygons_forward": (ops.points_in_polygons, "points polygons >output"),
        "prroi_pool_backward": (
            aligned_pooling.prroi_pool,
            f"<grad_output rois features>grad_input {_SIZE}",
        ),
        "prroi_pool_coor_backward": (
            aligned_pooling.prroi_pool,
            f"output <grad_output input:features rois rois>grad_rois {_SIZE}",
        ),
        "prroi_pool_forward": (aligned_pooling.prroi_pool, f"input:features rois >output {_SIZE}"),
        "psamask_backward": (map_correlation.psa_mask, f"<grad_output input>grad_input {_PSA}"),
        "psamask_forward": (map_correlation.psa_mask, f"input >output {_PSA}"),
        "riroi_align_rotated_backward": (
            ops.riroi_align_rotated,
            f"<grad_output rois features>grad_input {_ORIENTED}",
        ),
        "riroi_align_rotated_forward": (
            ops.riroi_align_rotated,
            f"features rois >output {_ORIENTED}",
        ),
        "roi_align_backward": (
            own.roi_align_again,
            f"<grad_output rois argmax_y argmax_x input>grad_input {_ALIGNED} pool_mode=max/avg aligned",
        ),
        "roi_align_forward": (
            own.roi_align,
            f"input rois >output argmax_y argmax_x {_ALIGNED} pool_mode=max/avg aligned",
        ),
        "roi_align_rotated_backward": (
            ops.roi_align_rotated,
            f"<grad_output rois input>grad_input {_ROTATED}",
        ),
        "roi_align_rotated_forward": (ops.roi_align_rotated, f"input rois >output {_ROTATED}"),
        "roi_pool_backward": (own.roi_pool_gradient, f"grad_output rois argmax >grad_input {_SIZE}"),
        "roi_pool_forward": (roi_pool_with_argmax, f"input rois >output >argmax {_SIZE}"),
        "roiaware_pool3d_backward": (
            own.roiaware_gradient,
            "pts_idx_of_voxels argmax grad_out >grad_in pool_method:mode=max/avg",
        ),
        "roiaware_pool3d_forward": (
            own.roiaware_pool3d,
            "rois pts pts_feature >argmax >pts_idx_of_voxels >pooled_features pool_method:mode=max/avg",
        ),
        "roipoint_pool3d_forward": (
            own.roipoint_pool3d,
            "xyz boxes3d pts_feature >pooled_features >pooled_empty_flag",
        ),
        "rotated_feature_align_backward": (
            own.rotated_feature_align,
            "<grad_output best_bboxes features>grad_input spatial_scale points",
        ),
        "rotated_feature_align_forward": (
            own.rotated_feature_align,
            "features best_bboxes >output spatial_scale points",
        ),
        "sigmoid_focal_loss_backward": (
            own.sigmoid_focal_loss,
            "input target weight input>grad_input gamma alpha",
        ),
        "sigmoid_focal_loss_forward": (own.sigmoid_focal_loss, "input target weight >output gamma alpha"),
        "softmax_focal_loss_backward": (
            own.softmax_focal_loss,
            "softmax target weight buff shift>grad_input gamma alpha",
        ),
        "softmax_focal_loss_forward": (own.softmax_focal_loss, "softmax target weight >output gamma alpha"),
        "softnms": (
            ops.soft_nms,
            "boxes scores ~dets iou_threshold sigma min_score method=naive/linear/gaussian offset",
        ),
        "stack_ball_query_forward": (
            ops.stack_ball_query,
            "new_xyz_tensor:center_xyz new_xyz_batch_cnt:center_xyz_batch_cnt xyz_tensor:xyz xyz_batch_cnt "
            ">idx_tensor max_radius nsample:sample_num",
        ),
        "stack_group_points_backward": (
            point_gathering.stack_group_gradient,
            "grad_out_tensor:grad_output idx_tensor:indices idx_batch_cnt_tensor:indices_batch_cnt "
            "features_batch_cnt_tensor:features_batch_cnt >grad_features_tensor:features",
        ),
        "stack_group_points_forward": (
            ops.stack_group_points,
            "features_tensor:features features_batch_cnt_tensor:features_batch_cnt idx_tensor:indices "
            "idx_batch_cnt_tensor:indices_batch_cnt >out_tensor",
        ),
        "sync_bn_backward_data": (
            activations.sync_bn_backward_data,
            "grad_output weight grad_weight grad_bias norm std >grad_input",
        ),
        "sync_bn_backward_param": (
            activations.sync_bn_backward_param,
            "grad_output norm >grad_weight >grad_bias",
        ),
        "sync_bn_forward_mean": (activations.sync_bn_forward_mean, "input >mean"),
        "sync_bn_forward_output": (
            activations.sync_bn_forward_output,
            "input mean var weight bias >running_mean:running_mean >running_var >norm >std >output eps momentum "
            "group_size",
        ),
        "sync_bn_forward_var": (activations.sync_bn_forward_var, "input mean >var"),
        "three_interpolate_backward": (
            ops.three_interpolate,
            "<grad_out_tensor idx_tensor:indices weight_tensor:weight features>grad_points_tensor",
        ),
        "three_interpolate_forward": (
            ops.three_interpolate,
            "points_tensor:features idx_tensor:indices weight_tensor:weight >out_tensor",
        ),
        "three_nn_forward": (
            own.three_nn,
            "unknown_tensor:unknown known_tensor:known >dist2_tensor >idx_tensor",
        ),
        "tin_shift_backward": (own.tin_shift_back, "grad_output shift >grad_input"),
        "tin_shift_forward": (map_correlation.tin_shift, "input shift >output"),
        "upfirdn2d": (
            upfirdn2d,
            "input filter upx,upy:up downx,downy:down padx0,padx1,pady0,pady1:padding flip:flip_filter gain",
        ),
    },
)
globals().update(_FUNCTIONS)
__all__ = list(_FUNCTIONS)

__getattr__ = deferred("mmcv._ext")
