"""nuScenes with tracks, futures and maps. Key frames come one at a time, in the order of their scenes."""

import logging
import math
import zlib
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmengine.dataset import Compose
from mmengine.logging import print_log
from torch.utils.data import Dataset

from visdet.errors import InvalidInputError
from visdet.registry import DATASETS, TRANSFORMS
from visdet.structures.poses import inverse_pose, pose_matrix, wrap_angle

from .info_files import frame_keys, load_infos
from .nuscenes_tables import NUSCENES_CLASSES

__all__ = ["NuScenes3DDetTrackDataset"]


@DATASETS.register_module(name=["NuScenes3DDetTrackDataset", "NuScenes3DDataset"])
class NuScenes3DDetTrackDataset(Dataset):
    """Key frames of nuScenes, or of any data set that is stored in the form of its info files.

    ``dataset[i]`` and ``dataset[dict(idx=i, aug_config=...)]`` return the output of the pipeline for the record of
    frame i. The second form lets a sampler give a whole sequence the same augmentation. Frames come scene after scene,
    each in order of time, whatever their order in the file.

    A record holds ``token``, ``scene_token``, ``timestamp`` (seconds, float64), ``img_filename`` and ``lidar2img``
    [4, 4] of each camera, ``cam_intrinsic``, ``lidar2global`` [4, 4], ``pts_filename``, ``ego_status``, ``map_annos``
    and ``aug_config``. If the file has them, it also holds:

    * ``gt_bboxes_3d`` [n, 9], which are x, y, z, length, width, height, yaw, vx and vy in the lidar frame (x to the
      right, y ahead), ``gt_labels_3d`` (-1 for classes that are not used) and ``instance_inds``.
    * ``gt_agent_fut_trajs`` [n, 12, 2], the displacements of steps of 0.5 s, and ``gt_agent_fut_masks``.
    * ``gt_ego_fut_trajs`` [6, 2], ``gt_ego_fut_masks`` and ``gt_ego_fut_cmd`` [3] (right, left, straight).
    * In test mode ``fut_boxes``, the boxes of the following frames in the lidar frame of this one.

    Args:
        ann_file: the info file, which is an ``.npz`` of visdet or a published ``.pkl``. If the path does not exist, it
            is looked up in ``data_root``.
        pipeline: transforms.
        data_root: the folder that contains ``samples/``.
        classes, map_classes: the names of the labels. Map classes are those of ``map_annos`` 0, 1, 2 and so on.
        load_interval: use every n-th frame only.
        with_velocity: append the velocity to the boxes.
        test_mode: use no random augmentation. Unknown velocities stay NaN for the metrics instead of becoming 0.
        use_valid_flag: train on boxes with a lidar or radar point instead of those with a lidar point. In test mode the
            boxes of a frame are always the former, as in nuScenes' evaluation.
        num_cameras: the number of cameras that a frame must have.
        data_aug_conf: ``H, W`` of the files, ``final_dim`` (height, width), ``resize_lim, bot_pct_lim, rot_lim``
            (degrees), ``rand_flip, rot3d_range`` (radians).
        with_seq_flag: number the sequences in ``flag`` [num frames], for GroupInBatchSampler.
        sequences_split_num: the number of sequences that each scene is cut into. With ``'all'`` or -1, each frame is a
            sequence.
        keep_consistent_seq_aug: use one augmentation for a whole sequence.
        modality, version, det3d_eval_version, track3d_eval_version, vis_score_threshold, work_dir, eval_config:
            accepted for published configs, without effect. Metrics are configured in ``val_evaluator``.
        metainfo: entries that replace or extend the data set's ``metainfo``.

    Raises:
        FileNotFoundError: the info file does not exist.
        ValueError: the file is empty, two frames of a scene have the same time, or a frame has a wrong number of
            cameras, or a calibration or boxes that are not usable. The message names the frame.

    Source: names, keywords and record keys are those of SparseDrive's NuScenes3DDataset and Sparse4D's
    NuScenes3DDetTrackDataset. Differences: records of the file are never changed, a new token also starts a new scene,
    and random numbers can come from the sampler.
    """

    unit = "frames"
    METAINFO: dict[str, Any] = {
        "classes": NUSCENES_CLASSES,
        "map_classes": ("ped_crossing", "divider", "boundary"),
    }

    def __init__(
        self,
        ann_file: str,
        pipeline: Sequence[dict | Callable] | None = None,
        data_root: str | None = None,
        classes: Sequence[str] | None = None,
        map_classes: Sequence[str] | None = None,
        load_interval: int = 1,
        with_velocity: bool = True,
        modality: dict | None = None,
        test_mode: bool = False,
        det3d_eval_version: str = "detection_cvpr_2019",
        track3d_eval_version: str = "tracking_nips_2019",
        version: str = "v1.0-trainval",
        use_valid_flag: bool = False,
        vis_score_threshold: float = 0.25,
        data_aug_conf: dict | None = None,
        sequences_split_num: int | str = 1,
        with_seq_flag: bool = False,
        keep_consistent_seq_aug: bool = True,
        work_dir: str | None = None,
        eval_config: dict | None = None,
        num_cameras: int = 6,
        metainfo: dict | None = None,
    ) -> None:
        self.data_root = data_root
        self.ann_file = ann_file
        self.with_velocity = with_velocity
        self.test_mode = test_mode
        self.use_valid_flag = use_valid_flag
        self.data_aug_conf = data_aug_conf
        self.keep_consistent_seq_aug = keep_consistent_seq_aug
        self.num_cameras = num_cameras
        self.CLASSES = tuple(classes or self.METAINFO["classes"])
        self.MAP_CLASSES = tuple(map_classes or self.METAINFO["map_classes"])
        self._label_of_class = {name: label for label, name in enumerate(self.CLASSES)}
        self._has_warned = False
        self._camera_names: tuple[str, ...] = ()  # those of the first frame that is read
        self._infos, self.metadata = load_infos(self._resolve(ann_file))
        self._all_frames, self._all_scenes = _sort_frames(self._infos, str(ann_file))
        self._interval = load_interval
        self._order, self._scenes = self._all_frames[::load_interval], self._all_scenes[::load_interval]
        self.metainfo = {
            "classes": self.CLASSES,
            "map_classes": self.MAP_CLASSES,
            "version": self.metadata.get("version"),
            **(metainfo or {}),
        }
        self.pipeline = Compose(
            [TRANSFORMS.build(step) if isinstance(step, dict) else step for step in pipeline or []]
        )
        if with_seq_flag:
            self.flag = _sequence_flags(self._scenes, sequences_split_num)

    def full_init(self) -> None:
        """Do nothing, because the constructor has read the file. mmengine calls this method."""

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int | dict) -> Any:
        if isinstance(index, dict):
            position, aug_config = index["idx"], index["aug_config"]
        else:
            position, aug_config = index, self.get_augmentation()
        record = self.get_data_info(position)
        record["aug_config"] = aug_config
        return self.pipeline(record)

    @property
    def scene_starts(self) -> np.ndarray:
        """The positions of the first frames of the scenes, int64 [num scenes]."""
        return np.flatnonzero(np.diff(self._scenes, prepend=-1))

    def get_info(self, index: int) -> dict:
        """Return the stored record of frame ``index``, in the order of the data set."""
        return self._infos[int(self._order[index])]

    def get_augmentation(self, rng: np.random.Generator | None = None) -> dict | None:
        """Return the resize factor, crop, flip and rotations of a frame, or ``None`` without ``data_aug_conf``.

        In test mode, images get the smallest size that covers ``final_dim``, and are cropped to their middle and, by
        ``bot_pct_lim``, their bottom.

        Args:
            rng: the generator of the random numbers. The default is one that torch's global generator seeds.
        """
        conf = self.data_aug_conf
        if conf is None:
            return None
        height, width = conf["H"], conf["W"]
        final_height, final_width = conf["final_dim"]
        if self.test_mode:
            rng = None
            resize = max(final_height / height, final_width / width)
            bottom, flip, rotate, rotate_3d = float(np.mean(conf["bot_pct_lim"])), False, 0.0, 0.0
        else:
            rng = rng or np.random.default_rng(int(torch.randint(2**31, ())))
            resize = rng.uniform(*conf["resize_lim"])
            bottom = rng.uniform(*conf["bot_pct_lim"])
            flip = bool(conf["rand_flip"] and rng.integers(2))
            rotate = rng.uniform(*conf["rot_lim"])
            rotate_3d = rng.uniform(*conf["rot3d_range"])
        new_width, new_height = int(width * resize), int(height * resize)
        top = int((1 - bottom) * new_height) - final_height
        spare = max(0, new_width - final_width)
        left = spare // 2 if rng is None else int(rng.uniform(0, spare))
        return {
            "resize": resize,
            "resize_dims": (new_width, new_height),
            "crop": (left, top, left + final_width, top + final_height),
            "flip": flip,
            "rotate": rotate,
            "rotate_3d": rotate_3d,
        }

    def get_data_info(self, index: int) -> dict:
        """Return the record of frame ``index`` for the pipeline, without ``aug_config``."""
        info = self.get_info(index)
        record = {
            "token": info["token"],
            "scene_token": info["scene_token"],
            "sample_idx": index,
            "timestamp": info["timestamp"] / 1e6,
            "pts_filename": self._resolve(info["lidar_path"]),
            "sweeps": info.get("sweeps", []),
            "map_location": info.get("map_location"),
            "lidar2ego_translation": info["lidar2ego_translation"],
            "lidar2ego_rotation": info["lidar2ego_rotation"],
            "ego2global_translation": np.asarray(info["ego2global_translation"], dtype=np.float64),
            "ego2global_rotation": info["ego2global_rotation"],
            "lidar2global": _lidar_to_global(info),
        }
        if "ego_status" in info:
            record["ego_status"] = self._finite(info, "ego_status")
        if "map_annos" in info:
            record["map_annos"] = info["map_annos"]
        record.update(self._cameras(info))
        if "gt_boxes" in info:
            record.update(self._annotations(info))
        if "gt_ego_fut_trajs" in info:
            record.update({key: self._finite(info, key) for key in _EGO_KEYS})
            if self.test_mode:
                record["fut_boxes"] = self._future_boxes(index, int(np.sum(info["gt_ego_fut_masks"])))
        return record

    def _cameras(self, info: dict) -> dict:
        """Return file names and matrices of the cameras, in the order of the file."""
        if len(info["cams"]) != self.num_cameras:
            raise InvalidInputError(
                f"frame {info['token']} of {self.ann_file} must have {self.num_cameras} cameras "
                f"(num_cameras), got {len(info['cams'])}: {', '.join(info['cams'])}"
            )
        self._camera_names = self._camera_names or tuple(info["cams"])
        if tuple(info["cams"]) != self._camera_names:
            raise InvalidInputError(
                f"frame {info['token']} of {self.ann_file} must have its cameras in the order of other frames, "
                f"{', '.join(self._camera_names)}, got {', '.join(info['cams'])}"
            )
        names, projections, to_cameras, intrinsics = [], [], [], []
        for camera, values in info["cams"].items():
            to_lidar = np.eye(4)
            to_lidar[:3, :3] = values["sensor2lidar_rotation"]
            to_lidar[:3, 3] = values["sensor2lidar_translation"]
            intrinsic = np.eye(4)
            given = np.asarray(values["cam_intrinsic"], dtype=np.float64)
            intrinsic[: given.shape[0], : given.shape[1]] = given
            _check_calibration(info["token"], camera, to_lidar, intrinsic)
            from_lidar = np.linalg.inv(to_lidar)
            names.append(self._resolve(values["data_path"]))
            projections.append(intrinsic @ from_lidar)
            to_cameras.append(from_lidar)
            intrinsics.append(given.copy())
        return {
            "cam_names": tuple(info["cams"]),
            "img_filename": names,
            "lidar2img": projections,
            "lidar2cam": to_cameras,
            "cam_intrinsic": intrinsics,
        }

    def _annotations(self, info: dict) -> dict:
        mask = self._measured(info) if self.test_mode else self._valid(info)
        boxes = np.asarray(info["gt_boxes"], dtype=np.float64).reshape(-1, 7)[mask]
        if not np.isfinite(boxes).all():
            wrong = np.flatnonzero(mask)[~np.isfinite(boxes).all(axis=1)]
            raise InvalidInputError(
                f"frame {info['token']} of {self.ann_file} has boxes that are NaN or infinite: {wrong.tolist()}"
            )
        names = np.asarray(info["gt_names"])[mask]
        if self.with_velocity:
            velocity = np.array(info["gt_velocity"], dtype=np.float64).reshape(-1, 2)[mask]
            if not self.test_mode:
                velocity = np.nan_to_num(velocity)
            boxes = np.concatenate([boxes, velocity], axis=1)
        labels = [self._label_of_class.get(str(name), -1) for name in names]
        annotations = {
            "gt_bboxes_3d": boxes,
            "gt_labels_3d": np.array(labels, dtype=np.int64),
            "gt_names": names,
        }
        if "gt_attributes" in info:
            annotations["gt_attributes"] = np.asarray(info["gt_attributes"])[mask]
        if "instance_inds" in info:
            tracks = np.asarray(info["instance_inds"], dtype=np.int64).reshape(-1)[mask]
            numbers, counts = np.unique(tracks[tracks >= 0], return_counts=True)
            if (counts > 1).any():
                repeated = numbers[counts > 1]
                self._warn_of_repeated_tracks(info["token"], repeated.tolist())
                tracks[np.isin(tracks, repeated)] = -1
            # Denoising queries are followed by these numbers. A box without a track gets one that no other box has.
            untracked = np.flatnonzero(tracks < 0)
            tracks[untracked] = (
                -2 - (zlib.crc32(str(info["token"]).encode()) << 16) - np.arange(len(untracked))
            )
            annotations["instance_inds"] = tracks
        if "gt_agent_fut_trajs" in info:
            for key in _AGENT_SHAPES:
                annotations[key] = self._finite(info, key, mask)
        return annotations

    def _warn_of_repeated_tracks(self, token: str, numbers: list[int]) -> None:
        if not self._has_warned:
            self._has_warned = True
            print_log(
                f"frame {token} of {self.ann_file} has several boxes of the tracks {numbers} (instance_inds). Such "
                "boxes count as boxes without a track, here and in other frames",
                logger="current",
                level=logging.WARNING,
            )

    def _finite(self, info: dict, key: str, mask: np.ndarray | slice = slice(None)) -> np.ndarray:
        """Return an array of a record as float32.

        Raises:
            ValueError: the array holds NaN or infinity.
        """
        values = np.array(info[key], dtype=np.float32)
        if key in _AGENT_SHAPES:  # An empty array may have any shape.
            values = values.reshape(-1, *_AGENT_SHAPES[key]) if values.size == 0 else values
        values = values[mask]
        if not np.isfinite(values).all():
            raise InvalidInputError(f"frame {info['token']} of {self.ann_file} has NaN or infinite {key}")
        return values

    def _valid(self, info: dict) -> np.ndarray:
        valid = info["valid_flag"] if self.use_valid_flag else np.asarray(info["num_lidar_pts"]) > 0
        return np.asarray(valid, dtype=bool).reshape(-1)

    def _measured(self, info: dict) -> np.ndarray:
        """Return the mask of boxes that nuScenes' evaluation counts, which have a lidar or a radar point."""
        if "num_lidar_pts" not in info:
            return self._valid(info)
        points = np.asarray(info["num_lidar_pts"]).reshape(-1)
        radar = info.get("num_radar_pts")
        return (points if radar is None else points + np.asarray(radar).reshape(-1)) > 0

    def _future_boxes(self, index: int, num_steps: int) -> list[np.ndarray]:
        """Return the boxes [m, 7] of each of the following frames of the scene, in the lidar frame of this frame.

        As in the future of the vehicle, a step is a frame of the file, even one that ``load_interval`` leaves out.
        """
        boxes_of_step: list[np.ndarray] = []
        from_global = inverse_pose(_lidar_to_global(self.get_info(index)))
        here = range(len(self))[index] * self._interval
        for later in range(here + 1, here + num_steps + 1):
            if later >= len(self._all_frames) or self._all_scenes[later] != self._all_scenes[here]:
                break
            info = self._infos[int(self._all_frames[later])]
            to_current = from_global @ _lidar_to_global(info)
            boxes = np.array(info["gt_boxes"], dtype=np.float64).reshape(-1, 7)[self._valid(info)]
            boxes[:, :3] = boxes[:, :3] @ to_current[:3, :3].T + to_current[:3, 3]
            heading = np.stack([np.cos(boxes[:, 6]), np.sin(boxes[:, 6])], axis=-1) @ to_current[:2, :2].T
            boxes[:, 6] = wrap_angle(np.arctan2(heading[:, 1], heading[:, 0]))
            boxes_of_step.append(boxes)
        return boxes_of_step

    def _resolve(self, path: str) -> str:
        """Return the path of a file, as given or within ``data_root``.

        Published info files contain paths such as ``./data/nuscenes/samples/…``, which ``data_root`` replaces.
        """
        if self.data_root is None or Path(path).is_absolute():
            return str(path)
        for folder in ("samples", "sweeps"):
            parts = Path(path).parts
            if folder in parts:
                return str(Path(self.data_root, *parts[parts.index(folder) :]))
        inside = Path(self.data_root, path)
        return str(inside if inside.exists() or not Path(path).exists() else path)


_AGENT_SHAPES = {"gt_agent_fut_trajs": (12, 2), "gt_agent_fut_masks": (12,)}  # of a box, in published files
_EGO_KEYS = ("gt_ego_fut_trajs", "gt_ego_fut_masks", "gt_ego_fut_cmd")


def _lidar_to_global(info: dict) -> np.ndarray:
    lidar_to_ego = pose_matrix(info["lidar2ego_translation"], info["lidar2ego_rotation"])
    pose = pose_matrix(info["ego2global_translation"], info["ego2global_rotation"]) @ lidar_to_ego
    if not np.isfinite(pose).all():
        raise InvalidInputError(f"frame {info['token']} has a pose that is NaN or infinite")
    return pose


def _check_calibration(token: str, camera: str, to_lidar: np.ndarray, intrinsic: np.ndarray) -> None:
    for name, matrix in (("sensor2lidar", to_lidar), ("cam_intrinsic", intrinsic)):
        if not np.isfinite(matrix).all() or abs(np.linalg.det(matrix)) < 1e-9:
            raise InvalidInputError(f"frame {token}: {name} of {camera} must be invertible, got\n{matrix}")


def _sort_frames(infos: Sequence[dict], file: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of the frames, scene after scene and each in order of time, and the scene number of each.

    Raises:
        ValueError: the file is empty, or two frames of a scene have the same time.
    """
    keys = frame_keys(infos)
    if not keys:
        raise InvalidInputError(f"info file {file} holds no frames")
    # Files without sweeps of points have empty lists in all frames of a scene.
    with_sweeps = {scene for _, scene, has_none in keys if not has_none}
    scene_starts: dict[str, int] = {}
    for time, scene, _ in keys:
        scene_starts[scene] = min(time, scene_starts.get(scene, time))
    # Scenes that two vehicles have recorded at the same time must not be interleaved.
    order = sorted(range(len(keys)), key=lambda i: (scene_starts[keys[i][1]], keys[i][1], keys[i][0]))
    scenes = np.zeros(len(order), dtype=np.int64)
    for position, (before, here) in enumerate(pairwise(order), start=1):
        (time_before, scene_before, _), (time, scene, has_no_sweeps) = keys[before], keys[here]
        if scene == scene_before and time == time_before:
            raise InvalidInputError(f"info file {file}: two frames of scene {scene} have the time {time}")
        is_first = scene != scene_before or (has_no_sweeps and scene in with_sweeps)
        scenes[position] = scenes[position - 1] + is_first
    return np.array(order, dtype=np.int64), scenes


def _sequence_flags(scenes: np.ndarray, split_num: int | str) -> np.ndarray:
    """Return the number of the sequence of each frame, int64, counted from 0 without gaps."""
    if split_num in (-1, "all"):
        return np.arange(len(scenes))
    if not isinstance(split_num, int) or split_num < 1:
        raise InvalidInputError(
            f"sequences_split_num must be a positive number, -1 or 'all', got {split_num!r}"
        )
    flags, number = np.empty_like(scenes), 0
    for frames in np.split(np.arange(len(scenes)), np.flatnonzero(np.diff(scenes)) + 1):
        length = math.ceil(len(frames) / split_num)
        for start in range(0, len(frames), length):
            flags[frames[start : start + length]] = number
            number += 1
    return flags
