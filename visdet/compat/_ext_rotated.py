"""The functions of ``mmcv._ext`` for rotated boxes and point sets."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from visdet import ops
from visdet.ops._roi_sampling import ROTATED
from visdet.ops.mmcv.diff_iou_rotated import sorted_vertices
from visdet.ops.mmcv.point_sets import squared_distances

from ._ext_regions import add_regions_gradient
from ._gradients import add_gradients, write

__all__ = [
    "active_rotated_filter_backward",
    "active_rotated_filter_forward",
    "chamfer_distance_backward",
    "chamfer_distance_forward",
    "convex_giou",
    "convex_iou",
    "diff_iou_rotated_sort_vertices_forward",
    "min_area_polygons",
    "points_in_polygons_forward",
    "riroi_align_rotated_backward",
    "riroi_align_rotated_forward",
    "roi_align_rotated_backward",
    "roi_align_rotated_forward",
    "rotated_feature_align_backward",
    "rotated_feature_align_forward",
]


def _linear(name: str, function: Callable[..., Tensor]) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return a forward and a backward entry for a function that is linear in its first tensor.

    The gradient of a linear function does not depend on the values of that tensor.
    """

    def forward(input: Tensor, beside: Tensor, output: Tensor, **settings: Any) -> None:
        write(f"{name}_forward", "output", output, function(input, beside, settings))

    def backward(grad_output: Tensor, beside: Tensor, grad_input: Tensor, **settings: Any) -> None:
        input = torch.zeros_like(grad_input, dtype=grad_output.dtype)
        add_gradients(
            f"{name}_backward", lambda x: function(x, beside, settings), [input], grad_output, [grad_input]
        )

    return forward, backward


def _roi_align_rotated(input: Tensor, rois: Tensor, settings: dict) -> Tensor:
    size = (settings["pooled_height"], settings["pooled_width"])
    names = ("spatial_scale", "sampling_ratio", "aligned", "clockwise")
    return ops.roi_align_rotated(input, rois, size, *(settings[name] for name in names))


def _riroi_align_rotated(features: Tensor, rois: Tensor, settings: dict) -> Tensor:
    size = (settings["pooled_height"], settings["pooled_width"])
    names = ("spatial_scale", "num_samples", "num_orientations", "clockwise")
    return ops.riroi_align_rotated(features, rois, size, *(settings[name] for name in names))


roi_align_rotated_forward, _roi_align_rotated_backward = _linear("roi_align_rotated", _roi_align_rotated)


def roi_align_rotated_backward(
    grad_output: Tensor, rois: Tensor, grad_input: Tensor, **settings: Any
) -> None:
    size = (settings["pooled_height"], settings["pooled_width"])
    kernel = [settings[name] for name in ("spatial_scale", "sampling_ratio", "aligned")]
    if grad_output.is_cuda and rois.dim() == 2:  # plain torch serves the CPU
        turned = torch.cat([rois[:, :5], -rois[:, 5:]], 1) if settings["clockwise"] else rois
        given = grad_output, turned, grad_input, size, kernel, ROTATED
        if add_regions_gradient("roi_align_rotated_backward", *given):
            return
    _roi_align_rotated_backward(grad_output, rois, grad_input, **settings)


riroi_align_rotated_forward, riroi_align_rotated_backward = _linear(
    "riroi_align_rotated", _riroi_align_rotated
)


def _rotated_feature_align(features: Tensor, best_bboxes: Tensor, settings: dict) -> Tensor:
    B, _, H, W = features.shape
    if best_bboxes.numel() == B * H * W * 5:
        best_bboxes = best_bboxes.reshape(B, H, W, 5)  # R3Det gives [B * H * W, 5]
    return ops.rotated_feature_align(features, best_bboxes, **settings)


rotated_feature_align_forward, rotated_feature_align_backward = _linear(
    "rotated_feature_align", _rotated_feature_align
)
active_rotated_filter_forward, active_rotated_filter_backward = _linear(
    "active_rotated_filter", lambda input, indices, _: ops.active_rotated_filter(input, indices)
)


def min_area_polygons(pointsets: Tensor, polygons: Tensor) -> None:
    write("min_area_polygons", "polygons", polygons, ops.min_area_polygons(pointsets))


def convex_iou(pointsets: Tensor, polygons: Tensor, ious: Tensor) -> None:
    write("convex_iou", "ious", ious, ops.convex_iou(pointsets, polygons))


def convex_giou(pointsets: Tensor, polygons: Tensor, output: Tensor) -> None:
    giou, gradient = ops.convex_giou(pointsets, polygons)
    write("convex_giou", "output", output, torch.cat([gradient, giou[:, None]], 1))


def points_in_polygons_forward(points: Tensor, polygons: Tensor, output: Tensor) -> None:
    write("points_in_polygons_forward", "output", output, ops.points_in_polygons(points, polygons))


def diff_iou_rotated_sort_vertices_forward(vertices: Tensor, mask: Tensor, num_valid: Tensor) -> Tensor:
    B, N = vertices.shape[:2]
    shapes = {
        "vertices": (vertices, [B, N, 24, 2]),
        "mask": (mask, [B, N, 24]),
        "num_valid": (num_valid, [B, N]),
    }
    for name, (tensor, expected) in shapes.items():
        if list(tensor.shape) != expected:
            raise ValueError(
                f"mmcv._ext.diff_iou_rotated_sort_vertices_forward: {name} must be {expected}, got {list(tensor.shape)}"
            )
    return sorted_vertices(vertices, mask, num_valid)


def chamfer_distance_forward(
    xyz1: Tensor, xyz2: Tensor, dist1: Tensor, dist2: Tensor, idx1: Tensor, idx2: Tensor
) -> None:
    outputs = {"dist1": dist1, "dist2": dist2, "idx1": idx1, "idx2": idx2}
    results = list(ops.chamfer_distance(xyz1, xyz2))
    for k, (one, other) in enumerate([(xyz1, xyz2), (xyz2, xyz1)]):
        if one.dtype == torch.float16 and other.shape[1]:  # every operation is rounded, as in mmcv
            nearest = other.gather(1, results[2 + k].long()[..., None].expand(-1, -1, 2))
            results[k] = (one - nearest).square().sum(-1)
    for (name, output), result in zip(outputs.items(), results, strict=True):
        write("chamfer_distance_forward", name, output, result)


def chamfer_distance_backward(
    xyz1: Tensor,
    xyz2: Tensor,
    idx1: Tensor,
    idx2: Tensor,
    grad_dist1: Tensor,
    grad_dist2: Tensor,
    grad_xyz1: Tensor,
    grad_xyz2: Tensor,
) -> None:
    def distances(xyz1: Tensor, xyz2: Tensor) -> Tensor:
        return torch.cat(squared_distances(xyz1, xyz2, idx1, idx2), 1)

    grads = torch.cat([grad_dist1, grad_dist2], 1)
    add_gradients("chamfer_distance_backward", distances, [xyz1, xyz2], grads, [grad_xyz1, grad_xyz2])
