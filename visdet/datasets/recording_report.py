"""The check of a whole info file, and its description in a few lines."""

from collections import Counter
from pathlib import Path

import numpy as np

from visdet.errors import InvalidInputError, MissingFileError
from visdet.files.images import open_image, sizes_of
from visdet.structures.polylines import REGION_M, cut_to_region
from visdet.structures.poses import moved_points, wrap_angle

from .frame_records import FRAME_KEYS, check_frame, lidar_to_global
from .future_steps import STEP_S, coming_steps, command_of, has_step_rate
from .info_files import load_infos, sort_frames
from .nuscenes import NuScenes3DDetTrackDataset

_WRONG_PATH_M = 1.0
_MOVING_M_S = 1.0
_TURNED = np.pi / 4


def recording_report(path: str, data_root: str | None = None) -> list[str]:
    """Return what an info file holds, in lines that end with those to copy into a config.

    Every record is read as in training, and every image is opened.

    Args:
        path: the info file.
        data_root: the folder that the paths in the file are relative to.

    Raises:
        UserError: a record, or a file that it names, cannot be used. The message names it.
    """
    unchecked, _ = load_infos(path)
    order, _, times = sort_frames(unchecked, path)
    infos = [check_frame(unchecked[number], path, number) for number in order.tolist()]
    boxes: Counter[str] = Counter()
    used: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    places: Counter[str] = Counter()
    labels: set[int] = {2}
    for info in infos:
        boxes.update(map(str, info.get("gt_names", ())))
        labels.update(info.get("map_annos", ()))
    dataset = NuScenes3DDetTrackDataset(
        path,
        data_root=data_root,
        classes=sorted(boxes) or None,
        map_classes=[str(label) for label in range(max(labels) + 1)],
        num_cameras=max(len(info["cams"]) for info in infos),
    )
    size: tuple[int, int] | None = None
    for index, info in enumerate(infos):
        record = dataset.get_data_info(index)
        used.update(map(str, record.get("gt_names", ())))
        for label, of_class in info.get("map_annos", {}).items():
            for line in of_class:
                parts = cut_to_region(line, label == 0)
                lines.update(["all", "left out" if not parts else "whole" if parts[0] is line else "cut"])
        for camera, name in zip(record["cam_names"], record["img_filename"], strict=True):
            where = f"frame {info['token']} of {path}, data_path of {camera}: "
            with open_image(name, where=where) as image:  # Its pixels are not decoded.
                _, stored = sizes_of(image)
            size = size or stored
            if stored != size:
                width, height = stored
                W, H = size
                raise InvalidInputError(
                    f"{where}{name} is {width} x {height} pixels, but other images are {W} x {H}"
                )
        if "gt_bboxes_3d" in record:
            places.update(_places(record["gt_bboxes_3d"], record["lidar2img"], size or (0, 0)))
        cloud = record["pts_filename"]
        if cloud is not None and not Path(cloud).exists():
            raise MissingFileError(f"frame {info['token']} of {path}: lidar_path {cloud} does not exist")
    times_of_scene = np.split(times, dataset.scene_starts[1:])
    return _lines(dataset, infos, times_of_scene, boxes, used, lines, places, size or (0, 0))


def _places(boxes: np.ndarray, projections: list[np.ndarray], size: tuple[int, int]) -> dict[str, int]:
    """Return how many boxes of a frame there are, and how many are where boxes of another convention would be.

    Args:
        boxes: [n, 9], in the lidar frame. projections: from there to the pixels of each camera, [4, 4].
        size: the (width, height) of the images.
    """
    is_seen = np.zeros(len(boxes), dtype=bool)
    for projection in projections:
        found = moved_points(boxes[:, :3], projection)
        pixels, depth = found[:, :2], found[:, 2:]  # The pixels are multiplied by the depth, as the size is.
        is_seen |= ((pixels >= 0) & (pixels <= depth * size)).all(axis=1)
    moving = boxes[np.linalg.norm(boxes[:, 7:], axis=1) >= _MOVING_M_S]
    _, _, _, length, width, _, yaw, vx, vy = moving.T
    is_turned = np.abs(wrap_angle(yaw - np.arctan2(vy, vx))) > _TURNED
    is_wide = width > length
    return {
        "all": len(boxes),
        "unseen": np.sum(~is_seen),
        "moving": len(moving),
        "turned": np.sum(is_turned),
        "wide": np.sum(is_wide),
    }


def _lines(
    dataset: NuScenes3DDetTrackDataset,
    infos: list[dict],
    times_of_scene: list[np.ndarray],
    boxes: Counter[str],
    used: Counter[str],
    lines: Counter[str],
    places: Counter[str],
    size: tuple[int, int],
) -> list[str]:
    in_all = set(infos[0]).intersection(*infos)
    absent = [key.name for key in FRAME_KEYS if key.name not in in_all]
    seconds = np.concatenate([np.diff(part) for part in times_of_scene]) / 1e6
    names = sorted(boxes)
    width, height = size
    rate = f", {np.median(seconds):.2g} s apart" if len(seconds) else ""
    counts = ", ".join(f"{name} {boxes[name]} ({used[name]} used)" for name in names)
    return [
        f"{len(infos)} frames in {len(times_of_scene)} scenes{rate}",
        *_future_lines(infos, times_of_scene, seconds),
        f"cameras: {', '.join(infos[0]['cams'])}",
        f"boxes: {counts or 'none'}",
        f"of {places['all']} used boxes, {places['unseen']} have their centre in no image; of "
        f"{places['moving']} that move at {_MOVING_M_S:g} m/s or more, {places['turned']} point elsewhere than "
        f"they move, and {places['wide']} are wider than long",
        f"map lines: {lines['all']}, of which {lines['cut']} are cut and {lines['left out']} left out, as they are "
        f"beyond the region of {REGION_M[0]:g} x {REGION_M[1]:g} m (VectorizeMap's roi_size)",
        f"keys that not every frame has: {', '.join(absent) or 'none'}",
        "for the config:",
        f"class_names = {names}",
        f"num_cameras = {dataset.num_cameras}",
        f"image_width, image_height = {width}, {height}",
    ]


def _future_lines(infos: list[dict], times_of_scene: list[np.ndarray], seconds: np.ndarray) -> list[str]:
    """Return what the rate of the frames means for motion and planning, and how many paths and commands do not fit."""
    lines: list[str] = []
    say = lines.append
    if len(seconds) and all(has_step_rate(times) for times in times_of_scene if len(times) > 1):
        say(f"motion and planning: a frame is a step of {STEP_S:g} s")
        dropped = int((seconds > 1.5 * STEP_S).sum())
        if dropped:
            lines[0] += f", but {dropped} gaps are longer, in which boxes are interpolated by track"
    elif len(seconds):
        say(
            f"motion and planning: {1 / np.median(seconds):.3g} frames per second, but steps of {STEP_S:g} s. "
            "gt_agent_fut_trajs and gt_ego_fut_trajs must hold the displacements of such steps, not of frames. The "
            "boxes that plans are compared with are looked up by time stamp, and interpolated by track"
        )
    first, compared = 0, 0
    wrong, opposite = 0, 0
    driving, aside = 0, 0
    for times in times_of_scene:
        end = first + len(times)
        frames = infos[first:end]
        first = end
        poses = np.stack([lidar_to_global(info) for info in frames])
        # Where the vehicle is in the next frame, in the lidar frame of this one.
        x, y = np.abs((np.linalg.inv(poses[:-1]) @ poses[1:])[:, :2, 3]).T
        drives = np.hypot(x, y) > _MOVING_M_S * np.diff(times) / 1e6
        driving += np.sum(drives)
        aside += np.sum(drives & (x > y))
        for here, info in enumerate(frames):
            known = int(np.sum(info.get("gt_ego_fut_masks", 0)))
            steps = coming_steps(times, here, known)
            if steps:
                places = (np.linalg.inv(poses[here]) @ poses)[:, :2, 3]
                driven = steps[-1].between(places)
                path = info["gt_ego_fut_trajs"][: len(steps)]
                goal = path.sum(axis=0)
                is_right, is_left, _ = info["gt_ego_fut_cmd"]
                goes_right, goes_left, _ = command_of(path)
                compared += 1
                wrong += bool(np.linalg.norm(goal - driven) > _WRONG_PATH_M)
                opposite += bool(is_right * goes_left + is_left * goes_right)
    if wrong:
        say(
            f"gt_ego_fut_trajs: {wrong} of {compared} paths end more than {_WRONG_PATH_M:g} m from where ego2global "
            f"says that the vehicle is at that time. Their steps must be {STEP_S:g} s long"
        )
    if 2 * aside > driving:
        say(
            f"ego2global: from {aside} of {driving} frames, the vehicle moves more aside than ahead. The x axis of "
            "the lidar frame must point to the right, and its y axis ahead"
        )
    if opposite:
        say(
            f"gt_ego_fut_cmd: {opposite} of {compared} commands say right where the path leads left, or the reverse. "
            "Their order is right, left, straight"
        )
    return lines
