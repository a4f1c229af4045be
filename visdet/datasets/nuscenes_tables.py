"""Reading of nuScenes' tables without the devkit."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from visdet.errors import MissingFileError, UnknownNameError, reading

# The classes of nuScenes' detection task, in the order of their labels.
NUSCENES_CLASSES = (
    "car",
    "truck",
    "construction_vehicle",
    "bus",
    "trailer",
    "barrier",
    "motorcycle",
    "bicycle",
    "pedestrian",
    "traffic_cone",
)

_TABLES = (
    "attribute",
    "calibrated_sensor",
    "category",
    "ego_pose",
    "instance",
    "log",
    "sample",
    "sample_annotation",
    "sample_data",
    "scene",
    "sensor",
)


class NuScenesTables:
    """The records of one version of nuScenes by table and token. It has the sensor data of key frames only.

    Args:
        root: the folder with ``v1.0-…/``, ``samples/`` and ``maps/``.
        version: ``v1.0-trainval``, ``v1.0-mini`` or ``v1.0-test``.

    Raises:
        FileNotFoundError: the folder or one of its tables is missing.
    """

    def __init__(self, root: str | Path, version: str) -> None:
        self.root = Path(root)
        self.version = version
        folder = self.root / version
        if not folder.is_dir():
            raise MissingFileError(f"nuScenes {version} is not in {self.root}: there is no {folder}")
        tables: dict[str, dict[str, dict]] = {}
        self._records = tables
        for name in _TABLES:
            path = folder / f"{name}.json"
            with reading(f"nuScenes table {path}"):
                records = json.loads(path.read_text())
            if name == "sample_data":
                records = [record for record in records if record["is_key_frame"]]
            tables[name] = {record["token"]: record for record in records}
        self._data: dict[tuple[str, str], dict] = {}
        for record in tables["sample_data"].values():
            calibration = self.get("calibrated_sensor", record["calibrated_sensor_token"])
            channel = self.get("sensor", calibration["sensor_token"])["channel"]
            self._data[record["sample_token"], channel] = record
        self.annotations_of_sample: defaultdict[str, list[dict]] = defaultdict(list)
        for record in tables["sample_annotation"].values():
            self.annotations_of_sample[record["sample_token"]].append(record)
        # nuScenes numbers instances by their place in the table.
        self.number_of_instance = {token: number for number, token in enumerate(tables["instance"])}

    def get(self, table: str, token: str) -> dict[str, Any]:
        """Return a record.

        Raises:
            KeyError: the table has no such token.
        """
        try:
            return self._records[table][token]
        except KeyError:
            raise UnknownNameError(
                f"nuScenes table {table}.json of {self.version} has no token {token!r}"
            ) from None

    def scenes(self) -> list[dict]:
        """Return all scenes in the table's order."""
        return list(self._records["scene"].values())

    def samples(self, scene: dict) -> list[dict]:
        """Return the key frames of a scene in order of time."""
        samples = []
        token = scene["first_sample_token"]
        while token:
            samples.append(self.get("sample", token))
            token = samples[-1]["next"]
        return samples

    def data(self, sample: dict, channel: str) -> dict:
        """Return the record of a sensor's data in a key frame.

        Raises:
            KeyError: the frame has no data of this sensor.
        """
        try:
            return self._data[sample["token"], channel]
        except KeyError:
            raise UnknownNameError(f"nuScenes frame {sample['token']} has no data of {channel}") from None

    def category(self, annotation: dict) -> str:
        """Return the name of the category of an annotation, such as ``vehicle.car``."""
        instance = self.get("instance", annotation["instance_token"])
        return self.get("category", instance["category_token"])["name"]

    def attribute(self, annotation: dict) -> str:
        """Return the name of the first attribute of an annotation, or '' if there is none."""
        tokens = annotation["attribute_tokens"]
        return self.get("attribute", tokens[0])["name"] if tokens else ""

    def location(self, scene: dict) -> str:
        """Return the name of the map on which a scene was recorded."""
        return self.get("log", scene["log_token"])["location"]
