"""The decoders that turn predictions of motion and planning into results."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from visdet.models.transfer import constants_on
from visdet.registry import TASK_UTILS
from visdet.structures.rotated_boxes import turned

from ..boxes.box3d import L, W, decode_box, yaw_of
from ..boxes.box3d_decoder import SparseBox3DDecoder
from ..sample_batch import index_of_command, last_of, probabilities_of
from .motion_target import steps_of

_EGO_SIZE_M = (4.08, 1.73)  # length and width
_COLLISION = -999.0


@TASK_UTILS.register_module()
class SparseBox3DMotionDecoder(SparseBox3DDecoder):
    """Decodes the trajectories of the boxes that ``SparseBox3DDecoder`` returns, in the same order.

    Args:
        num_output: as in ``SparseBox3DDecoder``. With None it is that of the box decoder if both are in a
            ``SparseDriveHead``, and else 300, the default of ``SparseBox3DDecoder``.
        score_threshold, sorted, min_distance: as in ``SparseBox3DDecoder``. In a ``SparseDriveHead``, the default of
            ``min_distance`` is that of the box decoder, too.

    Source: the name is SparseDrive's, whose number of outputs is fixed at 300.
    """

    def __init__(
        self,
        num_output: int | None = None,
        score_threshold: float | None = None,
        sorted: bool = True,
        min_distance: float | None = None,
    ) -> None:
        super().__init__(num_output, score_threshold, sorted, min_distance)

    @torch.no_grad()
    def select(  # type: ignore[override]
        self,
        cls_scores: list[Tensor],
        box_preds: list[Tensor],
        instance_id: Tensor | None,
        quality: list[Tensor | None] | None,
        motion_output: dict[str, Any],
        output_idx: int = -1,
    ) -> dict[str, Tensor]:
        """Return the motion of each box.

        Args:
            motion_output: the output of ``MotionPlanningHead`` for motion. The other arguments are those of
                ``SparseBox3DDecoder.select``.

        Returns:
            ``trajs_3d`` [B, n, M, T, 2], positions in metres; ``trajs_score`` [B, n, M]; ``anchor_queue``
            [B, n, frames, 7 + v], the boxes of the last frames; ``period`` [B, n], the number of frames for which a box
            has been tracked; and ``is_kept`` [B, n] if rows are left out.
        """
        boxes, _, best, is_kept = self.best(cls_scores, box_preds, instance_id, quality, output_idx)
        query = best.query
        batch = torch.arange(query.shape[0], device=query.device)[:, None]
        chosen = batch, query
        centre = boxes[batch, query, :2]
        steps = motion_output["prediction"][-1][chosen]
        queue = torch.stack(motion_output["anchor_queue"], 2)[chosen]
        results = {
            "trajs_3d": steps.cumsum(-2) + centre[:, :, None, None],
            "trajs_score": probabilities_of(motion_output)[chosen],
            "anchor_queue": decode_box(queue),
            "period": motion_output["period"][chosen],
        }
        return results | is_kept


@TASK_UTILS.register_module()
class HierarchicalPlanningDecoder:
    """Decodes the plan, which is the best mode of the given command.

    Args:
        ego_fut_ts, ego_fut_mode: number of steps in a plan, and number of modes for each command.
        use_rescore: whether modes that collide with the predicted motion of agents get a low score. If all modes
            collide, no score changes.

    Source: names are SparseDrive's, and so is the rule that boxes collide if a corner of one lies in the other.
    Differences: every sample has its own result, and the box of the ego is shifted ahead in all of its boxes, not only
    in the first two.
    """

    def __init__(self, ego_fut_ts: int, ego_fut_mode: int, use_rescore: bool = False) -> None:
        self.ego_fut_ts = ego_fut_ts
        self.ego_fut_mode = ego_fut_mode
        self.use_rescore = use_rescore

    @torch.no_grad()
    def select(
        self,
        det_output: dict[str, Any],
        motion_output: dict[str, Any],
        planning_output: dict[str, Any],
        data: dict[str, Any],
    ) -> dict[str, Tensor]:
        """Return the plan of each sample.

        Args:
            det_output, motion_output, planning_output: raw outputs of the heads.
            data: ``gt_ego_fut_cmd`` [B, 3], the command, one-hot.

        Returns:
            ``planning_score`` [B, 3, M]; ``planning`` [B, 3, M, T, 2] and ``final_planning`` [B, T, 2], positions in
            metres; ``ego_period`` [B, 1]; and ``ego_anchor_queue`` [B, 1, frames, 7 + v].
        """
        classification = last_of(planning_output, "classification")
        B = classification.shape[0]
        M = self.ego_fut_mode
        scores = classification.reshape(B, 3, M).clone()
        plans = last_of(planning_output, "prediction")
        plans = plans.reshape(B, 3, M, self.ego_fut_ts, 2).cumsum(-2)
        given = index_of_command(data)
        chosen = scores[given]
        plan = plans[given]
        if self.use_rescore:
            chosen = chosen + _COLLISION * self._collides(plan, det_output, motion_output)
        scores[given] = chosen
        final = plan[given[0], chosen.argmax(-1)]
        queue = decode_box(torch.stack(planning_output["anchor_queue"], 2))
        return {
            "planning_score": scores.sigmoid(),
            "planning": plans,
            "final_planning": final,
            "ego_period": planning_output["period"],
            "ego_anchor_queue": queue,
        }

    def _collides(
        self,
        plan: Tensor,  # [B, M, T, 2]
        det_output: dict[str, Any],
        motion_output: dict[str, Any],
        score_threshold: float = 0.5,
        scale: float = 1.1,
        ahead: float = 0.5,
    ) -> Tensor:  # [B, M]
        """Return 1 for modes in which the ego collides with an agent, and 0 for the others or if all modes collide.

        Agents follow their most probable motion. Those below ``score_threshold`` do not count.
        """
        anchors = last_of(det_output, "prediction")
        is_seen = probabilities_of(det_output).amax(-1) >= score_threshold  # [B, N]
        motion = last_of(motion_output, "prediction")[..., : self.ego_fut_ts, :].cumsum(-2)
        motion = steps_of(motion_output["classification"][-1].argmax(-1), motion)
        yaw = _yaws(motion, yaw_of(anchors))
        others = motion + anchors[:, :, None, :2], yaw, anchors[:, :, None, W : L + 1].exp()
        other_boxes = [x[:, None] for x in others]  # [B, 1, N, T or 1, ...]

        yaw = _yaws(plan, plan.new_full(plan.shape[:-2], math.pi / 2))
        centre = plan + ahead * torch.stack([yaw.cos(), yaw.sin()], -1)
        size = scale * constants_on(plan.device, _EGO_SIZE_M)
        ego_boxes = centre[:, :, None], yaw[:, :, None], size  # [B, M, 1, T, ...] and [2]
        meets = _corner_inside(ego_boxes, other_boxes) | _corner_inside(other_boxes, ego_boxes)
        collides = (meets & is_seen[:, None, :, None]).flatten(2).any(-1)
        return collides.float() * ~collides.all(-1, keepdim=True)


def _yaws(path: Tensor, start: Tensor, standing: float = 0.5) -> Tensor:
    """Return the headings [..., T] in radians at the places of a path [..., T, 2] that begins at the origin.

    If the path ends within ``standing`` metres of its beginning, all of them are ``start``.
    """
    places = torch.cat([F.pad(path, (0, 0, 1, 0)), path[..., -1:, :]], -2)
    direction = places[..., 2:, :] - places[..., :-2, :]
    yaw = torch.atan2(direction[..., 1], direction[..., 0])
    stands = torch.linalg.vector_norm(path[..., -1, :], dim=-1) < standing
    return torch.where(stands[..., None], start[..., None], yaw)


def _corner_inside(boxes: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    """Return whether a corner of each box lies in the other box, bool [...].

    Boxes are given by their centre [..., 2], yaw [...] and size [..., 2], whose shapes are broadcast.
    """
    centre, yaw, size = boxes
    other_centre, other_yaw, other_size = others
    signs = constants_on(centre.device, ((1.0, 1.0), (1.0, -1.0), (-1.0, -1.0), (-1.0, 1.0)))
    corners = centre[..., None, :] + turned(0.5 * size[..., None, :] * signs, yaw[..., None, None])
    inside = turned(corners - other_centre[..., None, :], -other_yaw[..., None, None])
    return (inside.abs() < 0.5 * other_size[..., None, :]).all(-1).any(-1)
