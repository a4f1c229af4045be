"""The decoder that turns box predictions into results, and what it shares with the decoders of other tasks."""

from operator import methodcaller
from typing import Any, NamedTuple

import torch
from torch import Tensor

from visdet.execution.tensor_tree import map_tensors, tensors_of
from visdet.registry import TASK_UTILS

from ...rows import rows_at
from .box3d import CNS, decode_box


class BestPredictions(NamedTuple):
    """The n best predictions of each sample.

    Attributes:
        query, label: [B, n] int64, the index of the prediction and its class.
        class_score: [B, n], the probability of the class.
        score: [B, n], the same, multiplied by the centerness if it is predicted.
    """

    query: Tensor
    label: Tensor
    class_score: Tensor
    score: Tensor


def select_best(
    logits: Tensor,
    num_output: int,
    quality: Tensor | None = None,
    sorted: bool = True,
    once_each: bool = False,
) -> BestPredictions:
    """Return the best (prediction, class) pairs of each sample.

    They are chosen by the probability of the class and ordered by the score.

    Args:
        logits: [B, Q, C]. num_output: greatest number of pairs of a sample.
        quality: [B, Q, 2], logits, one of which is the centerness, or None if quality is not predicted.
        sorted: whether the best pairs come first. With ``quality`` they always do.
        once_each: whether a prediction forms one pair, with its best class. Otherwise it forms a pair with every class.
    """
    probability = logits.float().sigmoid()
    labels = None
    if once_each:
        probability, labels = probability.max(dim=-1)
        probability = probability[..., None]
    candidates = probability.flatten(1)
    num_classes = probability.shape[-1]
    class_score, index = candidates.topk(min(num_output, candidates.shape[1]), dim=1, sorted=sorted)
    score = class_score
    if quality is not None:
        centerness = quality[..., CNS].float().sigmoid().gather(1, index // num_classes)
        score, order = (class_score * centerness).sort(dim=1, descending=True)
        class_score = class_score.gather(1, order)
        index = index.gather(1, order)
    query = index // num_classes
    label = index % num_classes if labels is None else labels.gather(1, query)
    return BestPredictions(query, label, class_score, score)


def rows_to_keep(
    best: BestPredictions, boxes: Tensor, score_threshold: float | None, min_distance: float | None
) -> dict[str, Tensor]:
    """Return ``is_kept`` [B, n] of the best predictions, or nothing if neither option leaves rows out.

    Args:
        best: the best predictions. With ``min_distance``, those of the greatest scores come first.
        boxes: [B, Q, D], the predictions, which begin with the centres. score_threshold, min_distance: see
            ``SparseBox3DDecoder``.
    """
    if score_threshold is None and min_distance is None:
        return {}
    label = best.label
    is_kept = torch.ones_like(label, dtype=torch.bool)
    if score_threshold is not None:
        is_kept = best.class_score >= score_threshold
    if min_distance is not None:
        # OpenVINO does not gather from a slice.
        centres = rows_at(best.query, boxes.float())[..., :2]
        is_near = torch.linalg.vector_norm(centres[:, :, None] - centres[:, None], dim=-1) < min_distance
        hides = (is_near & (label[:, :, None] == label[:, None])).triu(1)
        for row in range(label.shape[1]):
            is_kept = is_kept & ~(hides[:, row] & is_kept[:, row, None])
    return {"is_kept": is_kept}


def results_of(selected: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the results of each sample of a batch, in memory of its own on the CPU. The host waits for them.

    Args:
        selected: the results of ``select``, a dict or nested dicts, which become one dict. Rows that are not marked by
            the ``is_kept`` of their dict are left out.
    """
    # All copies are on their way before the host waits for the last one.
    on_host = map_tensors(methodcaller("to", "cpu", non_blocking=True), selected)
    for device in {tensor.device for tensor in tensors_of(selected) if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    num_samples = len(next(iter(tensors_of(on_host)), ()))
    return [_result_of(on_host, index) for index in range(num_samples)]


def _result_of(selected: dict[str, Any], index: int) -> dict[str, Any]:
    is_kept = selected.get("is_kept")
    result: dict[str, Any] = {}
    for name, value in selected.items():
        if isinstance(value, dict):
            result |= _result_of(value, index)
        elif name != "is_kept":
            rows = value[index]
            result[name] = rows.clone() if is_kept is None else rows[is_kept[index]]
    return result


@TASK_UTILS.register_module()
class SparseBox3DDecoder:
    """Decodes the best boxes of each sample. Scores are multiplied by the predicted centerness.

    Args:
        num_output: greatest number of results of a sample, 300 with None.
        score_threshold: least class score, before it is multiplied by the centerness. With None all results are kept.
        sorted: whether the best results come first. With quality or ``min_distance`` they always do.
        min_distance: a box is left out if its centre is nearer than this, in metres, to that of a better box of its
            class that is kept. With None no box is.

    Source: names and defaults are SparseDrive's, apart from ``min_distance``, which is CenterPoint's suppression by
    circles. Differences: there may be fewer predictions than ``num_output``, and
    each of ``cls_scores`` belongs to the box of the same row.
    """

    def __init__(
        self,
        num_output: int | None = 300,
        score_threshold: float | None = None,
        sorted: bool = True,
        min_distance: float | None = None,
    ) -> None:
        self.num_output = num_output
        self.score_threshold = score_threshold
        self.sorted = sorted
        self.min_distance = min_distance

    def best(
        self,
        cls_scores: list[Tensor],
        box_preds: list[Tensor],
        instance_id: Tensor | None,
        quality: list[Tensor | None] | None,
        output_idx: int,
    ) -> tuple[Tensor, Tensor | None, BestPredictions, dict[str, Tensor]]:
        """Return boxes and quality of a decoder layer, its best predictions, and what ``rows_to_keep`` says of these.

        The arguments are those of ``select``.
        """
        boxes = box_preds[output_idx]
        of_layer = None if quality is None else quality[output_idx]
        logits = cls_scores[output_idx]
        num_output = self.num_output
        if num_output is None:
            num_output = 300
        min_distance = self.min_distance
        is_sorted = self.sorted or min_distance is not None
        best = select_best(logits, num_output, of_layer, is_sorted, once_each=instance_id is not None)
        return boxes, of_layer, best, rows_to_keep(best, boxes, self.score_threshold, min_distance)

    @torch.no_grad()
    def select(
        self,
        cls_scores: list[Tensor],
        box_preds: list[Tensor],
        instance_id: Tensor | None = None,
        quality: list[Tensor | None] | None = None,
        output_idx: int = -1,
    ) -> dict[str, Tensor]:
        """Return ``boxes_3d`` [B, n, 7 + v], ``scores_3d``, ``labels_3d`` [B, n], and ``is_kept`` if rows are left out.

        Args:
            cls_scores: [B, Q, C] of each decoder layer, logits. box_preds: [B, Q, 8 + v] of each layer, encoded.
            instance_id: [B, Q], track ids. With them a prediction is returned once, with its best class, and the
                results have ``instance_ids`` [B, n]. Without them a prediction may be returned with several classes.
            quality: [B, Q, 2] of each layer, logits, or None for a layer. With quality the results have ``cls_scores``
                [B, n], the scores without centerness.
            output_idx: index of the decoder layer that is decoded.
        """
        boxes, of_layer, best, is_kept = self.best(cls_scores, box_preds, instance_id, quality, output_idx)
        query = best.query
        results = {
            "boxes_3d": decode_box(rows_at(query, boxes)),
            "scores_3d": best.score,
            "labels_3d": best.label,
        }
        if of_layer is not None:
            results["cls_scores"] = best.class_score
        if instance_id is not None:
            results["instance_ids"] = instance_id.gather(1, query)
        return results | is_kept
