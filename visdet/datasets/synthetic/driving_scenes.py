"""The synthetic driving scenes: six cameras on a moving vehicle, drawn and stored in the form of nuScenes."""

from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import cv2
import numpy as np

from visdet.checks.arguments import Positive, Range, Seed, checked
from visdet.registry import DATASETS
from visdet.structures.polylines import clip_line, clip_polygon
from visdet.structures.poses import (
    distance_in_plane,
    pose_in_plane,
    pose_matrix,
    quaternion_from_matrix,
    seen_from,
)

from ..future_steps import padded_steps
from ..info_files import save_infos
from ..nuscenes import NuScenes3DDetTrackDataset
from ..nuscenes_converter import ego_future
from .drawn_folder import claim_folder, draw_each, draw_once
from .driving_renderer import GROUND_Z, RIG, Camera, Renderer, boxes_in_lidar
from .driving_world import DRIVING_CLASSES, STEP_S, World, make_world

DRIVING_MAP_CLASSES = ("ped_crossing", "divider", "boundary")
AGENT_STEPS = 12

_GENERATOR_VERSION = 5
_STAMP = "driving_scenes.json"
_SPLITS = ("train", "val", "test")
_MIN_VISIBLE_PIXELS = 6  # An object with fewer visible pixels counts as one without lidar points.
_WHEEL_BASE_M = 2.7
_Side = Annotated[int, Range(16)]
_START_US = 1_600_000_000_000_000
# The lidar is above the rear axle. As in nuScenes, its x axis points to the right and its y axis ahead.
_LIDAR_TO_EGO = pose_matrix(
    (0.94, 0.0, -GROUND_Z), np.array([[0.0, 1.0, 0.0], [-1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
)


@checked
def make_driving_scenes(
    folder: str | Path,
    num_train: Positive = 160,
    num_val: Positive = 16,
    num_test: Positive = 16,
    num_frames: Positive = 20,
    image_size: tuple[_Side, _Side] = (96, 256),
    roi_size: tuple[float, float] = (30.0, 60.0),
    seed: Seed = 0,
    num_workers: int | None = None,
) -> Path:
    """Write the driving scenes into ``folder``, unless they are there already, and return the folder.

    It holds ``samples/CAM_*/*.jpg``, ``samples/LIDAR_TOP/*.bin`` (float32 x, y, z of the points that a grid of camera
    pixels shows, instead of lidar points), ``driving_infos_{train,val,test}.npz`` with the fields of nuScenes' info
    files, and a stamp with the arguments. Scene i of a split is drawn from
    ``numpy.random.default_rng([seed, split, i])``, so that the files do not depend on ``num_workers``.

    The folder appears only when it is complete. Processes that start at the same time wait for the first one. A folder
    with another stamp is replaced. A folder without a stamp is replaced only if it is empty.

    Args:
        folder: the folder to write.
        num_train, num_val, num_test: number of scenes of each split.
        num_frames: number of key frames of a scene, 0.5 s apart.
        image_size: height and width of an image in pixels.
        roi_size: width (x) and length (y) of the map around the vehicle, in metres.
        seed: seed of the random numbers.
        num_workers: number of processes that draw. The default is one per core.

    Raises:
        FileExistsError: the folder is not empty and was not written by this function.
        ValueError: a number is not positive.
        RuntimeError: a drawing process was killed.
    """
    stamp: dict[str, Any] = {
        "generator_version": _GENERATOR_VERSION,
        "num_train": num_train,
        "num_val": num_val,
        "num_test": num_test,
        "num_frames": num_frames,
        "image_size": list(image_size),
        "roi_size": list(roi_size),
        "seed": seed,
    }
    return draw_once(
        folder,
        _STAMP,
        stamp,
        maker="make_driving_scenes",
        what=f"{num_train + num_val + num_test} driving scenes",
        draw=_write,
        num_workers=num_workers,
    )


def _write(folder: Path, stamp: dict, num_workers: int | None) -> None:
    for name in ("LIDAR_TOP", *(name for name, *_ in RIG)):
        (folder / "samples" / name).mkdir(parents=True)
    metadata = {"version": f"driving-scenes-{_GENERATOR_VERSION}"}
    for split in _SPLITS:
        tasks = [(folder, split, index, stamp) for index in range(stamp[f"num_{split}"])]
        scenes = draw_each(_draw_scene, tasks, num_workers)
        save_infos(folder / f"driving_infos_{split}.npz", chain.from_iterable(scenes), metadata)


def _draw_scene(folder: Path, split: str, index: int, stamp: dict) -> list[dict]:
    """Write the images and points of one scene and return its infos."""
    split_number = _SPLITS.index(split)
    rng = np.random.default_rng([stamp["seed"], split_number, index])
    num_frames = stamp["num_frames"]
    world = make_world(rng, num_frames + 1)  # of a single frame there are no speeds
    height, width = stamp["image_size"]
    renderer = Renderer(width, height)
    cameras = renderer.cameras
    scene = f"{split}-{index:04d}"
    # There is an hour between scenes, so that a temporal model recognises that they are separate.
    scene_start = _START_US + (split_number * 100_000 + index) * 3_600_000_000
    times = [scene_start + round(frame * STEP_S * 1e6) for frame in range(num_frames)]
    poses = list(map(pose_in_plane, world.ego_yaw[:num_frames], world.ego_xy))
    lidar_poses = [pose @ _LIDAR_TO_EGO for pose in poses]
    infos = []
    sweeps: list[dict] = []  # The first frame of a scene has none, as in nuScenes.
    for frame, (time, pose, lidar_pose) in enumerate(zip(times, poses, lidar_poses, strict=True)):
        token = f"{scene}-{frame:02d}"
        shot = renderer.shoot(world, frame, lidar_pose, rng)
        lidar_path = f"samples/LIDAR_TOP/{token}.bin"
        shot.points.tofile(folder / lidar_path)
        info = {
            "token": token,
            "scene_token": scene,
            "timestamp": time,
            "lidar_path": lidar_path,
            "sweeps": sweeps,
            "cams": _write_images(folder, token, cameras, shot.images),
            **_pose_entries("lidar2ego", _LIDAR_TO_EGO),
            **_pose_entries("ego2global", pose),
            "map_location": "driving-scenes",
            "map_annos": _map_annotations(world, lidar_pose, stamp["roi_size"]),
            **_agent_annotations(world, frame, num_frames, lidar_pose, shot.visible),
            **ego_future(lidar_poses, times, frame),
            "ego_status": _ego_status(world, frame),
        }
        infos.append(info)
        sweeps = [{"data_path": lidar_path}]
    return infos


def _write_images(folder: Path, token: str, cameras: list[Camera], images: list[np.ndarray]) -> dict:
    """Write the images of a frame and return the records of the cameras."""
    records = {}
    for camera, image in zip(cameras, images, strict=True):
        sensor = camera.name
        rotation = camera.rotation
        translation = camera.translation
        name = f"samples/{sensor}/{token}.jpg"
        path = folder / name
        if not cv2.imwrite(str(path), image, [cv2.IMWRITE_JPEG_QUALITY, 92]):
            raise OSError(f"make_driving_scenes: cannot write {path}")
        to_ego = _LIDAR_TO_EGO @ pose_matrix(translation, rotation)
        records[sensor] = {
            "data_path": name,
            **_pose_entries("sensor2ego", to_ego),
            "sensor2lidar_rotation": rotation,
            "sensor2lidar_translation": translation,
            "cam_intrinsic": camera.intrinsic,
        }
    return records


def _pose_entries(name: str, pose: np.ndarray) -> dict[str, list[float]]:
    """Return the translation and the quaternion of a pose [4, 4] under the keys of nuScenes."""
    return {
        f"{name}_translation": pose[:3, 3].tolist(),
        f"{name}_rotation": quaternion_from_matrix(pose[:3, :3]),
    }


def _agent_annotations(
    world: World, frame: int, num_frames: int, lidar: np.ndarray, visible: np.ndarray
) -> dict:
    """Return boxes, names, velocities, futures and ids of the agents within 70 m.

    As in nuScenes, futures end with the scene, and later steps are masked.
    """
    boxes = boxes_in_lidar(world, frame, lidar)
    near = np.flatnonzero(distance_in_plane(boxes) < 70)
    agents = world.agents
    known = min(AGENT_STEPS, num_frames - 1 - frame)
    turn = lidar[:2, :2]
    offsets = np.diff(agents.xy[near, frame : frame + known + 1], axis=1) @ turn
    futures, masks = padded_steps(offsets, AGENT_STEPS)
    seen = visible[near]
    pixels = np.where(seen >= _MIN_VISIBLE_PIXELS, seen, 0)
    return {
        "gt_boxes": boxes[near],
        "gt_names": np.array([DRIVING_CLASSES[label] for label in agents.labels[near]], dtype=str),
        "gt_velocity": agents.velocity[near, frame] @ turn,
        "num_lidar_pts": pixels,
        "num_radar_pts": np.zeros_like(pixels),
        "valid_flag": pixels > 0,
        "instance_inds": near,
        "gt_agent_fut_trajs": futures,
        "gt_agent_fut_masks": masks,
    }


def _ego_status(world: World, frame: int) -> np.ndarray:
    """Return acceleration, rotation rate, velocity (3 each) and steering angle of the ego vehicle, float32 [10]."""
    speeds = world.ego_speed
    yaws = np.unwrap(world.ego_yaw)
    acceleration, yaw_rate = np.gradient([speeds, yaws], STEP_S, axis=1)[:, frame]
    speed = speeds[frame]
    sideways = yaw_rate * speed
    steering = yaw_rate / max(speed, 1) * _WHEEL_BASE_M
    status = [acceleration, sideways, 9.8, 0, 0, yaw_rate, speed, 0, 0, steering]
    return np.array(status, dtype=np.float32)


def _map_annotations(world: World, lidar: np.ndarray, roi_size: list[float]) -> dict[int, list[np.ndarray]]:
    """Return the polylines of each map class within the region around the vehicle, in the lidar frame."""
    road = world.road
    half = road.half_width
    here = road.nearest_station(lidar[:2, 3])
    lines: dict[int, list[np.ndarray]] = {0: [], 1: [], 2: []}
    for crossing in road.crossings:
        outline = road.strip(-half, half, crossing - 1.5, crossing + 1.5)
        polygon = clip_polygon(seen_from(lidar, outline), roi_size)
        if polygon is not None:
            lines[0].append(polygon)
    for label, offsets in ((1, road.dividers), (2, (-half, half))):
        for offset in offsets:
            line = road.line(offset, here - 50, here + 50)
            lines[label] += clip_line(seen_from(lidar, line), roi_size)
    return lines


@DATASETS.register_module()
class DrivingScenesDataset(NuScenes3DDetTrackDataset):
    """A NuScenes3DDetTrackDataset of the driving scenes, which are made first if ``data_root`` does not hold them.

    Args:
        generator: arguments of :func:`make_driving_scenes` other than the folder. All data sets that share a
            ``data_root`` must have the same.
        data_root: the folder of the scenes.
        **nuscenes_arguments: arguments of NuScenes3DDetTrackDataset. ``ann_file`` is relative to ``data_root``.
    """

    METAINFO = {"classes": DRIVING_CLASSES, "map_classes": DRIVING_MAP_CLASSES}

    def __init__(
        self,
        generator: dict | None = None,
        data_root: str = "data/driving_scenes/",
        **nuscenes_arguments: Any,
    ) -> None:
        make_driving_scenes(data_root, **(generator or {}))
        claim_folder(self, data_root)
        super().__init__(data_root=data_root, **nuscenes_arguments)
