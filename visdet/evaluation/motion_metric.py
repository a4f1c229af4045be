"""Comparison of the predicted and the true trajectories of other road users."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from mmengine.logging import print_log

from visdet.checks.arguments import Names
from visdet.errors import InvalidInputError
from visdet.registry import METRICS
from visdet.structures.tables import table_text

from .detection_curves import match_frames, take_nearest
from .driving_metric import DrivingBoxMetric, as_array

# The merged class of each class of boxes. Classes that are not listed are not evaluated.
MOTION_CLASSES = {
    "car": "car",
    "truck": "car",
    "construction_vehicle": "car",
    "bus": "car",
    "trailer": "car",
    "motorcycle": "car",
    "bicycle": "car",
    "pedestrian": "pedestrian",
}
_MAX_DISTANCE_M = 2.0
_MISS_M = 2.0
_FALSE_ALARM_COST = 0.5
_NAMES = ("minADE", "minFDE", "MR", "EPA")


@METRICS.register_module()
class MotionMetric(DrivingBoxMetric):
    """minADE, minFDE, miss rate and EPA of the predicted trajectories, after merging classes.

    Boxes of a merged class, the highest score first, are matched with the nearest free true box within 2 m. For the
    matched boxes, each with the best of its K trajectories in each value:

    * ``minADE`` and ``minFDE`` (m) are the mean distance over the known steps and the distance at the last known step.
    * ``MR`` is the fraction of boxes all of whose trajectories are more than 2 m off at some step.
    * ``EPA`` is the number of matched boxes whose trajectory ends within 2 m of the true end, minus half the number of
      boxes without a match, divided by the number of true boxes. A box with a wrong end leaves its true box free for
      the next box.

    The first three are averaged over recalls from 0.1 to the highest one, like nuScenes' true-positive errors. They are
    NaN if the recall does not reach 0.1. The same values are returned under ``constant_velocity_…`` for trajectories
    that continue with the predicted velocity of each box, as a baseline that predicted trajectories should beat.

    Ground truth: ``gt_bboxes_3d``, ``gt_labels_3d``, ``gt_agent_fut_trajs`` [n, T, 2] (displacements),
    ``gt_agent_fut_masks`` [n, T], ``token``, ``T_global`` and, optionally, ``ego2global_translation``. Predictions:
    ``boxes_3d`` [m, 9 or 10], ``scores_3d``, ``labels_3d``, ``trajs_3d`` [m, K, T, 2] (positions in the lidar frame)
    and, optionally, ``cls_scores``, to which the threshold then applies.

    Args:
        classes: names of the labels. The default is those of the data set.
        class_mapping: the merged class of each class. Classes that are not named are not evaluated.
        class_range: the distance from the vehicle up to which boxes of a merged class count, or one for all.
        score_threshold: boxes with a lower score do not count.
        unknown_is_right: count true boxes with an unknown future as predicted without error in the first three values,
            as published values do, instead of leaving them out. In EPA they are never found.
        steps_per_second: number of trajectory steps per second.
        prefix, collect_device: as in mmengine's BaseMetric.

    Raises:
        ValueError: a frame has no ground truth or no trajectories, or no class is in ``class_mapping``.

    Source: SparseDrive's evaluation (UniAD's EPA, arXiv 2212.09045). Differences: ``unknown_is_right``, and NaN instead
    of 1 for a recall below 0.1.
    """

    default_prefix = "Motion"
    default_range = {"car": 50, "pedestrian": 40}
    metric_names = tuple(f"*_{name}" for name in _NAMES)

    def __init__(
        self,
        classes: Names | None = None,
        class_mapping: Mapping[str, str] | None = None,
        class_range: Mapping[str, float] | float | None = None,
        score_threshold: float = 0.2,
        unknown_is_right: bool = False,
        steps_per_second: int = 2,
        prefix: str | None = None,
        collect_device: str = "cpu",
    ) -> None:
        super().__init__(classes, class_range, prefix, collect_device)
        self.class_mapping = dict(MOTION_CLASSES if class_mapping is None else class_mapping)
        self.score_threshold = score_threshold
        self.unknown_is_right = unknown_is_right
        self.steps_per_second = steps_per_second

    true_keys = ("gt_bboxes_3d", "gt_agent_fut_trajs", "gt_agent_fut_masks")
    predicted_keys = ("trajs_3d",)

    def read(self, sample: Mapping[str, Any], prediction: Mapping[str, Any]) -> dict[str, Any]:
        """Return the positions and trajectories of a frame."""
        paths = as_array(prediction["trajs_3d"])
        steps = as_array(sample["gt_agent_fut_trajs"])
        boxes = as_array(prediction["boxes_3d"])
        gt_boxes = as_array(sample["gt_bboxes_3d"])
        shape = paths.shape
        num_boxes = len(boxes)
        num_true = len(gt_boxes)
        num_steps = steps.shape[1] if len(steps) else shape[-2]
        if shape != (num_boxes, *shape[1:2], num_steps, 2):
            raise InvalidInputError(
                f"MotionMetric: frame {sample['token']}: trajs_3d must be [{num_boxes}, K, {num_steps}, 2], got "
                f"{list(shape)}"
            )
        steps = steps.reshape(num_true, num_steps, 2)
        known = as_array(sample["gt_agent_fut_masks"]).reshape(num_true, num_steps) > 0
        self.check_true(sample, gt_agent_fut_trajs=steps[known])
        kept = self.best_boxes(prediction, self.score_threshold)
        times = np.arange(1, num_steps + 1)[:, None] / self.steps_per_second
        constant = boxes[kept, None, :2] + times * boxes[kept, None, 7:9]
        return self.boxes_of(
            sample,
            prediction,
            kept,
            gt_paths=gt_boxes[:, None, :2] + steps.cumsum(axis=1),
            gt_known=known,
            paths=paths[kept],
            constant=constant[:, None],
        )

    @property
    def merged_names(self) -> list[str | None]:
        """The merged class of each label, or None if it is not evaluated."""
        return [self.class_mapping.get(name) for name in self.names]

    def check_classes(self) -> None:
        for name in filter(None, self.merged_names):
            self.range_of(name)

    def compute_metrics(self, results: list[dict]) -> dict[str, float]:
        """Return the four values of each merged class, for the model and for constant velocity."""
        merged = self.merged_names
        names = list(dict.fromkeys(filter(None, merged)))
        if not names:
            raise InvalidInputError(
                f"MotionMetric: class_mapping must name one of {', '.join(self.names)}, got "
                f"{', '.join(self.class_mapping)}"
            )
        metrics: dict[str, float] = {}
        rows = []
        for name in names:
            reaches = [self.range_of(name) if other == name else 0.0 for other in merged]
            frames = [self.in_range(frame, reaches) for frame in results]
            for prefix, key in (("", "paths"), ("constant_velocity_", "constant")):
                of_source = [{**frame, "paths": frame[key]} for frame in frames]
                scores = motion_scores(of_source, self.unknown_is_right)
                for value_name, value in scores.items():
                    metrics[f"{prefix}{name}_{value_name}"] = value
                source = prefix.replace("_", " ").strip() or "model"
                rows.append((name, source, *(scores[key] for key in _NAMES)))
        print_log(table_text(("class", "paths", *_NAMES), rows), logger="current")
        return metrics


def motion_scores(
    frames: Sequence[dict[str, np.ndarray]], unknown_is_right: bool = False
) -> dict[str, float]:
    """Return minADE, minFDE, MR and EPA of one class; see MotionMetric.

    Args:
        frames: dicts with ``gt_boxes`` [n, >= 2], ``gt_paths`` [n, T, 2], ``gt_known`` bool [n, T], ``boxes``
            [m, >= 2], ``scores`` [m] and ``paths`` [m, K, T, 2].
        unknown_is_right: as in MotionMetric.
    """
    matches = match_frames(frames, _MAX_DISTANCE_M)
    paths = _of_all(frames, "paths")
    futures = list(zip(_of_all(frames, "gt_paths"), _of_all(frames, "gt_known"), strict=True))
    pairs = zip(matches.rows, matches.truth_rows, strict=True)
    errors = np.array([displacement_errors(paths[row], *futures[true]) for row, true in pairs]).reshape(-1, 3)
    if unknown_is_right:
        errors = np.nan_to_num(errors, nan=0.0, posinf=np.inf)
    known = ~np.isnan(errors).any(axis=1)
    scores = dict.fromkeys(_NAMES, float("nan"))
    if known.any():
        for name, column in zip(_NAMES, errors.T, strict=False):
            scores[name] = matches.mean_error(column, known, unreached=np.nan)
    found = 0
    for frame in frames:
        taken = take_nearest(frame, _MAX_DISTANCE_M, final_errors(frame) < _MISS_M)
        found += np.count_nonzero(taken >= 0)
    num_truths = matches.num_truths
    if num_truths:
        scores["EPA"] = (found - _FALSE_ALARM_COST * matches.num_false) / num_truths
    return scores


def _of_all(frames: Sequence[dict[str, np.ndarray]], key: str) -> list[np.ndarray]:
    """Return the rows of all frames. Those of frames without boxes may have another shape."""
    return list(chain.from_iterable(frame[key] for frame in frames))


def displacement_errors(
    paths: np.ndarray, truth: np.ndarray, known: np.ndarray
) -> tuple[float, float, float]:
    """Return minADE and minFDE in metres, and 1 for a miss or 0 otherwise.

    All three are NaN if no step is known. A trajectory of NaN counts as infinitely far.

    Args:
        paths: [K, T, 2]. truth: [T, 2]. known: bool [T], the steps that count.
    """
    steps = np.flatnonzero(known)
    nan = np.nan
    if not len(steps):
        return nan, nan, nan
    distances = _distances(paths[:, steps], truth[steps])
    missed = distances.max(axis=1).min() > _MISS_M
    return distances.mean(axis=1).min(), distances[:, -1].min(), float(missed)


def _distances(places: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Return the distances [...] of places [..., 2] from the true ones. Those of NaN are infinitely far."""
    distances = np.linalg.norm(places - truth, axis=-1)
    distances[np.isnan(distances)] = np.inf
    return distances


def final_errors(frame: dict[str, np.ndarray]) -> np.ndarray:
    """Return the minFDE [m, n] of the trajectories of each box to each true box.

    It is infinite if the future of the true box is unknown.
    """
    known = frame["gt_known"]
    truth = frame["gt_paths"]
    last = known.shape[1] - 1 - known[:, ::-1].argmax(axis=1)
    ends = truth[np.arange(len(truth)), last]
    distances = _distances(frame["paths"][:, :, last], ends)  # [m, K, n]
    return np.where(known.any(axis=1), distances.min(axis=1), np.inf)
