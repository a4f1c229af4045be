"""The functions of extensions for points, boxes and cameras, by the name of the extension.

They are those of ``mmdet3d.ops`` up to mmdet3d 0.18 (``…_ext`` and ``iou3d_cuda``), of ``pcdet.ops`` (``…_cuda``), of
``pointnet2_ops._ext``, ``chamfer`` (SurroundOcc) and ``_msmv_sampling_cuda`` (SparseBEV, SparseOcc).
``visdet.compat.extensions`` makes them importable, also within a package. A name that an extension has and this module
has not is that of a function that raises a NotImplementedError.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from visdet import ops
from visdet.ops.mmcv import point_gathering, point_sets, sparse_conv

from . import _mmcv_functions as own
from ._entries import functions_of, gradients_of

__all__ = ["FUNCTIONS"]

_Rows = dict[str, Any]  # rows of ``_entries``, or functions


# Boxes. visdet's are (x, y, z, dx, dy, dz, heading), with z at the bottom where points are looked for in them.
def _from_corners(boxes: Tensor) -> Tensor:
    """Return boxes of mmdet3d's (x1, y1, x2, y2, angle towards -y) as visdet's."""
    center, sides = (boxes[:, :2] + boxes[:, 2:4]) / 2, boxes[:, 2:4] - boxes[:, :2]
    zeros = boxes.new_zeros(len(boxes), 1)
    return torch.cat([center, zeros, sides, zeros + 1, -boxes[:, 4:5]], 1)


def _from_lidar(boxes: Tensor) -> Tensor:
    """Return boxes of mmdet3d's (x, y, z, w, l, h, angle of -y towards -x) as visdet's."""
    turned = -(boxes[..., 6:] + math.pi / 2)
    return torch.cat([boxes[..., :3], boxes[..., [4, 3, 5]], turned], -1)


def _from_center(boxes: Tensor) -> Tensor:
    """Return boxes of OpenPCDet, whose z is that of the center, as visdet's."""
    return torch.cat([boxes[..., :2], boxes[..., 2:3] - boxes[..., 5:6] / 2, boxes[..., 3:]], -1)


def _iou_bev(boxes_a: Tensor, boxes_b: Tensor) -> Tensor:
    overlap = ops.boxes_overlap_bev(boxes_a, boxes_b)
    areas = [boxes[:, 3] * boxes[:, 4] for boxes in (boxes_a, boxes_b)]
    return overlap / (areas[0][:, None] + areas[1] - overlap).clamp(min=1e-8)


def _paired_overlap(boxes_a: Tensor, boxes_b: Tensor) -> Tensor:
    """Return the areas [N, 1] that the boxes of each pair share. Both have the same sum of areas and ratio."""
    columns = [0, 1, 3, 4, 6]
    iou = ops.box_iou_rotated(boxes_a[:, columns], boxes_b[:, columns], aligned=True)
    areas = boxes_a[:, 3] * boxes_a[:, 4] + boxes_b[:, 3] * boxes_b[:, 4]
    return (iou * areas / (1 + iou))[:, None]


def _given(of: Callable[[Tensor], Tensor], operator: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operator that gets the boxes which ``of`` turns into visdet's."""

    @functools.wraps(operator)
    def run(**named: Any) -> Any:
        boxes = {"boxes", "boxes_a", "boxes_b", "boxes3d", "rois"} & named.keys()
        return operator(**named | {name: of(named[name]) for name in boxes})

    return run


def _boxes_iou3d(of: Callable[[Tensor], Tensor]) -> _Rows:
    iou = (_given(of, _iou_bev), "boxes_a boxes_b >ans_iou")
    suppressed = "boxes ~keep thresh:nms_overlap_thresh device_id?"
    return {
        "boxes_overlap_bev_gpu": (_given(of, ops.boxes_overlap_bev), "boxes_a boxes_b >ans_overlap"),
        "boxes_iou_bev_gpu": iou,
        "boxes_iou_bev_cpu": iou,
        "nms_gpu": (_given(of, own.nms3d), suppressed),
        "nms_normal_gpu": (_given(of, own.nms3d_normal), suppressed),
    }


def _points_in(of: Callable[[Tensor], Tensor]) -> _Rows:
    return {
        "forward": (
            _given(of, own.roiaware_pool3d),
            "rois pts pts_feature >argmax >pts_idx_of_voxels >pooled_features pool_method:mode=max/avg",
        ),
        "backward": (
            own.roiaware_gradient,
            "pts_idx_of_voxels argmax grad_out >grad_in pool_method:mode=max/avg",
        ),
        "points_in_boxes_batch": (_given(of, ops.points_in_boxes_all), "boxes points >box_idx_of_points"),
        "points_in_boxes_cpu": (_given(of, own.points_of_boxes), "boxes points >pts_indices"),
        "points_in_boxes_gpu": (_given(of, ops.points_in_boxes_part), "boxes points >box_idx_of_points"),
    }


# Points
_ball_query = functools.partial(ops.ball_query, 0)  # from the radius 0


def _sample_stacked(points: Tensor, counts: Tensor, sampled: Tensor) -> Tensor:
    """Return the indices, among all points, of the points that are sampled of each cloud."""
    starts = (counts.cumsum(0) - counts).tolist()
    found = [
        ops.furthest_point_sample(cloud[None], count)[0] + start
        for cloud, count, start in zip(points.split(counts.tolist()), sampled.tolist(), starts, strict=True)
    ]
    return torch.cat(found)


def _three_of_stacked(
    unknown: Tensor, unknown_counts: Tensor, known: Tensor, known_counts: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the squared distances of the three nearest points in the same cloud, and their indices among all."""
    starts = (known_counts.cumsum(0) - known_counts).tolist()
    clouds = zip(
        unknown.split(unknown_counts.tolist()), known.split(known_counts.tolist()), starts, strict=True
    )
    found = [(own.three_nn(one[None], other[None]), start) for one, other, start in clouds]
    return torch.cat([pair[0][0] for pair, _ in found]), torch.cat(
        [pair[1][0] + start for pair, start in found]
    )


def _interpolate_stacked(features: Tensor, idx: Tensor, weight: Tensor) -> Tensor:
    return (features[idx.long()] * weight[..., None]).sum(1)


def _gradient(operator: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function of the gradient of an operator that is linear in its features, which it is not given."""

    def gradient(grad: Tensor, index: Tensor, *weight_and_count: Any) -> Tensor:
        *weight, count = weight_and_count
        zeros = grad.new_zeros(*grad.shape[:2], count)
        of_features = functools.partial(
            operator, indices=index, **dict(zip(["weight"], weight, strict=False))
        )
        return gradients_of("pointnet2_ops._ext", of_features, [zeros], [grad])[0]

    return gradient


def _chamfer(xyz1: Tensor, xyz2: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (index1, distance1), (index2, distance2) = ops.knn(1, xyz2, xyz1), ops.knn(1, xyz1, xyz2)
    return distance1[..., 0], distance2[..., 0], index1[..., 0], index2[..., 0]


def _sample_views(
    feat_c2: Tensor,
    feat_c3: Tensor,
    feat_c4: Tensor,
    feat_c5: Tensor,
    sampling_loc: Tensor,
    attn_weight: Tensor,
    feat_c6: Tensor | None = None,
) -> Tensor:
    """Return the weighted sums [B, Q, C, P] over levels of the samples of each point in the view that it names.

    The maps [B, V, H, W, C] are sampled at (x, y) in 0..1, from the center of the first pixel to that of the last, and
    pixels beside a map are 0. Each map gets a border of zeros, and each view of each level is a camera of
    ``visdet.ops.deformable_aggregation``, which leaves out the cameras that a point is not in.
    """
    features = [feat_c2, feat_c3, feat_c4, feat_c5, *([] if feat_c6 is None else [feat_c6])]
    (B, Q, P, _), V = sampling_loc.shape, features[0].shape[1]
    maps = [torch.nn.functional.pad(one, (0, 0, 1, 1, 1, 1)) for one in features]
    sizes = torch.tensor(
        [one.shape[2:4] for one in maps], device=sampling_loc.device
    )  # [L, 2] (height, width)
    shapes = sizes.repeat_interleave(V, 0)
    starts = shapes.prod(1).cumsum(0) - shapes.prod(1)
    widths = sizes.flip(1).to(sampling_loc.dtype)
    at = (sampling_loc[..., None, :2] * (widths - 3) + 1.5) / widths  # [B, Q, P, L, 2]
    view = (sampling_loc[..., 2] * (V - 1)).round()
    is_in = view[..., None] == torch.arange(V, device=view.device)  # [B, Q, P, V]
    locations = torch.where(is_in[..., None, :, None], at[..., None, :], -1.0).view(B, Q * P, 1, -1, 2)
    weights = attn_weight[..., None].expand(*attn_weight.shape, V).reshape(B, Q * P, 1, -1, 1, 1)
    values = torch.cat([one.flatten(1, 3) for one in maps], 1)
    summed = ops.deformable_aggregation(values, shapes[:, None], starts[:, None], locations, weights)
    return summed.unflatten(1, (Q, P)).transpose(2, 3).contiguous()


_PAIRS = "batch_size out_shape spatial_shape ksize stride padding dilation out_padding subm transpose"
_CONV = "indice_pairs indice_pair_num num_activate_out inverse subm"
_ASSIGN = "b n m count k dim aggregate"
_MAPS = ("feat_c2 feat_c3 feat_c4 feat_c5", "feat_c2 feat_c3 feat_c4 feat_c5 feat_c6")
_AT = "sampling_loc attn_weight"

_GATHER: _Rows = {
    "gather_points_wrapper": (ops.gather_points, "b c n m features indices >out"),
    "gather_points_grad_wrapper": (ops.gather_points, "b c n m <grad index:indices features>points"),
}
_SAMPLE: tuple[Callable[..., Any], str] = (ops.furthest_point_sample, "b n num_points points_xyz temp >idx")
_GROUP: _Rows = {
    "group_points_wrapper": (ops.group_points, "b c n m nsample features indices >out"),
    "group_points_grad_wrapper": (ops.group_points, "b c n m nsample <grad index:indices features>points"),
}
_INTERPOLATE: _Rows = {
    "three_nn_wrapper": (own.three_nn, "b n m unknown known >dist2 >idx"),
    "three_interpolate_wrapper": (ops.three_interpolate, "b c m n features indices weight >out"),
    "three_interpolate_grad_wrapper": (
        ops.three_interpolate,
        "b c n m <grad index:indices weight features>points",
    ),
}
_SPARSE: _Rows = {
    "get_indice_pairs_2d": (ops.get_indice_pairs, f"indices {_PAIRS}"),
    "get_indice_pairs_3d": (ops.get_indice_pairs, f"indices {_PAIRS}"),
    "get_indice_pairs_4d": (ops.get_indice_pairs, f"indices {_PAIRS}"),
    "get_indice_pairs_grid_2d": (ops.get_indice_pairs, f"indices grid {_PAIRS}"),
    "get_indice_pairs_grid_3d": (ops.get_indice_pairs, f"indices grid {_PAIRS}"),
}
for _type in ("fp32", "half"):
    _SPARSE |= {
        f"indice_conv_{_type}": (ops.indice_conv, f"features filters {_CONV}"),
        f"indice_conv_backward_{_type}": (
            sparse_conv.indice_conv_gradients,
            "features filters grad_output indice_pairs indice_pair_num inverse subm",
        ),
        f"fused_indice_conv_{_type}": (own.biased_indice_conv, f"features filters bias {_CONV}"),
        f"indice_maxpool_{_type}": (
            ops.indice_maxpool,
            "features indice_pairs indice_pair_num num_activate_out",
        ),
        f"indice_maxpool_backward_{_type}": (
            sparse_conv.indice_maxpool_gradient,
            "features output grad_output indice_pairs indice_pair_num",
        ),
    }
_PAIRED = (_paired_overlap, "boxes_a boxes_b >ans_overlap")

_ROWS: dict[str, _Rows] = {
    # mmdet3d
    "assign_score_withk_ext": {
        "assign_score_withk_forward_wrapper": (
            ops.assign_score_withk,
            f"{_ASSIGN} point_features center_features scores knn_idx >output",
        ),
        "assign_score_withk_backward_wrapper": (
            ops.assign_score_withk,
            f"{_ASSIGN} <grad_out point_features center_features scores knn_idx point_features>grad_points "
            "center_features>grad_centers scores>grad_scores",
        ),
    },
    "ball_query_ext": {
        "ball_query_wrapper": (ops.ball_query, "b n m min_radius max_radius sample_num center_xyz xyz >idx")
    },
    "furthest_point_sample_ext": {
        "furthest_point_sampling_wrapper": _SAMPLE,
        "furthest_point_sampling_with_dist_wrapper": (
            ops.furthest_point_sample_with_dist,
            "b n num_points points_dist temp >idx",
        ),
    },
    "gather_points_ext": _GATHER,
    "group_points_ext": {
        "forward": _GROUP["group_points_wrapper"],
        "backward": _GROUP["group_points_grad_wrapper"],
    },
    "interpolate_ext": _INTERPOLATE,
    "iou3d_cuda": _boxes_iou3d(_from_corners),
    "knn_ext": {"knn_wrapper": (own.knn, "b n m k xyz center_xyz >idx >dist2")},
    "roiaware_pool3d_ext": _points_in(_from_lidar),
    "sparse_conv_ext": _SPARSE,
    # OpenPCDet
    "iou3d_nms_cuda": _boxes_iou3d(lambda boxes: boxes)
    | {"boxes_aligned_overlap_bev_gpu": _PAIRED, "paired_boxes_overlap_bev_gpu": _PAIRED},
    "pointnet2_batch_cuda": _GATHER
    | _GROUP
    | _INTERPOLATE
    | {
        "ball_query_wrapper": (_ball_query, "b n m max_radius sample_num center_xyz xyz >idx"),
        "farthest_point_sampling_wrapper": _SAMPLE,
    },
    "pointnet2_stack_cuda": {
        "ball_query_wrapper": (
            ops.stack_ball_query,
            "b m max_radius sample_num center_xyz center_xyz_batch_cnt xyz xyz_batch_cnt >idx",
        ),
        "farthest_point_sampling_wrapper": _SAMPLE,
        "stack_farthest_point_sampling_wrapper": (_sample_stacked, "points temp counts >idx sampled"),
        "group_points_wrapper": (
            ops.stack_group_points,
            "b m c nsample features features_batch_cnt indices indices_batch_cnt >out",
        ),
        "group_points_grad_wrapper": (
            point_gathering.stack_group_gradient,
            "b m c n nsample grad_output indices indices_batch_cnt features_batch_cnt >features",
        ),
        "three_nn_wrapper": (
            _three_of_stacked,
            "unknown unknown_counts known known_counts >dist2 >idx",
        ),
        "three_interpolate_wrapper": (_interpolate_stacked, "features idx weight >out"),
        "three_interpolate_grad_wrapper": (
            _interpolate_stacked,
            "<grad_out idx weight features>grad_features",
        ),
    },
    "roiaware_pool3d_cuda": _points_in(_from_center),
    "roipoint_pool3d_cuda": {
        "forward": (
            _given(_from_center, own.roipoint_pool3d),
            "xyz boxes3d pts_feature >pooled_features >pooled_empty_flag",
        )
    },
    # Others
    "pointnet2_ops._ext": {
        "ball_query": (_ball_query, "center_xyz xyz max_radius sample_num"),
        "furthest_point_sampling": (ops.furthest_point_sample, "points_xyz num_points"),
        "gather_points": (ops.gather_points, "features indices"),
        "gather_points_grad": _gradient(ops.gather_points),
        "group_points": (ops.group_points, "features indices"),
        "group_points_grad": _gradient(ops.group_points),
        "three_interpolate": (ops.three_interpolate, "features indices weight"),
        "three_interpolate_grad": _gradient(ops.three_interpolate),
        "three_nn": (own.three_nn, "unknown known"),
    },
    "chamfer": {
        "forward": (_chamfer, "xyz1 xyz2"),
        "backward": (
            point_sets.squared_distances,
            "xyz1 xyz2 idx1:nearest1 idx2:nearest2 <grad_dist1 <grad_dist2 -> xyz1 xyz2",
        ),
    },
    "_msmv_sampling_cuda": {
        f"_ms_deform_attn_cuda_{maps}_{way}": (
            _sample_views,
            f"<grad_output {names} {_AT} -> {names} {_AT}" if way == "backward" else f"{names} {_AT}",
        )
        for maps, names in zip(("c2345", "c23456"), _MAPS, strict=True)
        for way in ("forward", "backward")
    },
}
FUNCTIONS = {extension: functions_of(extension, rows) for extension, rows in _ROWS.items()}
