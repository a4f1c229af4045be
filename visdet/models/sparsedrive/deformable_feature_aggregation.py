"""Sampling of the features of all cameras and levels around the key points of every anchor."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from mmengine.model import BaseModule, constant_init, xavier_init
from torch import Tensor, nn

from visdet.checks.arguments import Share
from visdet.errors import InvalidInputError
from visdet.ops import (
    deformable_aggregation,
    deformable_aggregation_fused,
    deformable_aggregation_reference,
    feature_maps_format,
)
from visdet.registry import MODELS

from ..layers.plain import is_plain
from ..layers.precision import at_least_float32, in_full_precision
from .mlp import linear_relu_ln

_MIN_DEPTH_M = 1e-5  # Points that are nearer or behind the camera are projected far outside the image.


@MODELS.register_module()
class DeformableFeatureAggregation(BaseModule):
    """Projects the 3-D key points of each anchor into all cameras and sums the features there, weighted per group.

    The weights are computed from the feature of the instance and the embedding of its anchor, by a softmax over all
    cameras, levels and points. ``visdet.ops.deformable_aggregation_fused`` does projection, softmax and sampling. A
    point counts in a camera if and only if it falls strictly inside the image. If the projection itself requires a
    gradient, as when cameras are calibrated, ``visdet.ops.deformable_aggregation`` samples and torch does the rest.

    Args:
        embed_dims: width C of features and instances. It is divisible by ``num_groups``.
        num_groups: number of groups of channels, each of which has its own weights.
        num_levels, num_cams: number of levels and of cameras of a sample.
        proj_drop: dropout of the output.
        attn_drop: probability in training that a (camera, point) pair is left out with all of its levels and groups.
            The other pairs are scaled up.
        kps_generator: config of the generator of key points. Its ``embed_dims`` is set to that of this module.
        temporal_fusion_module, use_temporal_anchor_embed: accepted for configs of SparseDrive, which does not use them.
        use_deformable_func: whether the compiled operator samples, on any device. Otherwise plain torch does, by the
            same definition.
        use_camera_embed: whether the weights also depend on an embedding of the projection matrix. Without it, one
            linear layer predicts the weights of all cameras.
        residual_mode: 'add' adds the feature of the instance to the output, 'cat' appends it.

    Source: Sparse4D, arXiv 2211.10581; keywords, defaults and parameter names are SparseDrive's.
    """

    def __init__(
        self,
        embed_dims: int = 256,
        num_groups: int = 8,
        num_levels: int = 4,
        num_cams: int = 6,
        proj_drop: float = 0.0,
        attn_drop: Share = 0.0,
        kps_generator: Mapping[str, Any] | None = None,
        temporal_fusion_module: Mapping[str, Any] | None = None,
        use_temporal_anchor_embed: bool = True,
        use_deformable_func: bool = False,
        use_camera_embed: bool = False,
        residual_mode: Literal["add", "cat"] = "add",
    ) -> None:
        super().__init__()
        self.embed_dims = embed_dims
        self.num_groups = num_groups
        self.num_levels = num_levels
        self.num_cams = num_cams
        self.attn_drop = attn_drop
        self.use_deformable_func = use_deformable_func
        self.residual_mode = residual_mode
        self.proj_drop = nn.Dropout(proj_drop)
        self.kps_generator = MODELS.build({**(kps_generator or {}), "embed_dims": embed_dims})
        self.num_pts = self.kps_generator.num_pts
        self.output_proj = nn.Linear(embed_dims, embed_dims)
        weights = num_groups * num_levels * self.num_pts
        self.camera_encoder: nn.Sequential | None = None
        if use_camera_embed:
            self.camera_encoder = nn.Sequential(*linear_relu_ln(embed_dims, 1, 2, 12))
        self.weights_fc = nn.Linear(embed_dims, weights if use_camera_embed else weights * num_cams)

    def init_weights(self) -> None:
        """Initialise the layers such that all sampling weights are equal."""
        super().init_weights()
        constant_init(self.weights_fc, val=0.0, bias=0.0)
        xavier_init(self.output_proj, distribution="uniform", bias=0.0)

    def forward(
        self,
        instance_feature: Tensor,  # [B, N, C]
        anchor: Tensor,  # [B, N, what the key points' generator takes]
        anchor_embed: Tensor,  # [B, N, C]
        feature_maps: Sequence[Any],
        metas: Mapping[str, Any],
        **kwargs: Any,
    ) -> Tensor:
        """Return the aggregated features [B, N, C], or [B, N, 2 C] with ``residual_mode='cat'``.

        Args:
            feature_maps: the result of ``feature_maps_format``, or one [B, V, C, H, W] per level.
            metas: ``projection_mat`` [B, V, 4, 4], from the coordinates of the anchors to pixels, and ``image_wh``
                [B, V, 2], the width and height of the images in pixels. Without ``image_wh`` the projection must map
                to 0..1 of the image.

        Raises:
            ValueError: the number of cameras or levels is not that of the config.
        """
        projection = metas["projection_mat"]
        is_flat = len(feature_maps) == 3 and feature_maps[0].dim() == 3
        features, level_shapes, level_starts = feature_maps if is_flat else feature_maps_format(feature_maps)
        given = (projection.shape[1], *level_starts.shape)
        if given != (self.num_cams, self.num_cams, self.num_levels):
            raise InvalidInputError(
                f"DeformableFeatureAggregation: projection_mat must be of {self.num_cams} cameras, and feature_maps of "
                f"{self.num_cams} cameras and {self.num_levels} levels, got {given}"
            )
        key_points = self.kps_generator(anchor, instance_feature)  # [B, N, P, 3]
        image_wh = metas.get("image_wh")
        is_calibrating = projection.requires_grad or (image_wh is not None and image_wh.requires_grad)
        if self.use_deformable_func and not is_calibrating:
            logits, camera_logits = self._get_logits(instance_feature, anchor_embed, projection)
            keep = self._draw_pairs(instance_feature)
            sampled = deformable_aggregation_fused(
                features,
                level_shapes,
                level_starts,
                key_points,
                projection,
                image_wh,
                logits,
                camera_logits,
                keep,
                1.0 if keep is None else 1 / (1 - self.attn_drop),
            )
        else:
            locations = self.project_points(key_points, projection, image_wh)  # [B, V, N, P, 2]
            locations = locations.permute(0, 2, 3, 1, 4)  # [B, N, P, V, 2]
            weights = self._get_weights(instance_feature, anchor_embed, metas)  # [B, N, V, L, P, G]
            weights = weights.permute(0, 1, 4, 2, 3, 5)  # [B, N, P, V, L, G]
            locations = locations.to(torch.promote_types(locations.dtype, features.dtype))
            sample = deformable_aggregation if self.use_deformable_func else deformable_aggregation_reference
            sampled = sample(features, level_shapes, level_starts, locations, weights)
        if not torch.is_autocast_enabled(sampled.device.type):  # Autocast converts by itself.
            sampled = sampled.to(instance_feature.dtype)
        output = self.proj_drop(self.output_proj(sampled))
        if self.residual_mode == "add":
            return output + instance_feature
        return torch.cat([output, instance_feature.to(output.dtype)], -1)

    def _get_weights(
        self, instance_feature: Tensor, anchor_embed: Tensor, metas: Mapping[str, Any]
    ) -> Tensor:
        """Return weights [B, N, V, L, P, G] that sum to 1 over V, L and P."""
        logits, of_cameras = self._get_logits(instance_feature, anchor_embed, metas["projection_mat"])
        if of_cameras is not None:
            logits = logits.unsqueeze(2) + of_cameras.unsqueeze(1)
        # From here on, the order in memory is that of the kernel, P before V and L. Then neither the weights nor their
        # gradients are copied.
        logits = at_least_float32(logits.permute(0, 1, 4, 2, 3, 5))
        weights = logits.flatten(2, 4).softmax(-2).view(logits.shape).permute(0, 1, 3, 4, 2, 5)
        keep = self._draw_pairs(instance_feature)
        return weights if keep is None else weights * keep[:, :, :, None, :, None] / (1 - self.attn_drop)

    def _get_logits(
        self,
        instance_feature: Tensor,
        anchor_embed: Tensor,
        projection: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the logits [B, N, V, L, P, G], whose softmax is the weights, and None.

        With camera embedding, return [B, N, L, P, G] and [B, V, L, P, G]. Their sum is the logits, because
        ``weights_fc`` is linear. A ``weights_fc`` with an adapter or hooks is called for every pair instead.
        """
        B, N = instance_feature.shape[:2]
        sizes = (self.num_levels, self.num_pts, self.num_groups)
        embedded = instance_feature + anchor_embed
        if self.camera_encoder is None:
            return self.weights_fc(embedded).view(B, N, self.num_cams, *sizes), None
        cameras = in_full_precision(self.camera_encoder, projection[:, :, :3].flatten(2))
        if not is_plain(self.weights_fc, nn.Linear):
            logits = self.weights_fc(embedded.unsqueeze(2) + cameras.unsqueeze(1))
            return logits.view(B, N, self.num_cams, *sizes), None
        logits = self.weights_fc(embedded)
        of_cameras = F.linear(cameras, self.weights_fc.weight)
        return logits.view(B, N, *sizes), of_cameras.view(B, self.num_cams, *sizes)

    def _draw_pairs(self, instance_feature: Tensor) -> Tensor | None:
        """Return which (camera, point) pairs attention dropout keeps, bool [B, N, V, P], or None if it keeps all."""
        if not self.training or self.attn_drop == 0:
            return None
        shape = (*instance_feature.shape[:2], self.num_cams, self.num_pts)
        return torch.rand(shape, device=instance_feature.device) > self.attn_drop

    @staticmethod
    def project_points(
        key_points: Tensor,  # [B, N, P, 3]
        projection_mat: Tensor,  # [B, V, 4, 4]
        image_wh: Tensor | None = None,  # [B, V, 2]
    ) -> Tensor:  # [B, V, N, P, 2]
        """Return the places of the points in each camera, in 0..1 of the image with ``image_wh``, else in pixels."""
        # This is a sum of three products and no matrix product, because a GPU may round the latter to 10 bits, which is
        # too coarse for pixels. The cameras come last in memory, as the kernel needs them.
        points = at_least_float32(key_points)[..., None, None]  # [B, N, P, 3, 1, 1]
        matrix = projection_mat.to(points.dtype)[:, None, None, :, :3]  # [B, 1, 1, V, 3, 4]
        pixels = torch.addcmul(matrix[..., 3], points[..., 0, :, :], matrix[..., 0])
        for axis in (1, 2):
            pixels = torch.addcmul(pixels, points[..., axis, :, :], matrix[..., axis])  # [B, N, P, V, 3]
        points = pixels[..., :2] / pixels[..., 2:].clamp(min=_MIN_DEPTH_M)
        points = points if image_wh is None else points / image_wh.to(points.dtype)[:, None, None]
        return points.permute(0, 3, 1, 2, 4)
