"""The driving scenes: the pictures show what the annotations say, and the annotations agree with each other."""

from itertools import pairwise

import cv2
import numpy as np
import pytest
from datasets.driving_files import SMALL, driving_infos, lidar_pose
from numpy.testing import assert_allclose, assert_array_equal, assert_equal

from visdet.datasets import DrivingScenesDataset, make_driving_scenes
from visdet.datasets.synthetic.driving_renderer import GROUND_Z, Renderer, boxes_in_lidar
from visdet.datasets.synthetic.driving_scenes import _LIDAR_TO_EGO
from visdet.datasets.synthetic.driving_world import (
    DRIVING_CLASSES,
    Agents,
    make_world,
)
from visdet.registry import DATASETS
from visdet.structures.poses import box_corners, inverse_pose, pose_in_plane

TINY = dict(num_train=2, num_val=1, num_test=1, num_frames=2, image_size=(32, 96))


@pytest.fixture(scope="module")
def infos():
    return driving_infos()


def test_files_depend_on_the_seed_alone(tmp_path):
    one = make_driving_scenes(tmp_path / "one", **TINY, num_workers=1)
    two = make_driving_scenes(tmp_path / "two", **TINY, num_workers=2)
    other = make_driving_scenes(tmp_path / "other", **TINY, seed=1, num_workers=1)
    files = sorted([*one.rglob("*.jpg"), *one.rglob("*.bin")])
    assert len(files) == 4 * 2 * (6 + 1)
    for file in files:
        same, another = (folder / file.relative_to(one) for folder in (two, other))
        assert file.read_bytes() == same.read_bytes() != another.read_bytes()
    first, second = (driving_infos(folder) for folder in (one, two))
    assert_equal(first, second)


def one_box_world(box_xy, yaw, color, label=0):
    """A world of one agent of 4 x 2 x 1.5 m, given in the lidar frame of frame 0."""
    world = make_world(np.random.default_rng(0), 2)
    pose = pose_in_plane(world.ego_yaw[0], world.ego_xy[0]) @ _LIDAR_TO_EGO
    xy = np.array(box_xy) @ pose[:2, :2].T + pose[:2, 3]
    turn = np.arctan2(pose[1, 0], pose[0, 0])
    world.agents = Agents(
        np.array([label]),
        np.array([[4.0, 2.0, 1.5]]),
        np.tile(xy, (1, 2, 1)),
        np.full((1, 2), yaw + turn),
        np.zeros((1, 2, 2)),
        np.array([color], dtype=np.uint8),
    )
    return world, pose


@pytest.mark.parametrize(
    ("camera", "xy"),
    [(0, (0.5, 12.0)), (1, (9.0, 7.0)), (2, (-9.0, 7.0)), (3, (0, -10)), (4, (-9, -3)), (5, (9, -3))],
)
def test_a_box_is_painted_where_it_projects(camera, xy):
    world, pose = one_box_world(xy, 0.4, (0, 0, 255))
    renderer = Renderer(256, 96)
    shot = renderer.shoot(world, 0, pose, np.random.default_rng(0))
    box = boxes_in_lidar(world, 0, pose)
    assert_allclose(box[0], [*xy, GROUND_Z + 0.75, 4, 2, 1.5, 0.4], atol=1e-9)
    view = renderer.cameras[camera]
    seen = (box_corners(box)[0] - view.translation) @ view.rotation @ view.intrinsic.T
    assert (seen[:, 2] > 0).all()
    pixels = seen[:, :2] / seen[:, 2:]
    image = shot.images[camera].astype(int)
    red = image[..., 2] - image[..., :2].max(axis=-1) > 60
    rows, columns = np.nonzero(red)
    drawn = [columns.min(), rows.min(), columns.max(), rows.max()]
    expected = [*pixels.min(axis=0), *pixels.max(axis=0)]
    assert_allclose(drawn, np.clip(expected, 0, [255, 95, 255, 95]), atol=2.0)
    assert 1.1 * shot.visible[0] >= red.sum() > 100  # The rim of a box is painted in part.


def test_futures_velocities_and_poses_agree(infos):
    checked = 0
    for here, after in pairwise(infos):
        if here["scene_token"] != after["scene_token"]:
            assert after["sweeps"] == [] and not here["gt_agent_fut_masks"].any()
            continue
        assert after["timestamp"] - here["timestamp"] == 500_000 and after["sweeps"]
        to_here = inverse_pose(lidar_pose(here)) @ lidar_pose(after)
        assert_allclose(here["gt_ego_fut_trajs"][0], to_here[:2, 3], atol=1e-4)
        places = after["gt_boxes"][:, :3] @ to_here[:3, :3].T + to_here[:3, 3]
        both, now, then = np.intersect1d(here["instance_inds"], after["instance_inds"], return_indices=True)
        moved = places[then, :2] - here["gt_boxes"][now, :2]
        assert_allclose(here["gt_agent_fut_trajs"][now, 0], moved, atol=1e-4)
        assert_allclose(here["gt_velocity"][now] * 0.5, moved, atol=0.8)
        assert here["gt_agent_fut_masks"][now, 0].all()
        assert_array_equal(here["gt_names"][now], after["gt_names"][then])
        checked += len(both)
    assert checked > 100


def test_annotations(infos):
    assert set(np.concatenate([info["gt_names"] for info in infos])) == set(DRIVING_CLASSES)
    for info in infos:
        assert list(info["cams"]) == [
            "CAM_FRONT",
            "CAM_FRONT_RIGHT",
            "CAM_FRONT_LEFT",
            "CAM_BACK",
            "CAM_BACK_LEFT",
            "CAM_BACK_RIGHT",
        ]
        assert (info["num_lidar_pts"][info["valid_flag"]] >= 6).all()
        assert sorted(info["map_annos"]) == [0, 1, 2]
        for lines in info["map_annos"].values():
            for line in lines:
                assert line.shape[1] == 2 and (np.abs(line) <= np.array([15, 30]) + 1e-9).all()
        for line in info["map_annos"][0]:
            assert_array_equal(line[0], line[-1])
        side = info["gt_ego_fut_trajs"].sum(axis=0)[0]
        assert info["gt_ego_fut_cmd"].tolist() == [float(side >= 2), float(side <= -2), float(abs(side) < 2)]
        assert info["ego_status"].shape == (10,) and 0 <= info["ego_status"][6] < 12
        # The vehicle drives ahead, which is y in the lidar frame.
        assert info["gt_ego_fut_trajs"][0, 1] > -1e-3
    frames = [int(info["gt_ego_fut_masks"].sum()) for info in infos[:8]]
    assert frames == [6, 6, 5, 4, 3, 2, 1, 0]


def test_dataset_makes_its_files_and_is_registered(tmp_path, monkeypatch):
    config = dict(
        type="DrivingScenesDataset",
        data_root=str(tmp_path / "made"),
        generator=TINY,
        ann_file="driving_infos_val.npz",
        test_mode=True,
    )
    dataset = DATASETS.build(config)
    assert isinstance(dataset, DrivingScenesDataset) and len(dataset) == 2
    assert dataset.metainfo["classes"] == DRIVING_CLASSES
    assert cv2.imread(dataset[0]["img_filename"][0]).shape == (32, 96, 3)
    assert SMALL["num_frames"] == 8
