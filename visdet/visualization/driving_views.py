"""Pictures of driving frames, which show the boxes in the camera views and a top view of the scene."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from PIL import Image

from visdet.files.writing import written_whole
from visdet.structures import DrivingDataSample
from visdet.structures.class_names import class_palette
from visdet.structures.driving_data_sample import predictions_of
from visdet.structures.polylines import parts_inside
from visdet.structures.poses import FIXED_POINT_BITS, box_corners, fixed_point, moved_points, projected

from .drawing import contact_sheet, dark, text_width, write_text

MAP_COLORS = ((70, 130, 255), (255, 170, 40), (60, 200, 90))  # crossing, divider, boundary
PLAN_COLOR = (255, 60, 200)
TRUTH_COLOR = (40, 230, 230)
_EGO_COLOR = (235, 235, 235)
_EGO_LENGTH = 4.08
_EGO_WIDTH = 1.73
# The order of the cameras in the picture, of which the first half is in the first row.
_PLACES = (
    "CAM_FRONT_LEFT",
    "CAM_FRONT",
    "CAM_FRONT_RIGHT",
    "CAM_BACK_LEFT",
    "CAM_BACK",
    "CAM_BACK_RIGHT",
)
_AROUND = np.array([[0, 1], [1, 2], [2, 3], [3, 0]])
_EDGES = np.concatenate([_AROUND, _AROUND + 4, np.arange(8).reshape(2, 4).T])  # by the numbers of the corners
_NEAR = 0.2

Color = tuple[int, int, int]


@dataclass
class Scene:
    """The true or predicted objects around the vehicle, in metres in its lidar frame (x to the right, y ahead).

    Attributes:
        boxes: [n, >= 7]. labels: [n]. ids: [n] or None.
        futures: for each box a list of (path [T, 2], weight in 0..1).
        lines: a list of (label, polyline [m, 2]).
        plan: [T, 2] or None.
    """

    boxes: np.ndarray
    labels: np.ndarray
    ids: np.ndarray | None = None
    futures: list[list[tuple[np.ndarray, float]]] = field(default_factory=list)
    lines: list[tuple[int, np.ndarray]] = field(default_factory=list)
    plan: np.ndarray | None = None

    def color(self, index: int, colors: Sequence[Color]) -> Color:
        """Return the colour of a box among those of the classes."""
        return colors[self.labels[index] % len(colors)]

    def number(self, index: int) -> str:
        """Return the id of a box as text, which is empty if it has none."""
        ids = self.ids
        return "" if ids is None or ids[index] < 0 else str(ids[index])


def scene_of_truth(sample: DrivingDataSample) -> Scene:
    """Return the ground truth of one frame. Parts that the sample lacks stay empty."""
    sample = sample.numpy()
    get = sample.get
    boxes = get("gt_bboxes_3d", np.zeros((0, 9)))
    scene = Scene(boxes, get("gt_labels_3d", np.zeros(0, int)))
    ids = get("instance_id")
    if ids is not None and len(ids) == len(boxes):
        scene.ids = ids
    if "gt_agent_fut_trajs" in sample:
        paths = boxes[:, None, :2] + sample.gt_agent_fut_trajs.cumsum(axis=1)
        is_known = sample.gt_agent_fut_masks > 0
        scene.futures = [[(path[known], 1.0)] for path, known in zip(paths, is_known, strict=True)]
    if "vectors" in sample:
        scene.lines = list(zip(sample.vector_labels, sample.vectors, strict=True))
    if "gt_ego_fut_trajs" in sample:
        scene.plan = sample.gt_ego_fut_trajs.cumsum(axis=0)[sample.gt_ego_fut_masks > 0]
    return scene


def scene_of_prediction(
    sample: DrivingDataSample,
    score_thr: float | np.ndarray = 0.3,
    map_score_thr: float | np.ndarray = 0.4,
    num_modes: int = 3,
) -> Scene:
    """Return the predictions for one frame.

    Args:
        sample: the sample with the predictions.
        score_thr: boxes with a lower score are left out; one number, or one for each class.
        map_score_thr: map lines with a lower score are left out; the same.
        num_modes: the number of trajectories per box, the most probable ones.
    """
    result = predictions_of(sample.numpy())
    get = result.get
    labels = get("labels_3d", np.zeros(0, int))
    scores = get("scores_3d", np.zeros(0))
    kept = np.flatnonzero(scores >= _least(score_thr, labels))
    scene = Scene(get("boxes_3d", np.zeros((0, 9)))[kept], labels[kept])
    if "instance_ids" in result:
        scene.ids = result["instance_ids"][kept]
    if "trajs_3d" in result:
        for row in kept:
            weights = result["trajs_score"][row]
            modes = np.argsort(weights)[-num_modes:]  # the best last
            shares = weights[modes] / max(weights.max(), 1e-6)
            scene.futures.append(list(zip(result["trajs_3d"][row][modes], shares, strict=True)))
    if "vectors" in result:
        labels = result["labels"]
        are_kept = result["scores"] >= _least(map_score_thr, labels)
        scene.lines = list(compress(zip(labels, result["vectors"], strict=True), are_kept))
    scene.plan = get("final_planning")
    return scene


def _least(thresholds: float | np.ndarray, labels: np.ndarray) -> Any:
    """Return the threshold of each label."""
    return thresholds[labels.astype(int)] if isinstance(thresholds, np.ndarray) else thresholds


def draw_frame(
    images: Iterable[np.ndarray],
    lidar2img: Iterable[np.ndarray],
    cam_names: Sequence[str],
    classes: Sequence[str],
    prediction: Scene | None = None,
    truth: Scene | None = None,
    reach_m: float = 32.0,
    view_width: int = 384,
    title: str = "",
) -> np.ndarray:
    """Return a picture of one frame, RGB uint8 [H, W, 3], with the camera views and, below them, top views.

    The camera views show the predicted boxes, or the true boxes if there is no prediction. The top views of prediction
    and truth are side by side. The plan is drawn together with the vehicle's true path.

    Args:
        images: RGB uint8 [h, w, 3] of each camera, as the model saw them.
        lidar2img: [4, 4] of each camera.
        cam_names: the name of each camera. Cameras of nuScenes have fixed places, others are arranged in order.
        classes: names of the labels.
        prediction, truth: at least one of them must be given.
        reach_m: the distance in metres that the top view shows in every direction.
        view_width: the width of a camera view in the picture, in pixels.
        title: a text in the lower left corner.
    """
    shown: Any = prediction or truth
    colors = class_palette(len(classes))
    views = {}
    for name, image, projection in zip(cam_names, images, lidar2img, strict=True):
        height, width = image.shape[:2]
        view_height = round(height * view_width / width)
        view = cv2.resize(image, (view_width, view_height), interpolation=cv2.INTER_LINEAR)
        zoom = np.diag([view_width / width, view_height / height, 1.0, 1.0])
        _draw_boxes(view, shown, zoom @ projection, colors)
        write_text(view, name.removeprefix("CAM_").replace("_", " ").lower(), (6, 16))
        views[name] = view
    panels = [
        (f"{label} from above", scene)
        for label, scene in (("prediction", prediction), ("truth", truth))
        if scene
    ]
    cameras = _tile(views)
    full_width = cameras.shape[1]
    width = -(-full_width // len(panels))
    true_plan = truth.plan if truth else None
    above = [
        _draw_from_above(scene, true_plan, colors, reach_m, width, min(width, view_width * 3 // 2), label)
        for label, scene in panels
    ]
    picture = np.vstack([cameras, np.hstack(above)[:, :full_width]])
    _write_legend(picture, classes, colors)
    write_text(picture, title, (6, len(picture) - 8))
    return picture


def _tile(views: dict[str, np.ndarray]) -> np.ndarray:
    """Return the views in two rows. Places without a camera stay dark."""
    names = _PLACES if views.keys() <= set(_PLACES) else tuple(views)
    columns = -(-len(names) // 2)
    absent = dark(1, 1)
    placed = [views.get(name, absent) for name in names]
    return contact_sheet([placed[:columns], placed[columns:]], gap=0)


def _draw_boxes(view: np.ndarray, scene: Scene, projection: np.ndarray, colors: list) -> None:
    """Draw the boxes into a camera view, the farthest first."""
    boxes = scene.boxes
    points = moved_points(box_corners(boxes), projection)
    for index in np.argsort(-np.linalg.norm(boxes[:, :2], axis=1)):
        of_box = points[index]
        inside = of_box[:, 2] > _NEAR
        if not inside.any():
            continue
        color = scene.color(index, colors)
        for edge in of_box[_EDGES]:
            _draw_edge(view, edge, color)
        top = projected(of_box[inside]).min(axis=0)
        x, y = top.clip(-1e4, 1e4).astype(int).tolist()
        write_text(view, scene.number(index), (x, y - 2), 10, color)


def _draw_edge(view: np.ndarray, edge: np.ndarray, color: Color) -> None:
    """Draw the part of an edge [2, 3] that is in front of the camera. Its ends are in homogeneous pixels."""
    for part in parts_inside(edge, edge[:, 2] - _NEAR):
        ends = fixed_point(projected(part) - 0.5)  # The centre of OpenCV's first pixel is 0.
        cv2.line(view, ends[0], ends[-1], color, 1, cv2.LINE_AA, FIXED_POINT_BITS)


def _draw_from_above(
    scene: Scene,
    true_plan: np.ndarray | None,
    colors: Sequence[Color],
    reach: float,
    width: int,
    height: int,
    label: str,
) -> np.ndarray:
    """Return the top view of a scene. The vehicle is in the middle and looks up."""
    boxes = scene.boxes
    futures = scene.futures
    plan = scene.plan
    canvas = dark(height, width)
    scale = min(width, height) / (2 * reach)

    def pixels(points: np.ndarray) -> np.ndarray:
        return fixed_point(np.array([width, height]) / 2 + points[..., :2] * (scale, -scale))

    def path(points: np.ndarray, color: Sequence[int], thickness: int = 1, closed: bool = False) -> None:
        cv2.polylines(canvas, [pixels(points)], closed, color, thickness, cv2.LINE_AA, FIXED_POINT_BITS)

    for distance in range(10, int(reach) + 1, 10):
        radius = round(distance * scale)
        cv2.circle(canvas, (width // 2, height // 2), radius, (48, 52, 58), 1, cv2.LINE_AA)
    for kind, line in scene.lines:
        path(line, MAP_COLORS[kind % len(MAP_COLORS)], 2)
    for index, corners in enumerate(box_corners(boxes)[:, :4, :2]):
        center = boxes[index, :2]
        color = scene.color(index, colors)
        for future, weight in futures[index] if futures else ():
            shade = [round(part * (0.25 + 0.6 * weight)) for part in color]
            path(np.vstack([center, future]), shade)
        path(corners, color, 2, closed=True)
        path(np.stack([center, corners[:2].mean(axis=0)]), color)
        x, y = (pixels(corners[0]) >> FIXED_POINT_BITS).tolist()
        write_text(canvas, scene.number(index), (x + 2, y), 10)
    ego = box_corners(np.array([[0, 0, 0, _EGO_LENGTH, _EGO_WIDTH, 1.5, np.pi / 2]]))[0, :4]
    cv2.fillConvexPoly(canvas, pixels(ego), _EGO_COLOR, cv2.LINE_AA, FIXED_POINT_BITS)
    plans = [(true_plan, TRUTH_COLOR, 4), (plan, PLAN_COLOR, 2)]
    for places, color, thickness in plans[:1] if plan is true_plan else plans:
        if places is not None:
            path(np.vstack([[0, 0], places]), color, thickness)
    write_text(canvas, label, (6, 16))
    return canvas


def _write_legend(picture: np.ndarray, classes: Sequence[str], colors: list) -> None:
    """Write the names of classes and lines, in their colours, into the lower right corner."""
    entries = [(name.replace("_", " "), color) for name, color in zip(classes, colors, strict=True)]
    entries += zip(("crossing", "divider", "boundary"), MAP_COLORS, strict=True)
    entries += [("plan", PLAN_COLOR), ("true path", TRUTH_COLOR)]
    width = max(88, *(text_width(name, 11) for name, _ in entries))
    corner = picture[:, -width - 8 :]
    for row, (name, color) in enumerate(reversed(entries)):
        write_text(corner, name, (0, len(picture) - 8 - 15 * row), 11, color)


def write_gif(
    path: str | Path, pictures: Sequence[np.ndarray], frames_per_second: float = 4.0, width: int = 900
) -> None:
    """Write RGB pictures [H, W, 3] as an endless GIF that is ``width`` pixels wide."""
    frames = []
    for picture in pictures:
        image = Image.fromarray(picture)
        image = image.resize((width, round(image.height * width / image.width)), Image.Resampling.LANCZOS)
        frames.append(image.quantize(128, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE))
    milliseconds = round(1000 / frames_per_second)
    with written_whole(path, reaches_disk=False) as partial:
        frames[0].save(partial, save_all=True, append_images=frames[1:], duration=milliseconds, loop=0)
