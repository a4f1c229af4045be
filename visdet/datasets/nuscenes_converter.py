"""Conversion of nuScenes' raw tables to info records."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from visdet.errors import MissingFileError
from visdet.structures.poses import inverse_pose, moved_points, pose_matrix, turn_about_z, yaw_of

from .frame_records import lidar_to_global
from .future_steps import coming_steps, command_of, padded_steps
from .nuscenes_maps import NuScenesMap
from .nuscenes_tables import NuScenesTables

_CAMERAS = ("CAM_FRONT", "CAM_FRONT_RIGHT", "CAM_FRONT_LEFT", "CAM_BACK", "CAM_BACK_LEFT", "CAM_BACK_RIGHT")
_CLASS_OF_CATEGORY = {
    "movable_object.barrier": "barrier",
    "vehicle.bicycle": "bicycle",
    "vehicle.bus.bendy": "bus",
    "vehicle.bus.rigid": "bus",
    "vehicle.car": "car",
    "vehicle.construction": "construction_vehicle",
    "vehicle.motorcycle": "motorcycle",
    "human.pedestrian.adult": "pedestrian",
    "human.pedestrian.child": "pedestrian",
    "human.pedestrian.construction_worker": "pedestrian",
    "human.pedestrian.police_officer": "pedestrian",
    "movable_object.trafficcone": "traffic_cone",
    "vehicle.trailer": "trailer",
    "vehicle.truck": "truck",
}
_AGENT_STEPS, _EGO_STEPS = 12, 6
_LONGEST_FUTURE_US = 7_000_000  # twelve steps, and a frame behind the last one
_MAX_VELOCITY_GAP_S = 1.5

# The numbers of the scenes of nuScenes' validation split. All other scenes belong to the training split.
_VALIDATION = (
    "3 12-18 35-36 38-39 92-110 221 268-278 329-332 344-346 519-524 552-565 625-627 629-630 632-638 "
    "770-771 775 777-778 780-784 794-800 802 904-917 919-931 962-963 966-969 971-972 1059-1073"
)
_MINI_VALIDATION = "103 916"


def split_of_scene(version: str, scene_name: str) -> str:
    """Return the split of a scene such as ``scene-0103``, which is ``train``, ``val`` or ``test``."""
    if version.endswith("test"):
        return "test"
    number = int(scene_name.rpartition("-")[2])
    for run in (_MINI_VALIDATION if version.endswith("mini") else _VALIDATION).split():
        first, _, last = run.partition("-")
        if int(first) <= number <= int(last or first):
            return "val"
    return "train"


class NuScenesConverter:
    """Makes info records of the key frames of nuScenes.

    Fields, coordinate frames and units are those of the files that SparseDrive's script makes. ``gt_attributes`` is
    added, so that the metrics can compute the attribute error. Paths of sensor files are relative to ``root``.

    Args:
        root: the folder with ``v1.0-…/``, ``samples/`` and ``maps/``.
        version: ``v1.0-trainval``, ``v1.0-mini`` or ``v1.0-test`` (which has no annotations).
        can_bus_root: the folder that holds ``can_bus/``. Without it, and for scenes that it lacks, ``ego_status`` is 0.
        with_map: read the map expansion. Without it, frames have no map lines.
        roi_size: width (x) and length (y) of the map around the vehicle, in metres.

    Raises:
        FileNotFoundError: a table is missing.
    """

    def __init__(
        self,
        root: str | Path,
        version: str,
        can_bus_root: str | Path | None = None,
        with_map: bool = True,
        roi_size: tuple[float, float] = (30.0, 60.0),
    ) -> None:
        self.tables = NuScenesTables(root, version)
        self.root = Path(root)
        self.version = version
        self._can_bus_folder = Path(can_bus_root, "can_bus") if can_bus_root else None
        self.with_map = with_map
        self.roi_size = roi_size
        self.scenes_without_can_bus: list[str] = []
        self._maps: dict[str, NuScenesMap] = {}

    def infos_of_scene(self, scene: dict) -> Iterator[dict]:
        """Yield the records of a scene in order of time.

        Raises:
            FileNotFoundError: the file of a lidar sweep, of a camera image or of the map is missing.
            ImportError: ``with_map`` is True and shapely is missing.
        """
        tables = self.tables
        location = tables.location(scene)
        messages = self._can_bus(scene["name"])
        infos = [self._sensors(sample) for sample in tables.samples(scene)]
        lidar_poses = [lidar_to_global(info) for info in infos]
        times = [info["timestamp"] for info in infos]
        for number, (info, lidar_pose) in enumerate(zip(infos, lidar_poses, strict=True)):
            info["map_location"] = location
            info["map_annos"] = self._map(location, lidar_pose)
            if not self.version.endswith("test"):
                info |= self._annotations(info["token"], lidar_pose)
                info |= ego_future(lidar_poses, times, number)
                info["ego_status"] = _ego_status(messages, info["timestamp"])
            yield info

    def _sensors(self, sample: dict) -> dict:
        """Return the poses and files of the lidar and the cameras."""
        tables = self.tables
        lidar = tables.data(sample, "LIDAR_TOP")
        calibration, ego = self._poses(lidar)
        cameras: dict[str, dict] = {}
        info = {
            "token": sample["token"],
            "scene_token": sample["scene_token"],
            "timestamp": sample["timestamp"],
            "lidar_path": self._existing(lidar["filename"]),
            # Only the presence of sweeps is used, because the first frame of a scene has none.
            "sweeps": [{"sample_data_token": lidar["prev"]}] if lidar["prev"] else [],
            "cams": cameras,
            "lidar2ego_translation": calibration["translation"],
            "lidar2ego_rotation": calibration["rotation"],
            "ego2global_translation": ego["translation"],
            "ego2global_rotation": ego["rotation"],
        }
        from_world = inverse_pose(lidar_to_global(info))
        for name in _CAMERAS:
            data = tables.data(sample, name)
            camera, camera_ego = self._poses(data)
            to_lidar = from_world @ _matrix(camera_ego) @ _matrix(camera)
            cameras[name] = {
                "data_path": self._existing(data["filename"]),
                "type": name,
                "sample_data_token": data["token"],
                "sensor2ego_translation": camera["translation"],
                "sensor2ego_rotation": camera["rotation"],
                "ego2global_translation": camera_ego["translation"],
                "ego2global_rotation": camera_ego["rotation"],
                "timestamp": data["timestamp"],
                "sensor2lidar_rotation": to_lidar[:3, :3],
                "sensor2lidar_translation": to_lidar[:3, 3],
                "cam_intrinsic": np.array(camera["camera_intrinsic"], dtype=np.float64),
            }
        return info

    def _existing(self, name: str) -> str:
        path = self.root / name
        if not path.exists():
            raise MissingFileError(f"nuScenes file {path} does not exist")
        return name

    def _poses(self, data: dict) -> tuple[dict, dict]:
        """Return the calibration of a sensor and the pose of the vehicle, given the record of the sensor's data."""
        record_of = self.tables.get
        calibration = record_of("calibrated_sensor", data["calibrated_sensor_token"])
        return calibration, record_of("ego_pose", data["ego_pose_token"])

    def _annotations(self, sample_token: str, lidar_pose: np.ndarray) -> dict:
        """Return boxes, names, velocities, ids and futures in the lidar frame."""
        tables = self.tables
        records = tables.annotations_of_sample[sample_token]
        from_world = inverse_pose(lidar_pose)
        number = len(records)
        boxes = np.zeros((number, 7))
        velocities = np.zeros((number, 2))
        paths = []
        for row, record in enumerate(records):
            pose = from_world @ _matrix(record)
            width, length, height = record["size"]
            boxes[row] = (*pose[:3, 3], length, width, height, np.arctan2(-pose[0, 1], pose[0, 0]))
            velocities[row] = (from_world[:3, :3] @ self._velocity(record))[:2]
            paths.append(self._future_steps(record, pose))
        names = [tables.category(record) for record in records]
        lidar_points = np.array([record["num_lidar_pts"] for record in records], dtype=np.int64)
        radar_points = np.array([record["num_radar_pts"] for record in records], dtype=np.int64)
        futures, masks = padded_steps(paths, _AGENT_STEPS)
        return {
            "gt_boxes": boxes,
            "gt_names": np.array([_CLASS_OF_CATEGORY.get(name, name) for name in names], dtype=str),
            "gt_attributes": np.array([tables.attribute(record) for record in records], dtype=str),
            "gt_velocity": velocities,
            "num_lidar_pts": lidar_points,
            "num_radar_pts": radar_points,
            "valid_flag": lidar_points + radar_points > 0,
            "instance_inds": np.array(
                [tables.number_of_instance[record["instance_token"]] for record in records], dtype=np.int64
            ),
            "gt_agent_fut_trajs": futures,
            "gt_agent_fut_masks": masks,
        }

    def _velocity(self, record: dict) -> np.ndarray:
        """Return the velocity [3] in the world from the neighbouring frames, or NaN if they are too far apart."""
        tables = self.tables
        first, last = (
            tables.get("sample_annotation", record[key]) if record[key] else record
            for key in ("prev", "next")
        )
        seconds = (self._time(last) - self._time(first)) / 1e6
        limit = _MAX_VELOCITY_GAP_S * (2 if first is not record and last is not record else 1)
        if first is last or seconds > limit:
            return np.full(3, np.nan)
        return np.subtract(last["translation"], first["translation"]) / seconds

    def _future_steps(self, record: dict, pose: np.ndarray) -> np.ndarray:
        """Return the displacements [n, 2] of the agent in the coming steps, up to 6 s, as far as it is annotated."""
        places = [record["translation"][:2]]
        times = [self._time(record)]
        yaw = yaw_of(_matrix(record))
        while record["next"] and times[-1] < times[0] + _LONGEST_FUTURE_US:
            record = self.tables.get("sample_annotation", record["next"])
            places.append(record["translation"][:2])
            times.append(self._time(record))
        # The displacements are rotated by the angle between the agent's headings in the world and in the lidar frame.
        turn = turn_about_z(yaw_of(pose) - yaw)
        return _displacements(np.array(places), times, 0, _AGENT_STEPS) @ turn.T

    def _time(self, annotation: dict) -> int:
        return self.tables.get("sample", annotation["sample_token"])["timestamp"]

    def _map(self, location: str, lidar_pose: np.ndarray) -> dict[int, list[np.ndarray]]:
        if not self.with_map:
            return {0: [], 1: [], 2: []}
        if location not in self._maps:
            self._maps[location] = NuScenesMap(self.root, location, self.roi_size)
        return self._maps[location].around(lidar_pose)

    def _can_bus(self, scene_name: str) -> list[list[dict]]:
        """Return the pose and the steering messages of a scene, or nothing if it lacks either."""
        messages = []
        for kind in ("pose", "steeranglefeedback"):
            path = self._can_bus_folder and self._can_bus_folder / f"{scene_name}_{kind}.json"
            if path is None or not path.exists():
                self.scenes_without_can_bus.append(scene_name)
                return []
            messages.append(json.loads(path.read_text()))
        return messages if all(messages) else []


def _matrix(record: dict) -> np.ndarray:
    return pose_matrix(record["translation"], record["rotation"])


def _displacements(places: np.ndarray, times_us: list[int], here: int, num_steps: int) -> np.ndarray:
    """Return the displacements [n, 2] in the coming steps of frame ``here``, given the places [num frames, 2]."""
    steps = coming_steps(times_us, here, num_steps)
    return np.diff([places[here], *(step.between(places) for step in steps)], axis=0)


def ego_future(lidar_poses: list[np.ndarray], times_us: list[int], here: int) -> dict:
    """Return the displacements of the vehicle and the command, from the poses of all frames of the scene."""
    origins = np.array([pose[:3, 3] for pose in lidar_poses])
    places = moved_points(origins, inverse_pose(lidar_poses[here]))[:, :2]
    known = _displacements(places, times_us, here, _EGO_STEPS)
    [steps], [mask] = padded_steps([known], _EGO_STEPS)
    return {
        "gt_ego_fut_trajs": steps,
        "gt_ego_fut_masks": mask,
        "gt_ego_fut_cmd": command_of(known),
    }


def _nearest(messages: list[dict], time_us: int) -> dict:
    """Return the message that is nearest to a time."""
    distances = [abs(message["utime"] - time_us) for message in messages]
    return messages[distances.index(min(distances))]


def _ego_status(messages: list[list[dict]], time_us: int) -> np.ndarray:
    """Return acceleration, rotation rate, velocity (3 each) and steering angle, float32 [10], or zeros if unknown."""
    if not messages:
        return np.zeros(10, dtype=np.float32)
    pose, steering = (_nearest(kind, time_us) for kind in messages)
    return np.array(
        [*pose["accel"], *pose["rotation_rate"], *pose["vel"], steering["value"]], dtype=np.float32
    )
