"""Pictures of driving frames show what they are given, where it is."""

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from PIL import Image

from visdet.structures import DrivingDataSample
from visdet.structures.class_names import class_palette
from visdet.visualization.driving_views import (
    MAP_COLORS,
    PLAN_COLOR,
    TRUTH_COLOR,
    Scene,
    draw_frame,
    scene_of_prediction,
    scene_of_truth,
    write_gif,
)

CLASSES = ("car", "truck")
NAMES = ("CAM_FRONT", "CAM_FRONT_RIGHT", "CAM_FRONT_LEFT", "CAM_BACK", "CAM_BACK_LEFT", "CAM_BACK_RIGHT")
# A camera at the origin that looks along y.
AHEAD = np.array(
    [[100.0, 64.0, 0.0, 0.0], [0.0, 24.0, -100.0, 0.0], [0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]]
)
BEHIND = AHEAD * np.array([-1, -1, 1, 1])


def box(x, y, yaw=np.pi / 2):
    return np.array([[x, y, 0.0, 4.0, 2.0, 1.5, yaw, 0.0, 0.0]])


def draw(prediction=None, truth=None, **arguments):
    images = [np.zeros((48, 128, 3), np.uint8)] * 6
    projections = [AHEAD, *[BEHIND] * 5]
    return draw_frame(images, projections, NAMES, CLASSES, prediction, truth, view_width=128, **arguments)


def spots(picture, color):
    """Return the centre (x, y) and number of the pixels of about this colour."""
    near = np.abs(picture.astype(int) - color).max(axis=-1) < 30
    rows, columns = np.nonzero(near)
    return (columns.mean(), rows.mean()) if len(rows) else None, len(rows)


def without_legend(picture):
    picture = picture.copy()
    picture[-160:, -100:] = 0
    return picture


def test_boxes_in_the_camera_that_sees_them():
    picture = draw(truth=Scene(box(0, 10), np.array([1])))
    color = class_palette(2)[1]
    cameras = without_legend(picture)[:96]
    (x, y), count = spots(cameras, color)
    # The front camera is in the middle of the upper row; the box is straight ahead.
    assert count > 30 and abs(x - (128 + 64)) < 3 and abs(y - 24) < 3
    assert spots(cameras[48:], color)[1] == 0
    near, _ = spots(without_legend(draw(truth=Scene(box(3, 10), np.array([1]))))[:48, 128:256], color)
    assert near[0] > 64 + 20


def test_from_above():
    scene = Scene(
        box(10, 5),
        np.array([0]),
        lines=[(2, np.array([[-20.0, -20.0], [-20.0, 20.0]]))],
        plan=np.array([[0.0, 5.0], [0.0, 10.0]]),
    )
    truth = Scene(box(-10, -5), np.array([0]), plan=np.array([[-5.0, 0.0], [-10.0, 0.0]]))
    both = draw(scene, truth, reach_m=32.0)
    assert both.shape == (96 + 192, 384, 3)
    above = without_legend(both)[96:]
    scale = 192 / 64
    (x, y), _ = spots(above[:, :192], class_palette(2)[0])
    assert_allclose([x, y], [96 + 10 * scale, 96 - 5 * scale], atol=4)
    (x, y), _ = spots(above[:, 192:], class_palette(2)[0])
    assert_allclose([x, y], [96 - 10 * scale, 96 + 5 * scale], atol=4)
    (x, _), count = spots(above, MAP_COLORS[2])
    assert abs(x - (96 - 20 * scale)) < 3 and count > 100
    (x, y), count = spots(above, PLAN_COLOR)
    assert abs(x - 96) < 2 and 96 - 10 * scale - 4 < y < 96 and count > 20
    # The true path is in both halves.
    assert all(spots(part, TRUTH_COLOR)[1] > 20 for part in (above[:, :192], above[:, 192:]))


def test_empty_scenes_and_other_cameras():
    empty = Scene(np.zeros((0, 9)), np.zeros(0, int))
    assert draw(empty, empty).shape == (288, 384, 3)
    images = [np.zeros((48, 128, 3), np.uint8)] * 5
    picture = draw_frame(images, [AHEAD] * 5, "abcde", CLASSES, empty, empty, view_width=127)
    assert picture.shape[1] == 381


def predicted(results):
    sample = DrivingDataSample()
    sample.set_predictions(results)
    return sample


def test_scene_of_a_prediction():
    result = {
        "boxes_3d": torch.cat([torch.from_numpy(box(1, 2)), torch.from_numpy(box(3, 4))]),
        "scores_3d": torch.tensor([0.9, 0.1]),
        "labels_3d": torch.tensor([1, 0]),
        "instance_ids": torch.tensor([7, -1]),
        "trajs_3d": torch.arange(2 * 6 * 12 * 2).reshape(2, 6, 12, 2).float(),
        "trajs_score": torch.tensor([[0.1, 0.4, 0.2, 0.0, 0.8, 0.0]] * 2),
        "vectors": [np.zeros((20, 2)), np.ones((20, 2))],
        "scores": torch.tensor([0.2, 0.6]),
        "labels": torch.tensor([0, 2]),
        "final_planning": torch.ones(6, 2),
    }
    scene = scene_of_prediction(predicted(result), score_thr=0.3, map_score_thr=0.5, num_modes=2)
    assert (
        scene.boxes[:, :2].tolist() == [[1, 2]] and scene.ids.tolist() == [7] and scene.labels.tolist() == [1]
    )
    (modes,) = scene.futures
    assert [weight for _, weight in modes] == pytest.approx([0.5, 1.0])
    assert_array_equal(modes[-1][0], result["trajs_3d"][0, 4])
    assert [label for label, _ in scene.lines] == [2] and scene.plan.shape == (6, 2)
    empty = {"boxes_3d": torch.zeros(0, 9), "scores_3d": torch.zeros(0), "labels_3d": torch.zeros(0)}
    assert len(scene_of_prediction(predicted(empty)).boxes) == 0


def test_scene_of_ground_truth():
    sample = DrivingDataSample(
        metainfo={"instance_id": np.array([5])},
        gt_bboxes_3d=torch.from_numpy(box(1, 2)),
        gt_labels_3d=torch.tensor([0]),
        gt_agent_fut_trajs=torch.ones(1, 12, 2),
        gt_agent_fut_masks=torch.tensor([[1.0] * 3 + [0.0] * 9]),
        gt_ego_fut_trajs=torch.ones(6, 2),
        gt_ego_fut_masks=torch.tensor([1.0, 1, 0, 0, 0, 0]),
    )
    scene = scene_of_truth(sample)
    assert_allclose(scene.futures[0][0][0], [[2, 3], [3, 4], [4, 5]])
    assert_allclose(scene.plan, [[1, 1], [2, 2]])
    assert scene.ids.tolist() == [5] and scene.lines == []


def test_gif(tmp_path):
    pictures = [np.full((20, 40, 3), shade, np.uint8) for shade in (0, 120, 250)]
    write_gif(tmp_path / "a.gif", pictures, frames_per_second=4, width=80)
    with Image.open(tmp_path / "a.gif") as gif:
        assert gif.n_frames == 3 and gif.size == (80, 40) and gif.info["duration"] == 250
