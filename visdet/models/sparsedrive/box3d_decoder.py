"""From box predictions to results."""

from typing import Any

import torch
from torch import Tensor

from visdet.registry import TASK_UTILS

from .box3d import CNS, decode_box

__all__ = ["SparseBox3DDecoder"]


@TASK_UTILS.register_module()
class SparseBox3DDecoder:
    """The best-scored boxes of each sample, scores multiplied by the predicted centerness.

    Args:
        num_output: most results of a sample; as many as there are predictions if those are fewer.
        score_threshold: least class score, before centerness; None for none.
        sorted: whether results come best first; with quality they always do.

    Source: names and defaults are SparseDrive's. Different: fewer predictions than ``num_output`` work;
    ``cls_scores`` belong to the boxes beside them.
    """

    def __init__(
        self, num_output: int = 300, score_threshold: float | None = None, sorted: bool = True
    ) -> None:
        self.num_output = num_output
        self.score_threshold = score_threshold
        self.sorted = sorted

    @torch.no_grad()
    def decode(
        self,
        cls_scores: list[Tensor],
        box_preds: list[Tensor],
        instance_id: Tensor | None = None,
        quality: list[Tensor | None] | None = None,
        output_idx: int = -1,
    ) -> list[dict[str, Any]]:
        """Return of each sample ``boxes_3d`` [n, 7 + v], ``scores_3d`` [n], ``labels_3d`` [n], on the CPU.

        Args:
            cls_scores: of each decoder layer [B, Q, C] logits. box_preds: [B, Q, 8 + v] encoded.
            instance_id: [B, Q] track ids: then every prediction counts once, with its best class, and the results have
                ``instance_ids`` [n]; otherwise once with every class.
            quality: of each layer [B, Q, 2] logits or None; with it the results have ``cls_scores`` [n], the scores
                without centerness.
            output_idx: the decoder layer to read.
        """
        probability = cls_scores[output_idx].float().sigmoid()
        boxes = box_preds[output_idx]
        quality_of_layer = None if quality is None else quality[output_idx]
        with_ids = instance_id is not None
        if with_ids:
            probability, labels = probability.max(dim=-1, keepdim=True)
        candidates = probability.flatten(1)
        num_classes = probability.shape[-1]
        count = min(self.num_output, candidates.shape[1])
        class_score, index = candidates.topk(count, dim=1, sorted=self.sorted)
        score = class_score
        if quality_of_layer is not None:
            centerness = quality_of_layer[..., CNS].float().sigmoid().gather(1, index // num_classes)
            score, order = (class_score * centerness).sort(dim=1, descending=True)
            class_score, index = class_score.gather(1, order), index.gather(1, order)
        query = index // num_classes
        label = labels.flatten(1).gather(1, query) if with_ids else index % num_classes
        results = {
            "boxes_3d": decode_box(boxes.gather(1, query[..., None].expand(-1, -1, boxes.shape[-1]))),
            "scores_3d": score,
            "labels_3d": label,
        }
        if quality_of_layer is not None:
            results["cls_scores"] = class_score
        if with_ids:
            results["instance_ids"] = instance_id.gather(1, query)
        is_kept = None if self.score_threshold is None else (class_score >= self.score_threshold).cpu()
        results = {name: value.cpu() for name, value in results.items()}
        return [
            {name: value[i] if is_kept is None else value[i][is_kept[i]] for name, value in results.items()}
            for i in range(len(boxes))
        ]
