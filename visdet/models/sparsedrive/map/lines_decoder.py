"""The decoder that turns predicted polylines into results."""

import torch
from torch import Tensor

from visdet.registry import TASK_UTILS

from ...rows import rows_at
from ..boxes.box3d_decoder import select_best


@TASK_UTILS.register_module()
class SparsePoint3DDecoder:
    """Decodes the best polylines of each sample, as many as there are predictions.

    Args:
        coords_dim: number of coordinates of a point.
        score_threshold: least score of a result. With None all results are kept.

    Source: names and defaults are SparseDrive's. One thing differs: ``output_idx`` has an effect.
    """

    def __init__(self, coords_dim: int = 2, score_threshold: float | None = None) -> None:
        self.coords_dim = coords_dim
        self.score_threshold = score_threshold

    @torch.no_grad()
    def select(
        self,
        cls_scores: list[Tensor],
        pts_preds: list[Tensor],
        instance_id: Tensor | None = None,
        quality: list[Tensor | None] | None = None,
        output_idx: int = -1,
    ) -> dict[str, Tensor]:
        """Return ``vectors`` [B, n, points, coords_dim] in metres, ``scores`` and ``labels`` [B, n].

        There is ``is_kept`` [B, n] with a threshold.

        Args:
            cls_scores: [B, Q, C] of each decoder layer, logits.
            pts_preds: [B, Q, points · coords_dim] of each layer, in metres.
            instance_id, quality: accepted for compatibility, without effect.
            output_idx: index of the decoder layer that is decoded.
        """
        logits = cls_scores[output_idx]
        best = select_best(logits, num_output=logits.shape[1])
        points = rows_at(best.query, pts_preds[output_idx].float())
        scores = best.score
        threshold = self.score_threshold
        results = {
            "vectors": points.unflatten(-1, (-1, self.coords_dim)),
            "scores": scores,
            "labels": best.label,
        }
        if threshold is not None:
            results["is_kept"] = scores >= threshold
        return results
