"""Base classes and functions of the metrics of driving models."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar

import numpy as np
import torch
from mmengine.dist import all_gather_object
from mmengine.evaluator import BaseMetric
from mmengine.logging import print_log

from visdet.checks.arguments import AtLeast0, Names, also_takes
from visdet.checks.finite import DIVERGED, check_finite
from visdet.errors import InvalidInputError
from visdet.structures.driving_data_sample import predictions_of
from visdet.structures.poses import moved_boxes
from visdet.structures.tables import table_of

from .precision_recall import CurveReport

# The predictions that metrics read, whose numbers must be finite.
_PREDICTED = (
    *("boxes_3d", "scores_3d", "labels_3d", "instance_ids", "cls_scores", "trajs_3d", "final_planning"),
    *("vectors", "scores", "labels"),
)
# Boxes of nuScenes' classes that are farther away from the vehicle than this, in metres, do not count.
CLASS_RANGE = {
    "car": 50,
    "truck": 50,
    "bus": 50,
    "trailer": 50,
    "construction_vehicle": 50,
    "pedestrian": 40,
    "motorcycle": 40,
    "bicycle": 40,
    "traffic_cone": 30,
    "barrier": 30,
}
_MAX_BOXES = 500  # of a frame, which nuScenes' evaluation counts
Objects = Mapping[str, np.ndarray]  # see DrivingBoxMetric.boxes_of


class DrivingMetric(BaseMetric):
    """A metric over frames that have a ``token``.

    Each process keeps one dict per frame. At the end, the frames of all processes are gathered, and every token counts
    once. Samplers may therefore repeat frames, and ranks may have different numbers of
    frames. Different frames must have different tokens. After an evaluation, ``curve_report`` holds the precision over
    the recall of each class, if the metric measures it.

    Attributes:
        true_keys: what a sample must have. predicted_keys: what its predictions must have.
        classes: the names of the labels, if they are not those of the data set.
        meta_key: the entry of the data set's meta information with its names.
    """

    classes: Sequence[str] | None = None
    meta_key: ClassVar[str] = "classes"
    true_keys: ClassVar[tuple[str, ...]] = ()
    predicted_keys: ClassVar[tuple[str, ...]] = ()
    curve_report: CurveReport | None = None

    @property
    def dataset_meta(self) -> Any:
        """The meta information of the data set.

        Raises:
            InvalidInputError: ``classes`` has a name of the data set for another label.
        """
        return self._dataset_meta

    @dataset_meta.setter
    def dataset_meta(self, dataset_meta: dict) -> None:
        self._dataset_meta = dataset_meta
        own = list(dataset_meta.get(self.meta_key, ()))
        classes = self.classes or ()
        if any(name in own and own.index(name) != label for label, name in enumerate(classes)):
            raise InvalidInputError(
                f"{type(self).__name__}: classes must have the order of the data set's labels, {own}, got {classes}"
            )
        self.check_classes()

    def check_classes(self) -> None:
        """Check what depends on the names of the labels, before the evaluation of a whole data set."""

    @property
    def names(self) -> Sequence[str]:
        """The names of the labels."""
        return self.classes or self.dataset_meta[self.meta_key]

    def process(self, data_batch: dict, data_samples: Sequence[dict]) -> None:
        """Check the frames of a batch, and keep what :meth:`read` returns of them, with ``token`` and ``place``."""
        for sample in data_samples:
            prediction = predictions_of(sample)
            name = f"{type(self).__name__}: frame {sample['token']}"
            missing = [key for key in self.true_keys if key not in sample]
            if missing:
                raise InvalidInputError(
                    f"{name} has no {', '.join(missing)}; the data set needs test_mode=True and labels of "
                    "every frame, and the test pipeline must keep them"
                )
            missing = [key for key in self.predicted_keys if key not in prediction]
            if missing:
                raise InvalidInputError(f"{name}: the prediction has no {', '.join(missing)}")
            found = {f"predicted {key}": prediction[key] for key in _PREDICTED if key in prediction}
            check_finite(name, DIVERGED, **found)
            poses = {key: sample[key] for key in ("T_global", "ego2global_translation") if key in sample}
            self.check_true(sample, **poses)
            given = sample.get
            time = given("timestamp")
            pose = given("T_global")
            place = {
                "scene_token": given("scene_token"),
                "timestamp": None if time is None else float(time),
                "T_global": None if pose is None else as_array(pose).tolist(),
            }
            frame = self.read(sample, prediction)
            self.results.append({"token": sample["token"], "place": place, **frame})

    def read(self, sample: Mapping[str, Any], prediction: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the metric keeps of a frame, given its sample and all of its predictions in one dict."""
        raise NotImplementedError

    def check_true(self, sample: Mapping[str, Any], **values: Any) -> None:
        """Raise an error if values of the ground truth are NaN or infinite."""
        name = f"{type(self).__name__}: frame {sample['token']}"
        check_finite(name, **{f"true {key}": value for key, value in values.items()})

    def evaluate(self, size: int) -> dict[str, Any]:
        """Return the metrics over the frames of all processes by name. ``size`` is not used."""
        name = type(self).__name__
        frames = _by_token(chain.from_iterable(all_gather_object(self.results)), name)
        if not frames:
            print_log(f"{name}: no frame was evaluated", logger="current")
        metrics = self.compute_metrics(frames)
        self.results.clear()
        prefix = self.prefix
        return {f"{prefix}/{key}" if prefix else key: value for key, value in metrics.items()}

    @abstractmethod
    def compute_metrics(self, results: list[dict]) -> dict[str, float]:
        """Return the metrics of these frames."""


def _by_token(gathered: Iterable[dict], name: str) -> list[dict]:
    """Return one frame of each token.

    Raises:
        ValueError: different frames have the same token, or two frames of a scene have the same time.
    """
    frames: dict[Any, dict] = {}
    moments: dict[tuple, Any] = {}
    for frame in gathered:
        token = frame["token"]
        place = frame.get("place", {})
        other = frames.setdefault(token, frame).get("place", {})
        different = [key for key in place if place[key] != other.get(key)]
        if different:
            key = different[0]
            raise InvalidInputError(
                f"{name}: two frames have the token {token!r}, but their {key} is {other.get(key)} and "
                f"{place[key]}. Frames of several data sets need tokens of their own"
            )
        moment = (place.get("scene_token"), place.get("timestamp"))
        if None not in moment and moments.setdefault(moment, token) != token:
            raise InvalidInputError(
                f"{name}: the frames {moments[moment]!r} and {token!r} of scene {moment[0]!r} have the same "
                f"time {moment[1]}. Scenes of several data sets need tokens of their own"
            )
    return list(frames.values())


class DrivingBoxMetric(DrivingMetric):
    """A metric over boxes of several classes, which count up to a distance from the vehicle.

    Args:
        classes: names of the labels. The default is those of the data set.
        class_range: the distance in metres for each class, or one for all. The default is ``default_range``.
        prefix, collect_device: as in mmengine's BaseMetric.
    """

    default_range: ClassVar[Mapping[str, float]] = CLASS_RANGE

    @also_takes(anchors=...)
    def __init__(
        self,
        classes: Names | None = None,
        class_range: Mapping[str, AtLeast0] | AtLeast0 | None = None,
        prefix: str | None = None,
        collect_device: str = "cpu",
    ) -> None:
        super().__init__(collect_device=collect_device, prefix=prefix)
        self.classes = classes
        self.class_range = self.default_range if class_range is None else class_range

    def check_classes(self) -> None:
        for name in self.names:
            self.range_of(name)

    def range_of(self, name: str) -> float:
        """Return the distance of a class.

        Raises:
            InvalidInputError: ``class_range`` does not name the class.
        """
        reach = self.class_range
        if not isinstance(reach, Mapping):
            return float(reach)
        if name not in reach:
            raise InvalidInputError(
                f"{type(self).__name__}: class_range must name {name}, got {', '.join(reach)}"
            )
        return reach[name]

    def boxes_of(
        self,
        sample: Mapping[str, Any],
        prediction: Mapping[str, Any],
        kept: np.ndarray,
        **others: np.ndarray,
    ) -> dict[str, Any]:
        """Return the ``objects`` of a frame, which are its boxes [n, 9] in the world with their labels and scores.

        The ``vehicle`` [2] is at ``ego2global_translation`` of the sample, or else where the lidar frame is.

        Args:
            sample: the frame. prediction: all of its predictions. kept: the rows of those that count.
            others: more values of the boxes. The names of those of true boxes begin with ``gt_``.

        Raises:
            InvalidInputError: true boxes are NaN or infinite.
        """
        true_boxes = as_array(sample["gt_bboxes_3d"])
        self.check_true(sample, gt_bboxes_3d=true_boxes[:, :7])
        pose = np.asarray(sample["T_global"], dtype=np.float64)
        vehicle = sample.get("ego2global_translation", pose[:3, 3])
        objects = {
            "gt_boxes": boxes_in_world(true_boxes, pose),
            "gt_labels": as_array(sample["gt_labels_3d"]).reshape(-1).astype(np.int64),
            "boxes": boxes_in_world(prediction["boxes_3d"], pose)[kept],
            "scores": as_array(prediction["scores_3d"])[kept],
            "labels": as_array(prediction["labels_3d"])[kept].astype(np.int64),
        }
        return {"vehicle": np.asarray(vehicle, dtype=np.float64)[:2], "objects": objects | others}

    @staticmethod
    def in_range(frame: Mapping[str, Any], reaches: Sequence[float]) -> Objects:
        """Return the true boxes and the predictions of a frame that count.

        Args:
            frame: the result of :meth:`boxes_of`.
            reaches: the distance in metres of each label. With 0, boxes of the label do not count.
        """
        reach = np.array([*reaches, 0.0])
        objects = frame["objects"]
        masks = []
        for kind in ("gt_", ""):
            labels = objects[f"{kind}labels"]
            distance = np.linalg.norm(objects[f"{kind}boxes"][:, :2] - frame["vehicle"], axis=1)
            masks.append(distance < reach[np.where(labels < len(reaches), labels, -1)])
        return chosen(objects, *masks)

    @staticmethod
    def best_boxes(prediction: Mapping[str, Any], least_score: float = -np.inf) -> np.ndarray:
        """Return the rows of the 500 boxes of the highest scores, without those of less confidence than a score."""
        scores = as_array(prediction["scores_3d"])
        best = np.argsort(-scores, kind="stable")[:_MAX_BOXES]
        confidence = as_array(prediction.get("cls_scores", scores)).reshape(-1)
        return best[confidence[best] >= least_score]


def chosen(objects: Objects, is_true: np.ndarray, is_found: np.ndarray) -> Objects:
    """Return the true boxes and the predictions of a frame for which the masks are True."""
    return {key: values[is_true if key.startswith("gt_") else is_found] for key, values in objects.items()}


def mean_of(values: Sequence[float] | np.ndarray) -> float:
    """Return the mean of values, or NaN if there are none."""
    return float(np.mean(values)) if len(values) else float("nan")


def logged(rows: Mapping[str, Mapping[str, float]], summary: dict[str, float], key: str) -> dict[str, float]:
    """Log a table with a line for each class, and a summary. Return it with the values ``key`` of the classes."""
    print_log(table_of(rows, summary), logger="current")
    for name, row in rows.items():
        summary[f"{name}_{key}"] = row[key]
    return summary


def as_array(value: Any) -> np.ndarray:
    """Return a tensor or a sequence as a numpy array. Floating-point numbers become float64."""
    if isinstance(value, torch.Tensor):
        value = (value.double() if value.is_floating_point() else value).numpy(force=True)
    array = np.asarray(value)
    return array.astype(np.float64, copy=False) if array.dtype.kind == "f" else array


def boxes_in_world(boxes: Any, pose: np.ndarray) -> np.ndarray:
    """Return boxes [n, 9] (x, y, z, length, width, height, yaw, vx, vy) in the world. Missing velocities are 0.

    Args:
        boxes: [n, 7], [n, 9] or [n, 10], as an array or a tensor. pose: [4, 4], that of their frame in the world.
    """
    boxes = as_array(boxes)[:, :9]
    return moved_boxes(np.pad(boxes.astype(np.float64), ((0, 0), (0, 9 - boxes.shape[1]))), pose)
