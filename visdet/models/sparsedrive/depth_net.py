"""Dense depth as an auxiliary task."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from mmengine.model import BaseModule
from torch import Tensor, nn

from visdet.registry import MODELS

from ..layers.precision import in_type_of, without_autocast

_MAX_LOG_DEPTH = 20.0  # keeps a diverging depth and its gradient finite


@MODELS.register_module()
class DenseDepthNet(BaseModule):
    """Predicts the depth of every pixel of the finest levels, ``exp(conv(feature)) · focal / equal_focal``.

    It runs in float32 under autocast.

    Args:
        embed_dims: width of the features.
        num_depth_layers: number of levels, counted from the finest.
        equal_focal: the focal length in pixels for which the convolution predicts metres.
        max_depth: the depth in metres to which the loss limits predictions. loss_weight: factor on the loss.

    Source: Sparse4D v3; names and defaults are SparseDrive's.
    """

    def __init__(
        self,
        embed_dims: int = 256,
        num_depth_layers: int = 1,
        equal_focal: float = 100,
        max_depth: float = 60,
        loss_weight: float = 1.0,
    ) -> None:
        super().__init__()
        self.equal_focal = equal_focal
        self.max_depth = max_depth
        self.loss_weight = loss_weight
        self.depth_layers = nn.ModuleList(nn.Conv2d(embed_dims, 1, 1) for _ in range(num_depth_layers))

    def forward(
        self,
        feature_maps: Sequence[Tensor],
        focal: Tensor | None = None,
    ) -> list[Tensor]:
        """Return the depths in metres [B·V, 1, H, W] of each level.

        Args:
            feature_maps: [B, V, C, H, W] of each level. focal: [B, V] in pixels, by default ``equal_focal``.
        """
        depths = []
        layer: Any
        with without_autocast(feature_maps[0]):
            for layer, feature in zip(self.depth_layers, feature_maps, strict=False):
                log_depth = layer(in_type_of(layer, feature.flatten(0, 1)))
                depth = log_depth.clamp(max=_MAX_LOG_DEPTH).exp()
                if focal is not None:
                    depth = depth * focal.reshape(-1, 1, 1, 1).to(depth.dtype) / self.equal_focal
                depths.append(depth)
        return depths

    def loss(self, depth_preds: Sequence[Tensor], gt_depths: Sequence[Tensor]) -> Tensor:
        """Return the mean absolute error over the pixels with a known depth, or 0 if there are none.

        Args:
            depth_preds: [B·V, 1, H, W] of each level.
            gt_depths: [B, V, H, W] of each level, 0 or less where the depth is unknown.
        """
        total = depth_preds[0].new_zeros(())
        for pred, gt in zip(depth_preds, gt_depths, strict=False):
            pred = pred.float().flatten()
            gt = gt.reshape(-1).to(pred.dtype)
            is_known = (gt > 0) & ~pred.isnan()
            # NaN is replaced before the clamp, so that the gradient of such a pixel is 0 instead of NaN.
            predicted = torch.where(is_known, pred, 0.0).clamp(0, self.max_depth)
            error = F.l1_loss(predicted, torch.where(is_known, gt, 0.0), reduction="sum")
            total = total + error / (is_known.sum() * len(depth_preds)).clamp(min=1)
        return total * self.loss_weight
