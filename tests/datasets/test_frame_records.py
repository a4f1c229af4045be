"""Records of frames: what is read, what is refused by one message, and that the documentation says the same."""

import copy
import re

import numpy as np
import pytest
from datasets.own_recording import CAMERAS, NAMES, PAGE, write_recording
from numpy.testing import assert_array_equal

from visdet.datasets import NuScenes3DDetTrackDataset, nuscenes, save_infos
from visdet.datasets.frame_records import CAMERA_KEYS, FRAME_KEYS
from visdet.datasets.transforms import ResizeCropFlipImage, multi_view
from visdet.errors import UserError


@pytest.fixture(scope="module")
def infos(tmp_path_factory):
    return write_recording(tmp_path_factory.mktemp("recording"), {"train": 2}, save=False)["train"]


@pytest.fixture
def dataset_of(tmp_path):
    def build(infos, **arguments):
        save_infos(tmp_path / "infos.npz", infos, {})
        arguments = dict(classes=NAMES, num_cameras=len(CAMERAS)) | arguments
        return NuScenes3DDetTrackDataset(str(tmp_path / "infos.npz"), **arguments)

    return build


def with_values(infos, index=1, **values):
    """Return the records with other values in one of them. None removes a key."""
    infos = copy.deepcopy(infos)
    for key, value in values.items():
        if value is None:
            infos[index].pop(key, None)
        else:
            infos[index][key] = value
    return infos


def with_camera(infos, name="left", **values):
    cameras = copy.deepcopy(infos[1]["cams"])
    cameras[name].update(values)
    return with_values(infos, cams={key: value for key, value in cameras.items() if value})


def test_the_page_lists_the_keys_of_the_table():
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| .* \| (.*?) \|$", PAGE.read_text(encoding="utf-8"), re.M)
    expected = [(key.name, key.expected(), key.beside is None) for key in (*FRAME_KEYS, *CAMERA_KEYS)]
    assert [(name, kind, without == "error") for name, kind, without in rows] == expected
    beside = {name: re.findall(r"error beside `(\w+)`", without) for name, _, without in rows}
    for key in FRAME_KEYS:
        assert not beside[key.name] or beside[key.name] == [key.beside], key.name


BOXES = np.array([[0, 9, 0, 4, 2, 1, 0, 0, 0], [5, 9, 0, 4, 2, 1, 0, 0, 0]], dtype=float)
# Other values of a record, and what the message names. The default is the key.
FAULTS = [
    *(({key.name: None}, key.name) for key in FRAME_KEYS if key.beside is None),
    *(
        ({key: value}, key)
        for key, value in {
            "token": 7,
            "scene_token": 3,
            "timestamp": "0",
            "cams": [],
            "lidar_path": 5,
            "sweeps": "none",
            "lidar2ego_translation": [0.0, 1.0],
            "lidar2ego_rotation": [1.0, 0.0, 0.0],
            "ego2global_translation": [np.nan, 0.0, 0.0],
            "ego2global_rotation": np.diag([1.0, 1.0, -1.0]),
            "gt_boxes": np.ones((2, 8)),
            "gt_names": np.array(["car"]),
            "gt_velocity": np.full((2, 2), np.inf),
            "gt_attributes": np.array([b"car", b"deer"]),
            "instance_inds": np.array([1.5, 2.0]),
            "num_lidar_pts": np.array(["3", "4"]),
            "num_radar_pts": np.array([1, 2, 3]),
            "valid_flag": np.array([2, 1]),
            "ego_status": np.zeros(9),
            "gt_ego_fut_cmd": np.zeros(3),
            "map_annos": {"divider": [np.eye(2)]},
        }.items()
    ),
    ({"timestamp": 1.5}, "timestamp"),
    ({"timestamp": np.nan}, "timestamp"),
    ({"gt_names": None}, "gt_names"),
    ({"gt_agent_fut_masks": np.ones((2, 12))}, "gt_agent_fut_trajs"),
    (
        {"gt_agent_fut_trajs": np.zeros((2, 12, 2)), "gt_agent_fut_masks": np.ones((2, 6))},
        "gt_agent_fut_masks",
    ),
    ({"gt_ego_fut_trajs": np.ones((6, 2))}, "gt_ego_fut_"),
    ({"gt_ego_fut_trajs": np.ones((6, 2)), "gt_ego_fut_masks": np.full(6, 2)}, "masks must be 0 or 1"),
    ({"gt_boxes": np.zeros((0, 7))}, "gt_names"),
    ({"gt_boxes": BOXES * [1, 1, 1, 1, 0, 1, 1, 1, 1]}, r"no positive size: \[0, 1\] \(gt_boxes"),
    *(
        ({"gt_names": np.array([name, "deer"])}, f"gt_names has '{name}'")
        for name in ("Car", "DEER ", "ｌｏｒｒｙ")
    ),
    ({"gt_boxes": BOXES * [[1], [np.nan]]}, r"NaN or infinite: \[1\] \(gt_boxes"),
    ({"ego_status": np.full(10, np.inf)}, "ego_status must be finite"),
    ({"ego2global_rotation": [0.0] * 4}, "ego2global_rotation must be a quaternion"),
    ({"map_annos": {3: [np.eye(2)]}}, r"map_annos has the classes \[3\]"),
    *(
        ({"map_annos": {1: [line]}}, "line 0 of map class 1 in map_annos")
        for line in (np.zeros((2, 4)), np.full((2, 2), np.nan), np.zeros((0, 2)), [[0, 1], [2]])
    ),
    ({"cams": {"left": 1}}, "camera left"),
]
CAMERA_FAULTS = [
    {"cam_intrinsic": np.ones((3, 3))},
    {"cam_intrinsic": np.eye(2)},
    {"cam_intrinsic": np.full((3, 3), np.nan)},
    {"sensor2lidar_rotation": 2 * np.eye(3)},
    {"sensor2lidar_rotation": np.full((3, 3), np.nan)},
    {"sensor2lidar_rotation": None},
    {"sensor2lidar_translation": "0 0 0"},
    {"sensor2lidar_translation": [0.0, np.inf, 0.0]},
    {"data_path": ""},
]


@pytest.mark.parametrize(
    ("values", "named"), [*FAULTS, *((values, None) for values in CAMERA_FAULTS)], ids=str
)
def test_a_wrong_value_is_one_message_with_key_frame_and_file(dataset_of, infos, values, named):
    if named is None:
        changed, named = with_camera(infos, **values), f"{next(iter(values))} of left"
    else:
        changed = with_values(infos, **values)
    with pytest.raises(UserError, match=named) as caught:
        dataset_of(changed)[1]
    message = str(caught.value)
    assert "\n" not in message and re.search(r"frame (1|train-drive-0-0001) of .*infos\.npz", message)


def test_rotations_of_any_form_are_one_rotation(dataset_of, infos):
    expected = dataset_of(infos)[1]
    quaternion = [3.0, 0.0, 0.0, 0.0]  # as long as no other
    found = dataset_of(with_values(infos, ego2global_rotation=quaternion))[1]
    assert_array_equal(found["lidar2global"], expected["lidar2global"])
    matrix = np.concatenate([infos[1]["cams"]["left"]["cam_intrinsic"], np.zeros((3, 1))], axis=1)
    found = dataset_of(with_camera(infos, cam_intrinsic=matrix))[1]
    assert_array_equal(found["lidar2img"], expected["lidar2img"])
    assert_array_equal(found["cam_intrinsic"], expected["cam_intrinsic"])


def test_the_velocity_of_boxes_with_nine_columns_is_theirs(dataset_of, infos):
    boxes = infos[1]["gt_boxes"]
    assert boxes.shape == (2, 9)
    expected = dataset_of(infos)[1]["gt_bboxes_3d"]
    assert_array_equal(expected, boxes)
    seven = dict(gt_boxes=boxes[:, :7])
    given = dataset_of(with_values(infos, **seven, gt_velocity=boxes[:, 7:]))
    assert_array_equal(given[1]["gt_bboxes_3d"], expected)
    # An unknown velocity is 0 in training and NaN for the metrics.
    unknown = with_values(infos, **seven)
    assert not dataset_of(unknown)[1]["gt_bboxes_3d"][:, 7:].any()
    assert np.isnan(dataset_of(unknown, test_mode=True)[1]["gt_bboxes_3d"][:, 7:]).all()


@pytest.mark.parametrize("test_mode", [False, True])
def test_without_lidar_no_box_is_left_out_for_lack_of_points(dataset_of, infos, test_mode):
    none = dict(num_lidar_pts=np.zeros(2, int), num_radar_pts=np.zeros(2, int))
    for path in (None, ""):
        record = dataset_of(with_values(infos, lidar_path=path, **none), test_mode=test_mode)[1]
        assert len(record["gt_bboxes_3d"]) == 2 and record["pts_filename"] is None
    flagged = with_values(infos, valid_flag=np.array([True, False]), **none)
    assert len(dataset_of(flagged, test_mode=test_mode)[1]["gt_bboxes_3d"]) == 1


def test_a_frame_whose_boxes_are_all_left_out_is_told(logged, dataset_of, infos):
    said = logged(nuscenes)
    for values in ({"gt_names": np.array(["elk", "fox"])}, {"valid_flag": np.zeros(2, bool)}):
        dataset_of(with_values(infos, **values))[1]
    names, flags = said
    assert "none of their gt_names ['elk', 'fox'] is one of the classes" in names
    assert "none of its 2 boxes is used" in flags


def test_valid_flag_must_be_there_if_it_is_asked_for(dataset_of, infos):
    with pytest.raises(
        ValueError, match=r"train-drive-0-0001 of .*valid_flag is missing, which use_valid_flag"
    ):
        dataset_of(infos, use_valid_flag=True)[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda k: {"timestamp": 1_700_000_000.0 + k / 2}, "timestamp must be integers, got 17000000"),
        (lambda k: {"timestamp": 1_700_000_000 + k}, "are 1 us apart, .* timestamp must be in microseconds"),
        (lambda k: {"timestamp": 1_700_000_000_000 + 500 * k}, "are 500 us apart"),  # milliseconds
        (lambda k: {"timestamp": (1_700_000_000 + k) * 10**9}, "are 1000000000 us apart"),
        (lambda k: {"timestamp": 1_700_000_000_000 + 1000 * k}, "10000000 us apart, got 1000 us"),
        (lambda k: {"timestamp": 10**18 + 33_333_333 * k}, "us apart, got 3.33333e.07 us"),  # nanoseconds
        (lambda k: {"timestamp": 5_000_000}, "two frames of scene train-drive-0 are 0 us apart, at 5000000"),
        (
            lambda k: {"token": "a", "scene_token": str(k)},
            "several frames have the token a",
        ),
    ],
)
def test_times_in_other_units_and_joined_recordings_are_noticed(dataset_of, infos, change, message):
    infos = [info | change(k) for k, info in enumerate(infos[:2])]
    with pytest.raises(ValueError, match=rf"infos\.npz.*{message}"):
        dataset_of(infos)


def test_files_of_two_recordings_are_not_confused(dataset_of, infos, tmp_path):
    for name in ("one", "two", "."):
        folder = tmp_path / name / "samples"
        folder.mkdir(parents=True)
        (folder / "0.png").touch()
    # A folder that is not there is that of the publisher.
    for given, name in {"one": "one", "two": "two", "./data/nuscenes": ""}.items():
        dataset = dataset_of(with_camera(infos, data_path=f"{given}/samples/0.png"), data_root=str(tmp_path))
        assert dataset[1]["img_filename"][-1] == str(tmp_path / name / "samples" / "0.png")


def test_arrays_of_other_types_are_saved(dataset_of, infos):
    found = dataset_of(
        with_values(
            infos,
            gt_names=np.array(["car", "deer"], dtype=object),
            instance_inds=np.array([1, 2], dtype=np.uint8),
            gt_velocity=np.ones((2, 2), dtype=np.float16),
        )
    )[1]
    assert found["gt_names"].tolist() == ["car", "deer"] and found["instance_inds"].tolist() == [1, 2]
    with pytest.raises(
        TypeError, match=r"train-drive-0-0001 of .*infos.npz: .* arrays, but it names pathlib\S*PosixPath"
    ):
        dataset_of(with_camera(infos, data_path=PAGE))


def test_images_of_another_size_than_the_config_says_are_told(logged):
    said = logged(multi_view)
    augmentation = {"resize": 0.5, "resize_dims": (800, 450), "crop": (0, 194, 800, 450), "flip": False}
    resize = ResizeCropFlipImage()
    for size, number in (((900, 1600), 0), ((1080, 1920), 1), ((1080, 1920), 1)):
        image = np.zeros((*size, 3), np.uint8)
        resize({"img": [image], "lidar2img": [np.eye(4)], "aug_config": augmentation, "token": "a"})
        assert len(said) == number
    assert "frame a has an image of 1920 x 1080 pixels" in said[0] and "says W = 1600, H = 900" in said[0]
