"""From polyline predictions to results."""

from typing import Any

import torch
from torch import Tensor

from visdet.registry import TASK_UTILS

from .box3d_decoder import select_best

__all__ = ["SparsePoint3DDecoder"]


@TASK_UTILS.register_module()
class SparsePoint3DDecoder:
    """The best-scored polylines of each sample, as many as there are predictions.

    Args:
        coords_dim: coordinates of a point. score_threshold: least score; None for none.

    Source: names and defaults are SparseDrive's. Different: ``output_idx`` is obeyed.
    """

    def __init__(self, coords_dim: int = 2, score_threshold: float | None = None) -> None:
        self.coords_dim = coords_dim
        self.score_threshold = score_threshold

    @torch.no_grad()
    def decode(
        self,
        cls_scores: list[Tensor],
        pts_preds: list[Tensor],
        instance_id: Tensor | None = None,
        quality: list[Tensor | None] | None = None,
        output_idx: int = -1,
    ) -> list[dict[str, Any]]:
        """Return of each sample ``vectors`` (n arrays [points, coords_dim], metres), ``scores`` [n], ``labels`` [n].

        Args:
            cls_scores: of each decoder layer [B, Q, C] logits. pts_preds: [B, Q, points · coords_dim].
            instance_id, quality: unused. output_idx: the decoder layer to read.
        """
        logits = cls_scores[output_idx]
        best = select_best(logits, num_output=logits.shape[1])
        points = pts_preds[output_idx].float()
        points = points.gather(1, best.query[..., None].expand(-1, -1, points.shape[-1]))
        points = points.unflatten(-1, (-1, self.coords_dim)).cpu().numpy()
        score, label = best.score.cpu().numpy(), best.label.cpu().numpy()
        results = []
        for i in range(len(score)):
            is_kept = slice(None) if self.score_threshold is None else score[i] >= self.score_threshold
            results.append(
                {
                    "vectors": list(points[i][is_kept]),
                    "scores": score[i][is_kept],
                    "labels": label[i][is_kept],
                }
            )
        return results
