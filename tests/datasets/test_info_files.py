"""Info files: what is written is read, and what a pickle wants to run is not."""

import numpy as np
import pytest
from numpy.testing import assert_equal

from visdet.datasets.info_files import frame_keys, load_infos, save_infos
from visdet.errors import InvalidInputError

INFOS = [
    {
        "token": "a",
        "scene_token": "s",
        "timestamp": 1_533_000_000_000_001,
        "sweeps": [],
        "gt_boxes": np.arange(14.0).reshape(2, 7),
        "gt_names": np.array(["car", "pedestrian"]),
        "valid_flag": np.array([True, False]),
        "num_lidar_pts": np.array([3, 0]),
        "gt_agent_fut_trajs": np.ones((2, 12, 2), np.float32),
        "map_annos": {0: [], 1: [np.eye(2), np.ones((3, 2))], 2: []},
        "cams": {"CAM_FRONT": {"cam_intrinsic": np.eye(3), "sensor2ego_rotation": [1.0, 0.0, 0.0, 0.0]}},
        "map_location": None,
    },
    {
        "token": "b",
        "scene_token": "s",
        "timestamp": 1_533_000_000_500_001,
        "sweeps": [{"data_path": "x"}],
        "gt_boxes": np.zeros((0, 7)),
        "gt_names": np.array([], dtype=str),
        "pair": (np.float32(0.5), np.int64(7)),
    },
]


def test_every_flipped_byte_of_the_content_is_noticed(tmp_path):
    path = tmp_path / "infos.npz"
    save_infos(path, INFOS[1:], {})
    whole, expected = path.read_bytes(), str(list(load_infos(path)[0]))
    noticed = 0
    for place in range(0, len(whole), 3):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 8]) + whole[place + 1 :])
        try:
            assert str(list(load_infos(path)[0])) == expected
        except InvalidInputError:
            noticed += 1
    assert noticed > 0.25 * len(whole)


def test_round_trip(tmp_path):
    path = tmp_path / "infos.npz"
    save_infos(path, INFOS, {"version": "v1.0-mini"})
    infos, metadata = load_infos(path)
    assert metadata == {"version": "v1.0-mini"} and len(infos) == 2
    expected = [INFOS[0], INFOS[1] | {"pair": [0.5, 7]}]
    for loaded, original in zip(infos, expected, strict=True):
        assert_equal(loaded, original)
        for key, value in original.items():
            if isinstance(value, np.ndarray) and value.dtype.kind != "U":
                assert loaded[key].dtype == value.dtype and loaded[key].shape == value.shape
    assert list(infos[0]["map_annos"]) == [0, 1, 2]
    assert infos[-1]["token"] == "b" and [info["token"] for info in infos[0:2]] == ["a", "b"]
    with pytest.raises(IndexError):
        infos[2]
    with pytest.raises(ValueError, match="frame 0 of the infos must be a dict, got int"):
        frame_keys([1])
    assert (
        frame_keys(infos)
        == frame_keys(INFOS)
        == [(1_533_000_000_000_001, "s", True, "a"), (1_533_000_000_500_001, "s", False, "b")]
    )


def test_numbers_of_numpy_may_name_a_frame(tmp_path):
    """A table of one's own gives times as numpy's integers, and sweeps as an array."""
    infos = [
        info | {"timestamp": np.int64(info["timestamp"]), "scene_token": np.str_("s"), "sweeps": sweeps}
        for info, sweeps in zip(INFOS, (np.zeros(0), np.zeros((1, 3))), strict=True)
    ]
    save_infos(tmp_path / "infos.npz", infos, {})
    loaded, _ = load_infos(tmp_path / "infos.npz")
    assert frame_keys(loaded) == frame_keys(infos) == frame_keys(INFOS)
