"""Comparison of plans with the path that was driven, by distance and by collisions with other road users."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from mmengine.logging import print_log

from visdet.errors import InvalidInputError
from visdet.registry import METRICS
from visdet.structures.poses import box_corners, turn_about_z
from visdet.structures.tables import table_text

from .driving_metric import DrivingMetric, as_array, mean_of

_AHEAD = np.pi / 2  # the y axis of the lidar frame
_STANDING_M = 0.5


@METRICS.register_module()
class PlanningMetric(DrivingMetric):
    """The distance (L2, m) of the plan to the path that was driven, and the rate of collisions with boxes.

    Both are means over frames for each step, such as ``L2@0.5s`` and ``collision@0.5s``. Published tables summarise
    them in two ways, which are not comparable. Both summaries are returned, for every whole second and as the mean of
    these:

    * ``uniad_L2_1s``, ``uniad_L2`` and so on are the values **at** that second (UniAD).
    * ``vad_L2_1s``, ``vad_L2`` and so on are the means of all steps **up to** that second (ST-P3, VAD, SparseDrive).

    The vehicle's box follows the heading of the plan and is shifted ahead by ``ego_offset``. A step where the box on
    the true path collides, too, does not count as a collision. The rate of such steps is ``truth_collision``. Frames
    whose true path or whose future boxes end early are left out, and ``num_frames`` is the number of the others. If
    there are none, values are NaN.

    The same values are returned for baselines that need no model. ``standing_still_…`` is a vehicle that stands still.
    ``constant_velocity_…`` is one that continues with its current velocity, if frames have ``ego_status``.

    Ground truth: ``gt_ego_fut_trajs`` [T, 2] (displacements), ``gt_ego_fut_masks`` [T], ``fut_boxes`` (T arrays [m, 7]
    in this frame) and ``ego_status`` [10] (the velocities ahead and to the left are numbers 6 and 7). Predictions:
    ``final_planning`` [T, 2], positions in the lidar frame (x to the right, y ahead).

    Args:
        ego_size: length and width of the vehicle in metres.
        ego_offset: the distance from the lidar to the centre of the vehicle's box in metres.
        steps_per_second: number of plan steps per second.
        prefix, collect_device: as in mmengine's BaseMetric.

    Raises:
        ValueError: a frame has no ground truth or no plan, or the plan has another length.

    Source: SparseDrive's evaluation, with separating axes instead of shapely.
    """

    default_prefix = "Planning"
    metric_names = ("num_frames", "truth_collision", "L2@*", "collision@*", "*uniad_*", "*vad_*")

    def __init__(
        self,
        ego_size: Sequence[float] = (4.084, 1.85),
        ego_offset: float = 0.5,
        steps_per_second: int = 2,
        prefix: str | None = None,
        collect_device: str = "cpu",
    ) -> None:
        super().__init__(collect_device=collect_device, prefix=prefix)
        self.ego_size = tuple(ego_size)
        self.ego_offset = ego_offset
        self.steps_per_second = steps_per_second

    true_keys = ("gt_ego_fut_trajs", "gt_ego_fut_masks", "fut_boxes")
    predicted_keys = ("final_planning",)

    def read(self, sample: Mapping[str, Any], prediction: Mapping[str, Any]) -> dict[str, Any]:
        """Return the distances and collisions [T] of the plan and of the baselines by name, if a frame is complete."""
        path = as_array(sample["gt_ego_fut_trajs"]).cumsum(axis=0)
        plan = as_array(prediction["final_planning"])
        expected = path.shape
        given = plan.shape
        if given != expected:
            raise InvalidInputError(
                f"PlanningMetric: frame {sample['token']}: final_planning must be {list(expected)}, got {list(given)}"
            )
        boxes = [as_array(step) for step in sample["fut_boxes"]]
        num_steps = len(path)
        frame: dict[str, Any] = {"complete": False, "steps": num_steps}
        if not as_array(sample["gt_ego_fut_masks"]).all() or len(boxes) < num_steps:
            return frame
        plans = {"": plan, "standing_still_": np.zeros_like(path)}
        self.check_true(sample, gt_ego_fut_trajs=path, ego_status=sample.get("ego_status"), fut_boxes=boxes)
        if "ego_status" in sample:
            status = as_array(sample["ego_status"])
            plans["constant_velocity_"] = constant_velocity_plan(status, num_steps, self.steps_per_second)
        size = self.ego_size
        offset = self.ego_offset
        unavoidable = collides(path, boxes, size, offset)
        frame["complete"] = True
        frame["truth_collision"] = unavoidable
        for name, candidate in plans.items():
            hits = collides(candidate, boxes, size, offset)
            frame[f"{name}L2"] = np.linalg.norm(candidate - path, axis=1)
            frame[f"{name}collision"] = hits & ~unavoidable
        return frame

    def compute_metrics(self, results: list[dict]) -> dict[str, float]:
        """Return the values of each step and both summaries, of the model and of the baselines."""
        frames = [frame for frame in results if frame["complete"]]
        num_steps = max((frame["steps"] for frame in results), default=0)
        names = ["", "standing_still_"]
        if frames and all("constant_velocity_L2" in frame for frame in frames):
            names.append("constant_velocity_")
        num_frames = len(frames)
        metrics: dict[str, float] = {"num_frames": num_frames}
        per_second = self.steps_per_second
        times = [f"{(t + 1) / per_second:g}" for t in range(num_steps)]
        rows = []
        for name in names:
            for kind, form in (("L2", "{:.3f}"), ("collision", "{:.2%}")):
                steps = _mean_of_steps(frames, f"{name}{kind}", num_steps)
                summary = horizons(steps, per_second, kind)
                if not name:
                    for time, value in zip(times, steps, strict=True):
                        metrics[f"{kind}@{time}s"] = float(value)
                for key, value in summary.items():
                    metrics[f"{name}{key}"] = value
                row = [*steps, summary[f"uniad_{kind}"], summary[f"vad_{kind}"]]
                rows.append((name.replace("_", " ").strip() or "model", kind, *map(form.format, row)))
        truth = _mean_of_steps(frames, "truth_collision", num_steps)
        metrics["truth_collision"] = mean_of(truth)
        table = table_text(("plan", "", *(f"{t} s" for t in times), "UniAD", "VAD"), rows)
        print_log(f"{table}{num_frames} of {len(results)} frames are complete", logger="current")
        return metrics


def _mean_of_steps(frames: list[dict], key: str, num_steps: int) -> np.ndarray:
    if not frames:
        return np.full(num_steps, np.nan)
    return np.mean([frame[key] for frame in frames], axis=0)


def horizons(steps: np.ndarray, steps_per_second: int, name: str) -> dict[str, float]:
    """Return the two summaries of the values [T] of the steps; see PlanningMetric.

    The keys are ``uniad_NAME_1s`` and so on, their mean ``uniad_NAME``, and the same with ``vad``.
    """
    summary: dict[str, float] = {}
    ends = range(steps_per_second, len(steps) + 1, steps_per_second)
    at_ends = [float(steps[end - 1]) for end in ends]
    up_to_ends = [mean_of(steps[:end]) for end in ends]
    for convention, values in (("uniad", at_ends), ("vad", up_to_ends)):
        for second, value in enumerate(values, start=1):
            summary[f"{convention}_{name}_{second}s"] = value
        summary[f"{convention}_{name}"] = mean_of(values)
    return summary


def constant_velocity_plan(status: np.ndarray, num_steps: int, steps_per_second: int = 2) -> np.ndarray:
    """Return the positions [T, 2], in the lidar frame, of a vehicle that keeps the velocity in ``status`` [10]."""
    ahead = status[6]
    left = status[7]
    return np.outer(np.arange(1, num_steps + 1) / steps_per_second, [-left, ahead])


def headings(plan: np.ndarray) -> np.ndarray:
    """Return the heading [T] at each position of a plan [T, 2] that starts at the origin.

    It is the direction of the chord between the neighbouring positions. If the first and the last position are less
    than 0.5 m apart, all headings point ahead.
    """
    if np.linalg.norm(plan[-1] - plan[0]) < _STANDING_M:
        return np.full(len(plan), _AHEAD)
    places = np.concatenate([np.zeros((1, 2)), plan, plan[-1:]])
    chord = places[2:] - places[:-2]
    return np.arctan2(chord[:, 1], chord[:, 0])


def collides(
    plan: np.ndarray, boxes: Sequence[np.ndarray], size: Sequence[float], offset: float
) -> np.ndarray:
    """Return whether the vehicle's box intersects one of ``boxes[t]`` [m, 7] at each step t, bool [T].

    Args:
        plan: [T, 2], the positions of the vehicle. boxes: x, y, z, length, width, height and yaw for each step.
        size: length and width of the vehicle. offset: the distance by which its centre is ahead of the position.
    """
    yaw = headings(plan)
    own = np.zeros((len(plan), 7))
    own[:, :2] = plan + offset * turn_about_z(yaw)[:, 0].T
    own[:, 3:5] = size
    own[:, 6] = yaw
    return np.array([boxes_intersect(box, others).any() for box, others in zip(own, boxes, strict=False)])


def boxes_intersect(box: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return whether a box [7] intersects each of the others [m, 7], as seen from above.

    Boxes that touch intersect. A box with NaN intersects nothing. Two rectangles are separate if and only if their
    projections onto an axis along a side of one of them are.
    """
    mine = box_corners(box[None])[:, :4, :2]
    theirs = box_corners(others)[:, :4, :2]
    meets = np.ones(len(others), dtype=bool)
    for corners in (mine, theirs):
        for neighbour in (1, 3):
            axis = corners[:, :1] - corners[:, neighbour : neighbour + 1]  # Its length does not matter.
            here = (mine * axis).sum(axis=2)
            there = (theirs * axis).sum(axis=2)
            meets &= (here.min(axis=1) <= there.max(axis=1)) & (there.min(axis=1) <= here.max(axis=1))
    return meets
