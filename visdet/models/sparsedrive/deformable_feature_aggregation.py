"""Sampling of the features of all cameras and levels around the key points of every anchor."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from mmengine.model import BaseModule, constant_init, xavier_init
from torch import Tensor, nn

from visdet.checks.arguments import Share
from visdet.errors import InvalidInputError
from visdet.ops import deformable_aggregation_fused, feature_maps_format
from visdet.registry import MODELS

from ..layers.plain import is_plain
from ..layers.precision import in_full_precision
from .mlp import linear_relu_ln


def is_flat(feature_maps: Sequence[Any]) -> bool:
    """Return whether a pyramid is the result of ``feature_maps_format``, and not one [B, V, C, H, W] per level."""
    return len(feature_maps) == 3 and feature_maps[0].dim() == 3


@MODELS.register_module()
class DeformableFeatureAggregation(BaseModule):
    """Projects the 3-D key points of each anchor into all cameras and sums the features there, weighted per group.

    The weights are computed from the feature of the instance and the embedding of its anchor, by a softmax over all
    cameras, levels and points. ``visdet.ops.deformable_aggregation_fused`` does projection, softmax and sampling. A
    point counts in a camera if and only if it falls strictly inside the image.

    Args:
        embed_dims: width C of features and instances. It is divisible by ``num_groups``.
        num_groups: number of groups of channels, each of which has its own weights.
        num_levels, num_cams: number of levels and of cameras of a sample.
        proj_drop: dropout of the output.
        attn_drop: probability in training that a (camera, point) pair is left out with all of its levels and groups.
            The other pairs are scaled up.
        kps_generator: config of the generator of key points. Its ``embed_dims`` is set to that of this module.
        temporal_fusion_module, use_temporal_anchor_embed: accepted for configs of SparseDrive, which does not use them.
        use_deformable_func: accepted for configs of SparseDrive. The operator samples in any case.
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
        flat = feature_maps if is_flat(feature_maps) else feature_maps_format(feature_maps)
        features, level_shapes, level_starts = flat
        given = (projection.shape[1], *level_starts.shape)
        V = self.num_cams
        L = self.num_levels
        if given != (V, V, L):
            raise InvalidInputError(
                f"DeformableFeatureAggregation: projection_mat must be of {V} cameras, and feature_maps of "
                f"{V} cameras and {L} levels, got {given}"
            )
        key_points = self.kps_generator(anchor, instance_feature)  # [B, N, P, 3]
        logits, camera_logits = self._get_logits(instance_feature, anchor_embed, projection)
        keep = self._draw_pairs(instance_feature)
        sampled = deformable_aggregation_fused(
            features,
            level_shapes,
            level_starts,
            key_points,
            projection,
            metas.get("image_wh"),
            logits,
            camera_logits,
            keep,
            1.0 if keep is None else 1 / (1 - self.attn_drop),
        )
        if not torch.is_autocast_enabled(sampled.device.type):  # Autocast converts by itself.
            sampled = sampled.to(instance_feature.dtype)
        output = self.proj_drop(self.output_proj(sampled))
        if self.residual_mode == "add":
            return output + instance_feature
        return torch.cat([output, instance_feature.to(output.dtype)], -1)

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
        encoder = self.camera_encoder
        fc = self.weights_fc
        if encoder is not None:
            cameras = in_full_precision(encoder, projection[:, :, :3].flatten(2))
            if is_plain(fc, nn.Linear):
                logits = fc(embedded).unflatten(-1, sizes)
                return logits, F.linear(cameras, fc.weight).unflatten(-1, sizes)
            embedded = embedded.unsqueeze(2) + cameras.unsqueeze(1)
        return fc(embedded).view(B, N, self.num_cams, *sizes), None

    def _draw_pairs(self, instance_feature: Tensor) -> Tensor | None:
        """Return which (camera, point) pairs attention dropout keeps, bool [B, N, V, P], or None if it keeps all."""
        share = self.attn_drop
        if not self.training or share == 0:
            return None
        shape = (*instance_feature.shape[:2], self.num_cams, self.num_pts)
        return torch.rand(shape, device=instance_feature.device) > share
