"""Conversion of a sample's predictions to the types of JSON."""

from collections.abc import Sequence
from typing import Any

from visdet.checks.finite import DIVERGED, check_finite
from visdet.structures.driving_data_sample import predictions_of

from ..errors import ConfigError
from .detections import detections_of

# What the record of a box may have, and what the model calls it.
_OF_BOXES = {
    "box_3d": "boxes_3d",
    "track": "instance_ids",
    "trajectories": "trajs_3d",
    "trajectory_scores": "trajs_score",
}


def record_of(sample: dict[str, Any], dataset_meta: dict[str, Any]) -> dict[str, Any]:
    """Return the predictions for a sample of any model in types that JSON can represent.

    Args:
        sample: the result of the sample's ``to_dict``.
        dataset_meta: the meta information of the data set. ``classes`` has the names of the box labels,
            ``category_ids`` may have their numbers in the annotation file, and ``map_classes`` names the map labels.

    Returns:
        a dict. Its keys depend on the sample:

        * The record of an image has the keys of :meth:`.Detections.to_dict`.
        * The record of a driving frame has its ``token``, and those of ``boxes``, ``lines`` and ``plan`` that the model
          predicts. Their coordinates are in metres in the lidar frame. A box has ``class``, ``label``, ``score`` and
          ``box_3d``. It also has ``track`` if the model tracks, and ``trajectories`` and ``trajectory_scores`` if the
          model predicts motion. A line has ``class``, ``label``, ``score`` and ``points`` [n][2]. The ``plan`` is a
          list of positions [T][2].

    Raises:
        ConfigError: the sample holds no predictions.
    """
    if "pred_instances" in sample:
        return detections_of(sample, dataset_meta["classes"], category_ids=dataset_meta.get("category_ids"))
    found = predictions_of(sample)
    if not found:
        raise ConfigError(f"the samples hold no predictions. Their fields are: {', '.join(sample) or 'none'}")
    check_finite(f"the predictions for token {sample.get('token')}", DIVERGED, **found)
    return _driving_record(sample, found, dataset_meta)


def _driving_record(
    sample: dict[str, Any], found: dict[str, Any], dataset_meta: dict[str, Any]
) -> dict[str, Any]:
    record: dict[str, Any] = {"token": sample.get("token")}
    if "boxes_3d" in found:
        columns = {key: found[name] for key, name in _OF_BOXES.items() if name in found}
        names = dataset_meta["classes"]
        record["boxes"] = _objects(found["labels_3d"], found["scores_3d"], names, columns)
    if "vectors" in found:
        columns = {"points": found["vectors"]}
        record["lines"] = _objects(found["labels"], found["scores"], dataset_meta["map_classes"], columns)
    if "final_planning" in found:
        record["plan"] = _rounded(found["final_planning"])
    return record


def _objects(labels: Any, scores: Any, names: Sequence[str], columns: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a record of each object, with the values that each column has for it."""
    records = []
    for label, score in zip(labels.tolist(), scores.tolist(), strict=True):
        records.append({"class": names[label], "label": label, "score": round(score, 5)})
    for key, values in columns.items():
        for record, value in zip(records, values, strict=True):
            record[key] = _rounded(value)
    return records


def _rounded(values: Any) -> Any:
    """Return a tensor or an array as nested lists of numbers, which are rounded to four decimals."""
    rows = values.tolist() if hasattr(values, "tolist") else values
    return [_rounded(row) for row in rows] if isinstance(rows, list) else round(rows, 4)
