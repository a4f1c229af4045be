"""Boxes, paths and checks of recordings of any rate: a step of a future is a time, not a frame of the file."""

import numpy as np
import pytest
from numpy.testing import assert_allclose
from PIL import Image

from visdet.datasets import NuScenes3DDetTrackDataset, save_infos
from visdet.datasets.future_steps import coming_steps
from visdet.datasets.nuscenes_converter import _displacements, ego_future
from visdet.datasets.recording_report import recording_report
from visdet.structures.poses import pose_matrix

TWO_HERTZ = np.arange(12) * 0.5
RECORDINGS = {
    "2 Hz": TWO_HERTZ,
    "10 Hz": np.arange(60) * 0.1,
    "5 Hz": np.arange(30) * 0.2,
    "3 Hz": np.arange(20) / 3,
    "1 Hz": np.arange(8) * 1.0,
    "dropped": np.delete(TWO_HERTZ, [2, 5]),
    "uneven": np.cumsum([0.0, *[0.13, 0.24, 0.4, 0.31] * 6]),
}


def record(number, time_s, scene="s", **changes):
    """The vehicle drives east at 10 m/s. A car is 12 m ahead, as fast, and another one comes towards it at 5 m/s."""
    camera = dict(
        data_path="a.png",
        sensor2lidar_rotation=[[1.0, 0, 0], [0, 0, 1], [0, -1, 0]],
        sensor2lidar_translation=[0, 0, 0.0],
        cam_intrinsic=np.eye(3),
    )
    ahead = np.array([12.0, 60 - 15 * time_s])
    boxes = [
        [side, y, -1, 4, 2, 1.5, yaw] for side, y, yaw in zip((0, -4), ahead, (1.5708, -1.5708), strict=True)
    ]
    return {
        "token": f"{scene}-{number}",
        "scene_token": scene,
        "timestamp": 1_500_000_000_000_000 + round(time_s * 1e6),
        "lidar2ego_translation": [0, 0, 1.84],
        "lidar2ego_rotation": [0.5**0.5, 0, 0, -(0.5**0.5)],
        "ego2global_translation": [10 * time_s, 0, 0],
        "ego2global_rotation": [1.0, 0, 0, 0],
        "cams": {"front": camera},
        "gt_boxes": np.array(boxes),
        "gt_names": np.array(["car", "car"]),
        "instance_inds": np.array([3, 7]),
        "gt_ego_fut_trajs": np.tile([0.0, 5.0], (6, 1)),
        "gt_ego_fut_masks": np.ones(6),
        "gt_ego_fut_cmd": np.array([0, 0, 1.0]),
        **changes,
    }


def recording(times, *scene, **changes):
    return [record(*frame, *scene, **changes) for frame in enumerate(times)]


@pytest.fixture
def dataset_of(tmp_path):
    def build(records, **arguments):
        Image.new("RGB", (8, 6)).save(tmp_path / "a.png")
        save_infos(tmp_path / "infos.npz", records, {})
        options = dict(data_root=str(tmp_path), classes=["car"], num_cameras=1, test_mode=True)
        return NuScenes3DDetTrackDataset(str(tmp_path / "infos.npz"), **options | arguments)

    return build


def ahead(dataset, index=0):
    """Return how far ahead the two cars are in each of the coming steps."""
    return np.array([boxes[:, 1] for boxes in dataset.get_data_info(index)["fut_boxes"]]).reshape(-1, 2)


def expected(times, steps=6, of=0):
    passed = np.arange(1, steps + 1) * 0.5
    return np.stack([12 + 10 * passed, 60 - 15 * times[of] - 5 * passed], axis=1)


@pytest.mark.parametrize("name", RECORDINGS)
def test_boxes_are_those_of_the_time_of_a_step(dataset_of, name):
    times = RECORDINGS[name]
    dataset = dataset_of(recording(times))
    assert_allclose(ahead(dataset), expected(times), atol=1e-3)
    assert_allclose(dataset.get_data_info(0)["fut_boxes"][2][:, 6], [1.5708, -1.5708], atol=1e-6)
    # No box is made up behind the last frame.
    late = len(times) - 3
    steps = int((times[-1] - times[late]) / 0.5 + 1e-6)
    assert_allclose(ahead(dataset, late), expected(times, steps, late), atol=1e-3)


def test_scenes_have_their_own_rates_and_left_out_frames_count(dataset_of):
    slow, fast = recording(TWO_HERTZ), recording(20 + RECORDINGS["10 Hz"], "t")
    dataset = dataset_of(slow + fast, load_interval=4)
    for index, of in ((0, 0.0), (3, 20.0)):
        assert_allclose(ahead(dataset, index), expected([of]), atol=1e-3)


def test_plans_with_steps_of_another_length(dataset_of):
    records = recording(RECORDINGS["10 Hz"])
    found = ahead(dataset_of(records, steps_per_second=5))
    assert_allclose(found[:, 0], 12 + 2 * np.arange(1, 7), atol=1e-3)


VELOCITIES = [[0.0, 10], [0, -5]]


@pytest.mark.parametrize(
    ("changes", "known"),
    [
        ({"gt_velocity": VELOCITIES, "instance_inds": None}, True),
        ({"gt_velocity": VELOCITIES, "instance_inds": [-1, 4]}, True),
        ({"gt_velocity": VELOCITIES, "instance_inds": [4, 4]}, True),
        ({"instance_inds": None}, False),
        ({"instance_inds": [-1, 4]}, False),
    ],
)
def test_boxes_between_frames_without_tracks_move_by_their_velocity(dataset_of, changes, known):
    dataset = dataset_of(recording(RECORDINGS["1 Hz"], **changes))
    assert len(ahead(dataset)) == 6 * known
    if known:
        assert_allclose(ahead(dataset), expected([0]), atol=1e-3)


def test_a_step_in_a_long_gap_is_left_out(dataset_of):
    times = np.array([0, 0.5, 1, 1.5, 3.5, 4, 4.5])
    dataset = dataset_of(recording(times))
    assert len(ahead(dataset)) == 3 and len(ahead(dataset, 3)) == 0


def test_frames_that_jitter_around_the_steps_are_the_steps():
    times = np.round([0, 0.54e6, 0.97e6, 1.52e6, 2.01e6, 2.6e6, 2.98e6]).astype(int)
    steps = coming_steps(times, 0, 12)
    assert [(step.before, step.after) for step in steps] == [(k, k) for k in range(1, 7)]


@pytest.mark.parametrize("name", RECORDINGS)
def test_converted_paths_are_those_of_the_times_of_the_steps(name):
    times = [round(1e6 * time) for time in RECORDINGS[name]]
    places = np.array([[10 * time / 1e6, 3.0] for time in times])
    moved = _displacements(places, times, 0, 10)
    assert_allclose(moved, np.tile([5.0, 0], (10, 1)), atol=1e-3)
    future = ego_future([pose_matrix([*place, 0], np.eye(3)) for place in places], times, 0)
    assert_allclose(future["gt_ego_fut_trajs"], moved[:6], atol=1e-3)
    assert future["gt_ego_fut_masks"].all() and future["gt_ego_fut_cmd"].tolist() == [1, 0, 0]


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        (
            "2 Hz",
            {"gt_velocity": [[0.0, 10], [5, 0]]},
            [
                "motion and planning: a frame is a step of 0.5 s",
                "of 24 used boxes, 12 have their centre in no image; of 24 that move at 1 m/s or more, 12 "
                "point elsewhere than they move, and 0 are wider than long",
            ],
        ),
        ("dropped", {}, ["a frame is a step of 0.5 s, but 2 gaps are longer", "of 0 that move"]),
        (
            "10 Hz",
            {"gt_ego_fut_trajs": np.tile([0.0, 1.0], (6, 1))},
            [
                "10 frames per second, but steps of 0.5 s",
                "gt_ego_fut_trajs: 55 of 55 paths end more than 1 m from where ego2global",
                "of 120 used boxes, 60",
            ],
        ),
        (
            "1 Hz",
            {
                "lidar2ego_rotation": np.eye(3),
                "gt_ego_fut_trajs": np.tile([5.0, 0.0], (6, 1)),
                "gt_ego_fut_cmd": np.array([0, 1.0, 0]),
            },
            [
                "1 frames per second",
                "ego2global: from 7 of 7 frames, the vehicle moves more aside than ahead",
                "gt_ego_fut_cmd: 7 of 7 commands say right where the path leads left, or the reverse",
                "of 16 used boxes",
            ],
        ),
    ],
)
def test_the_check_says_what_the_rate_means(dataset_of, name, changes, said):
    dataset = dataset_of([record(*frame, **changes) for frame in enumerate(RECORDINGS[name])])
    lines = [
        line
        for line in recording_report(dataset.ann_file, dataset.data_root)
        if line.startswith(("motion and", "gt_ego", "ego2", "of "))
    ]
    assert len(lines) == len(said) and all(part in line for part, line in zip(said, lines, strict=True))
