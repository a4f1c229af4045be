"""nuScenes' tracking metrics AMOTA and AMOTP."""

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np

from visdet.checks.arguments import Names
from visdet.registry import METRICS

from .clear_mot import Frame, interpolate, motar_curve
from .driving_metric import DrivingBoxMetric, as_array, logged, mean_of

_NOT_TRACKED = ("barrier", "traffic_cone", "construction_vehicle")
_MAX_DISTANCE_M = 2.0
_OF_TRACKS = ("ids", "boxes", "scores", "labels")
_SUMMARY = ("AMOTA", "AMOTP", "MOTA", "recall", "IDS")


@METRICS.register_module()
class TrackingMetric(DrivingBoxMetric):
    """AMOTA and AMOTP over 40 recalls, and MOTA, recall and identity switches at the best threshold.

    ``AMOTA`` is the mean over recalls of max(0, MOTAR), which is 0 for a recall that is not reached. ``AMOTP`` is the
    mean distance in metres, which is 2 for a recall that is not reached. The score of a track is the mean score of its
    boxes, and gaps in tracks are filled by linear interpolation. Values are means over the classes that have true
    boxes, and NaN if none has, but ``IDS`` is a sum. Cones, barriers and construction vehicles are not tracked.

    Ground truth: ``gt_bboxes_3d``, ``gt_labels_3d``, ``instance_id``, ``token``, ``scene_token``, ``timestamp``,
    ``T_global`` and, optionally, ``ego2global_translation``. Predictions: ``boxes_3d``, ``scores_3d``, ``labels_3d``,
    ``instance_ids`` and, optionally, ``cls_scores``, to which the threshold then applies. Boxes with a negative id
    belong to no track, in either.

    Args:
        classes: names of the labels. The default is those of the data set.
        class_range: the distance up to which boxes of a class count, or one for all.
        score_threshold: boxes with a lower score do not count.
        prefix, collect_device: as in mmengine's BaseMetric.

    Raises:
        ValueError: a prediction has no ``instance_ids``, or a class has no range.

    Source: nuscenes-devkit's tracking evaluation (tracking_nips_2019), without pandas and motmetrics. In small
    sets, rounding may decide whether a recall is reached exactly, and AMOTA may then differ from the devkit's by 0.08.
    """

    default_prefix = "Tracking"
    metric_names = (*_SUMMARY, "*_AMOTA")

    def __init__(
        self,
        classes: Names | None = None,
        class_range: Mapping[str, float] | float | None = None,
        score_threshold: float = 0.2,
        prefix: str | None = None,
        collect_device: str = "cpu",
    ) -> None:
        super().__init__(classes, class_range, prefix, collect_device)
        self.score_threshold = score_threshold

    true_keys = ("gt_bboxes_3d", "instance_id")
    predicted_keys = ("instance_ids",)

    def read(self, sample: Mapping[str, Any], prediction: Mapping[str, Any]) -> dict[str, Any]:
        """Return the ids and the positions in the world of a frame."""
        true_ids = as_array(sample["instance_id"])
        ids = as_array(prediction["instance_ids"])
        time = sample["timestamp"]
        self.check_true(sample, instance_id=true_ids, timestamp=time)
        kept = self.best_boxes(prediction, self.score_threshold)
        no_scores = np.zeros_like(true_ids, dtype=float)
        frame = self.boxes_of(sample, prediction, kept, gt_ids=true_ids, gt_scores=no_scores, ids=ids[kept])
        frame["scene"] = sample["scene_token"]
        frame["time"] = float(time)
        return frame

    def compute_metrics(self, results: list[dict]) -> dict[str, float]:
        """Return AMOTA, AMOTP, MOTA, IDS and recall, and the AMOTA of each class."""
        scenes: dict[str, list[dict]] = {}
        for frame in sorted(results, key=itemgetter("time")):
            scenes.setdefault(frame["scene"], []).append(frame)
        names = self.names
        reaches = [0.0 if name in _NOT_TRACKED else self.range_of(name) for name in names]
        tracks = [self._tracks(scene, reaches) for scene in scenes.values()]
        rows: dict[str, dict[str, float]] = {}
        for label, name in enumerate(names):  # There are no boxes of classes that are not tracked.
            of_class = [_of_class(scene, label) for scene in tracks]
            if any(len(truth.ids) for truth, _ in chain.from_iterable(of_class)):
                rows[name] = _scores_of_class(of_class)
        of_classes = list(rows.values())
        metrics = {name: mean_of([row[name] for row in of_classes]) for name in _SUMMARY}
        metrics["IDS"] = float(sum(row["IDS"] for row in of_classes))
        return logged(rows, metrics, "AMOTA")

    def _tracks(self, scene: list[dict], reaches: Sequence[float]) -> list[tuple[Frame, Frame]]:
        """Return the (truth, prediction) of all tracked classes in each frame, after filling gaps in tracks.

        A predicted track may change its class. Its mean score and its gaps are those of the whole track.
        """
        truths: list[Frame] = []
        predictions: list[Frame] = []
        for frame in scene:
            objects = self.in_range(frame, reaches)
            for kind, frames in (("gt_", truths), ("", predictions)):
                ids, boxes, scores, labels = (objects[f"{kind}{key}"] for key in _OF_TRACKS)
                frames.append(Frame(ids, boxes[:, :2], scores, labels).rows(ids >= 0))
        times = [frame["time"] for frame in scene]
        predictions = _with_track_scores(predictions)
        return list(zip(interpolate(truths, times), interpolate(predictions, times), strict=True))


def _with_track_scores(frames: list[Frame]) -> list[Frame]:
    """Return the frames after replacing the score of each box by the mean over its track."""
    ids = np.concatenate([frame.ids for frame in frames])
    scores = np.concatenate([frame.scores for frame in frames])
    tracks, inverse = np.unique(ids, return_inverse=True)
    means = np.bincount(inverse, scores) / np.bincount(inverse)
    return [frame._replace(scores=means[np.searchsorted(tracks, frame.ids)]) for frame in frames]


def _of_class(scene: list[tuple[Frame, Frame]], label: int) -> list[tuple[Frame, Frame]]:
    return [(truth.rows(truth.labels == label), found.rows(found.labels == label)) for truth, found in scene]


def _scores_of_class(scenes: list[list[tuple[Frame, Frame]]]) -> dict[str, float]:
    """Return the scores of one class, which has true boxes."""
    curve = motar_curve(scenes, _MAX_DISTANCE_M)
    motar = [point.motar for point in curve]
    motp = np.nan_to_num([point.motp for point in curve], nan=_MAX_DISTANCE_M)
    best = max(curve, key=attrgetter("mota", "objects"))
    switches = best.switches
    return {
        "AMOTA": mean_of(motar),
        "AMOTP": mean_of(motp),
        "MOTA": best.mota,
        "recall": (best.matches + switches) / max(best.objects, 1),
        "IDS": switches,
    }
