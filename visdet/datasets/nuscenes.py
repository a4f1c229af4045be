"""nuScenes with tracks, futures and maps. Key frames come one at a time, in the order of their scenes."""

import functools
import logging
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from mmengine.logging import print_log
from torch.utils.data import Dataset

from visdet.checks.arguments import Names, Positive
from visdet.checks.finite import check_finite
from visdet.checks.similar_names import look_alike
from visdet.errors import InvalidInputError, where_to_get
from visdet.registry import DATASETS
from visdet.structures.poses import inverse_pose, moved_boxes, pose_matrix

from .augmentation import NOT_RANDOM, drawn_augmentation, factor_of_tests
from .augmentation import data_aug_conf as check_augmentation
from .frame_records import check_frame, lidar_to_global
from .future_steps import TrackedBoxes, boxes_between, coming_steps
from .info_files import load_infos, sequence_flags, sort_frames
from .nuscenes_tables import NUSCENES_CLASSES
from .transforms.base import composed


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
    * In test mode ``fut_boxes``, the boxes at the times of the coming steps in the lidar frame of this frame. They are
      looked up by time stamp, whatever the rate of the frames, and interpolated between frames that are at most 2.2
      steps apart; the list ends before the first step at which they are not known. See :func:`coming_steps`.

    Args:
        ann_file: the info file, which is an ``.npz`` of visdet or a published ``.pkl``. If the path does not exist, it
            is looked up in ``data_root``.
        pipeline: transforms.
        data_root: the folder that the paths of the file are relative to.
        classes, map_classes: the names of the labels. Map classes are those of ``map_annos`` 0, 1, 2 and so on.
        load_interval: use every n-th frame only.
        with_velocity: must be True. The velocity is appended to the boxes.
        test_mode: use no random augmentation. Unknown velocities stay NaN for the metrics instead of becoming 0.
        use_valid_flag: train on the boxes of ``valid_flag``, which have a lidar or radar point, instead of those with a
            lidar point. In test mode the boxes of a frame are always the former, as in nuScenes' evaluation. Frames
            without ``lidar_path`` have the boxes of ``valid_flag`` in both cases, or all boxes without it.
        num_cameras: the number of cameras that a frame must have.
        steps_per_second: the number of steps of ``gt_ego_fut_trajs`` in a second.
        data_aug_conf: ``H, W`` of the files, ``final_dim`` (height, width), ``resize_lim, bot_pct_lim, rot_lim``
            (degrees), ``rand_flip, rot3d_range`` (radians).
        with_seq_flag: number the sequences in ``flag`` [num frames], for GroupInBatchSampler.
        sequences_split_num: the number of sequences that each scene is cut into. With ``'all'`` or -1, each frame is a
            sequence.
        keep_consistent_seq_aug: use one augmentation for a whole sequence.
        modality, version, det3d_eval_version, track3d_eval_version, vis_score_threshold, work_dir, eval_config:
            accepted for published configs, without effect. Metrics are configured in ``val_evaluator``.
        metainfo: entries that replace or extend the data set's ``metainfo``. Its ``classes`` and ``map_classes`` are
            the names of the labels, unless these are given.

    Raises:
        FileNotFoundError: the info file does not exist.
        ValueError: the file is empty, two frames have one token or one scene and time, times are not in microseconds,
            or a frame does not have the keys and cameras that it must have. The message names key, frame and file. The
            first frame is checked at once, and every frame when it is read.

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
        classes: Names | None = None,
        map_classes: Names | None = None,
        load_interval: Positive = 1,
        with_velocity: Literal[True] = True,
        modality: dict | None = None,
        test_mode: bool = False,
        det3d_eval_version: str = "detection_cvpr_2019",
        track3d_eval_version: str = "tracking_nips_2019",
        version: str = "v1.0-trainval",
        use_valid_flag: bool = False,
        vis_score_threshold: float = 0.25,
        data_aug_conf: dict | None = None,
        sequences_split_num: Positive | Literal[-1, "all"] = 1,
        with_seq_flag: bool = False,
        keep_consistent_seq_aug: bool = True,
        work_dir: str | None = None,
        eval_config: dict | None = None,
        num_cameras: int = 6,
        steps_per_second: Positive = 2,
        metainfo: dict | None = None,
    ) -> None:
        self.data_root = data_root
        self.ann_file = ann_file
        self.test_mode = test_mode
        self.use_valid_flag = use_valid_flag
        self.data_aug_conf = data_aug_conf
        self._warned_about: set[str] = set()
        if data_aug_conf is not None:
            check_augmentation(**({**NOT_RANDOM, **data_aug_conf} if test_mode else data_aug_conf))
            if not test_mode:
                self._compare_scales(data_aug_conf)
        self.keep_consistent_seq_aug = keep_consistent_seq_aug
        self.num_cameras = num_cameras
        given = self.METAINFO | (metainfo or {})
        self.CLASSES = tuple(classes or given["classes"])
        self.MAP_CLASSES = tuple(map_classes or given["map_classes"])
        self._label_of_class = {name: label for label, name in enumerate(self.CLASSES)}
        with where_to_get(_where_from(ann_file, data_root)):
            self._infos, self.metadata = load_infos(self._resolve(ann_file))
        self._all_frames, self._all_scenes, self._all_times = sort_frames(self._infos, str(ann_file))
        self._interval = load_interval
        self.step_s = 1 / steps_per_second
        self._order = self._all_frames[::load_interval]
        self._scenes = self._all_scenes[::load_interval]
        first = self.get_info(0)
        self.camera_names = tuple(first["cams"])
        self._cameras(first)
        self.metainfo = {
            "version": self.metadata.get("version"),
            **given,
            "classes": self.CLASSES,
            "map_classes": self.MAP_CLASSES,
        }
        self.pipeline = composed(pipeline or [])
        if with_seq_flag:
            self.flag = sequence_flags(self.scene_starts, len(self), sequences_split_num)

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
        """Return the checked record of frame ``index``, in the order of the data set."""
        return self._info(self._order[index])

    def _info(self, position: int) -> dict:
        """Return the checked record at a position in the file."""
        number = int(position)
        return check_frame(self._infos[number], self.ann_file, number)

    def get_augmentation(self, rng: np.random.Generator | None = None) -> dict | None:
        """Return :func:`drawn_augmentation` of ``data_aug_conf``, or None without it."""
        conf = self.data_aug_conf
        return None if conf is None else drawn_augmentation(conf, self.test_mode, rng)

    def get_data_info(self, index: int) -> dict:
        """Return the record of frame ``index`` for the pipeline, without ``aug_config``."""
        info = self.get_info(index)
        record = {key: info[key] for key in _COPIED_KEYS if key in info}
        record |= self._cameras(info)
        record["timestamp"] = info["timestamp"] / 1e6
        record["pts_filename"] = self._resolve(info["lidar_path"]) if "lidar_path" in info else None
        record["lidar2global"] = lidar_to_global(info)
        number = len(self.MAP_CLASSES)
        unknown = sorted(set(info.get("map_annos", ())) - set(range(number)))
        if unknown:
            raise InvalidInputError(
                f"frame {info['token']} of {self.ann_file}: map_annos has the classes {unknown}, but map_classes "
                f"are 0 to {number - 1} ({', '.join(self.MAP_CLASSES)})"
            )
        if "gt_boxes" in info:
            record |= self._annotations(info)
        if self.test_mode and "gt_ego_fut_trajs" in info:
            record["fut_boxes"] = self._future_boxes(info, index)
        return record

    def _cameras(self, info: dict) -> dict:
        """Return file names and matrices of the cameras, in the order of the file."""
        found = tuple(info["cams"])
        where = f"frame {info['token']} of {self.ann_file}"
        if len(found) != self.num_cameras:
            raise InvalidInputError(
                f"{where} must have {self.num_cameras} cameras (num_cameras), got {len(found)}: {', '.join(found)}"
            )
        if found != self.camera_names:
            raise InvalidInputError(
                f"{where} must have its cameras in the order of other frames, {', '.join(self.camera_names)}, got "
                f"{', '.join(found)}"
            )
        cameras = info["cams"].values()
        return {
            "cam_names": found,
            "img_filename": [self._resolve(camera["data_path"]) for camera in cameras],
            "lidar2img": [_projection(camera) for camera in cameras],
            "cam_intrinsic": [camera["cam_intrinsic"][:3, :3].copy() for camera in cameras],
        }

    def _annotations(self, info: dict) -> dict:
        warn = self._warn_once
        where = f"frame {info['token']} of {self.ann_file}"
        mask = self._measured(info) if self.test_mode else self._valid(info)
        if len(mask) and not mask.any():
            warn(
                "valid_flag",
                f"{where}: none of its {len(mask)} boxes is used, because num_lidar_pts or valid_flag says that no "
                "sensor has measured them. Leave out these keys if they are not known",
            )
        boxes = info["gt_boxes"][mask]
        for problem, is_right in (
            ("are NaN or infinite", np.isfinite(boxes[:, :7])),
            ("have no positive size", boxes[:, 3:6] > 0),
        ):
            wrong = np.flatnonzero(mask)[~is_right.all(axis=1)]
            if len(wrong):
                raise InvalidInputError(f"{where} has boxes that {problem}: {wrong.tolist()} (gt_boxes)")
        annotations = {key: info[key][mask] for key in _BOX_KEYS if key in info}
        check_finite(where, **annotations)
        names = annotations["gt_names"].tolist()
        labels = [self._label(name, where) for name in names]
        if labels and max(labels) < 0:
            warn(
                "gt_names",
                f"{where}: none of its boxes is used, because none of their gt_names {sorted(set(names))} is one of "
                f"the classes {self.CLASSES}",
            )
        annotations["gt_labels_3d"] = np.array(labels, dtype=np.int64)
        annotations["gt_bboxes_3d"] = boxes if self.test_mode else np.nan_to_num(boxes)
        if "instance_inds" in annotations:
            tracks, repeated = without_repeats(annotations["instance_inds"])
            if repeated:
                warn(
                    "instance_inds",
                    f"{where} has several boxes of the tracks {repeated} (instance_inds). Such boxes count as boxes "
                    "without a track, here and in other frames",
                )
            # Denoising queries are followed by these numbers. A box without a track gets one that no other box has.
            untracked = np.flatnonzero(tracks < 0)
            tracks[untracked] = -2 - (zlib.crc32(info["token"].encode()) << 16) - np.arange(len(untracked))
            annotations["instance_inds"] = tracks
        return annotations

    def _label(self, name: str, where: str) -> int:
        """Return the label of a class, or -1 if it is not used."""
        label = self._label_of_class.get(name, -1)
        if label < 0 and (hint := look_alike(name, self.CLASSES)):
            raise InvalidInputError(f"{where}: gt_names has {name!r}, which is no class: {hint}")
        return label

    def _compare_scales(self, conf: dict) -> None:
        factor = factor_of_tests(conf)
        low, high = conf["resize_lim"]
        if not low <= factor <= high:
            self._warn_once(
                "resize_lim",
                f"data_aug_conf: training resizes images by resize_lim = {low:g} to {high:g}, and tests by "
                f"{factor:.3g}, so that they cover final_dim. Objects have other sizes there",
            )

    def _warn_once(self, about: str, text: str) -> None:
        """Log a warning, unless there has been one about the same key."""
        if about not in self._warned_about:
            self._warned_about.add(about)
            print_log(text, logger="current", level=logging.WARNING)

    def _valid(self, info: dict) -> np.ndarray:
        """Return the mask of the boxes to train on, bool [n]."""
        flag = info.get("valid_flag")
        if self.use_valid_flag and flag is None:
            raise InvalidInputError(
                f"frame {info['token']} of {self.ann_file}: valid_flag is missing, which use_valid_flag=True needs"
            )
        counts = info.get("num_lidar_pts") if "lidar_path" in info else None
        if counts is not None and not self.use_valid_flag:
            return counts > 0
        return np.ones(len(info["gt_boxes"]), dtype=bool) if flag is None else flag

    def _measured(self, info: dict) -> np.ndarray:
        """Return the mask of boxes that nuScenes' evaluation counts, which have a lidar or a radar point."""
        if "num_lidar_pts" not in info or "lidar_path" not in info:
            return self._valid(info)
        return info["num_lidar_pts"] + info.get("num_radar_pts", 0) > 0

    def _future_boxes(self, info: dict, index: int) -> list[np.ndarray]:
        """Return the boxes [m, 7] at each of the coming steps, in the lidar coordinates of this frame.

        Frames of the file count even if ``load_interval`` leaves them out.

        Args:
            info: the record of the frame. index: its position in the data set.
        """
        num_steps = int(np.sum(info["gt_ego_fut_masks"]))
        from_global = inverse_pose(lidar_to_global(info))
        boxes_at = functools.cache(functools.partial(self._boxes_from, from_global))
        here = range(len(self))[index] * self._interval
        scene = self._all_scenes[here]
        first, end = np.searchsorted(self._all_scenes, [scene, scene + 1]).tolist()
        times = self._all_times[first:end]
        boxes_of_step: list[np.ndarray] = []
        for step in coming_steps(times, here - first, num_steps, self.step_s):
            before, after = boxes_at(first + step.before), boxes_at(first + step.after)
            if before is None or after is None:
                break
            seconds = float(times[step.after] - times[step.before]) / 1e6
            boxes = boxes_between(before, after, step.share, seconds)
            if boxes is None:
                self._warn_once(
                    "fut_boxes",
                    f"frame {info['token']} of {self.ann_file}: the boxes {self.step_s:g} s later are "
                    "between two frames, and some have neither a track (instance_inds) nor a velocity. Such steps are "
                    "left out of the planner's metric",
                )
                break
            boxes_of_step.append(boxes)
        return boxes_of_step

    def _boxes_from(self, from_global: np.ndarray, position: int) -> TrackedBoxes | None:
        """Return the boxes of a frame in other coordinates, or None if the frame is not labelled.

        Args:
            from_global: [4, 4], from the world to these coordinates.
            position: the number of the frame among all frames, in order of scene and time.
        """
        info = self._info(self._all_frames[position])
        if "gt_boxes" not in info:
            return None
        used = self._valid(info)
        tracks = info.get("instance_inds", np.full(len(used), -1))[used]
        boxes = moved_boxes(info["gt_boxes"][used], from_global @ lidar_to_global(info))
        return TrackedBoxes(boxes[:, :7], boxes[:, 7:], without_repeats(tracks)[0])

    def _resolve(self, path: str) -> str:
        """Return the path of a file, as given or within ``data_root``.

        Published info files contain paths such as ``./data/nuscenes/samples/…``, which ``data_root`` replaces.
        """
        root = self.data_root
        given = Path(path)
        if root is None or given.is_absolute():
            return str(path)
        inside = Path(root, path)
        if inside.exists():
            return str(inside)
        parts = given.parts
        for folder in ("samples", "sweeps"):
            if folder in parts:
                return str(Path(root, *parts[parts.index(folder) :]))
        return str(path if given.exists() else inside)


_COPIED_KEYS = (
    "token",
    "scene_token",
    "ego2global_translation",
    "ego_status",
    "map_annos",
    "gt_ego_fut_trajs",
    "gt_ego_fut_masks",
    "gt_ego_fut_cmd",
)
_BOX_KEYS = ("gt_names", "gt_attributes", "instance_inds", "gt_agent_fut_trajs", "gt_agent_fut_masks")


def _projection(camera: dict) -> np.ndarray:
    """Return the matrix [4, 4] from the lidar frame to the pixels of a camera."""
    to_lidar = pose_matrix(camera["sensor2lidar_translation"], camera["sensor2lidar_rotation"])
    given = camera["cam_intrinsic"]
    rows, columns = given.shape
    intrinsic = np.eye(4)
    intrinsic[:rows, :columns] = given
    return intrinsic @ np.linalg.inv(to_lidar)


def without_repeats(tracks: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """Return the numbers of tracks [n], with -1 for those that several boxes have, and these numbers."""
    numbers, counts = np.unique(tracks[tracks >= 0], return_counts=True)
    repeated = numbers[counts > 1]
    return np.where(np.isin(tracks, repeated), -1, tracks), repeated.tolist()


def _where_from(ann_file: str, data_root: str | None) -> str:
    root = data_root or "FOLDER"
    out_dir = Path(ann_file).parent
    return (
        f"get nuScenes from nuscenes.org, unpack it in {root} and make its info files: visdet prepare-nuscenes "
        f"{root} --out-dir {out_dir}; for frames of your own, set ann_file and data_root"
    )
