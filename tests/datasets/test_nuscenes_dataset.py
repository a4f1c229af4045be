"""The loader: records, sequences, and every way a file can be wrong."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets.driving_files import driving_infos, driving_scenes
from numpy.testing import assert_allclose, assert_array_equal

from visdet.datasets import NuScenes3DDetTrackDataset, nuscenes, save_infos
from visdet.datasets.synthetic.driving_world import DRIVING_CLASSES
from visdet.errors import UserError, hints_of

AUGMENTATION = dict(
    resize_lim=(0.40, 0.47),
    final_dim=(256, 704),
    bot_pct_lim=(0.0, 0.0),
    rot_lim=(-5.4, 5.4),
    H=900,
    W=1600,
    rand_flip=True,
    rot3d_range=(-0.3, 0.3),
)


@pytest.fixture(scope="module")
def infos():
    return driving_infos()


@pytest.fixture
def dataset_of(tmp_path):
    def build(infos, **arguments):
        save_infos(tmp_path / "infos.npz", infos, {"version": "test"})
        arguments = dict(data_root=driving_scenes(), classes=DRIVING_CLASSES) | arguments
        return NuScenes3DDetTrackDataset(str(tmp_path / "infos.npz"), **arguments)

    return build


@pytest.mark.parametrize(
    ("resize_lim", "test_mode", "count"),
    [((0.4, 0.47), False, 0), ((0.8, 1.0), False, 1), ((0.8, 1.0), True, 0)],
)
def test_another_scale_in_tests_is_told(dataset_of, infos, logged, resize_lim, test_mode, count):
    said = logged(nuscenes)
    conf = AUGMENTATION | {"resize_lim": resize_lim}
    dataset_of(infos, data_aug_conf=conf, test_mode=test_mode)
    assert [text for text in said if "by resize_lim = 0.8 to 1, and tests by 0.44" in text] == said
    assert len(said) == count


def changed(infos, index, **values):
    infos = copy.deepcopy(infos)
    infos[index].update(values)
    return infos


def test_a_record(dataset_of, infos):
    dataset = dataset_of(infos, classes=None, metainfo={"classes": DRIVING_CLASSES})
    record, info = dataset[5], infos[5]
    assert record["token"] == info["token"] and record["timestamp"] == info["timestamp"] / 1e6
    mask = info["num_lidar_pts"] > 0
    assert 0 < mask.sum() < len(mask)
    assert_array_equal(record["gt_bboxes_3d"][:, :7], info["gt_boxes"][mask])
    assert_array_equal(record["gt_bboxes_3d"][:, 7:], info["gt_velocity"][mask])
    assert [DRIVING_CLASSES[label] for label in record["gt_labels_3d"]] == info["gt_names"][mask].tolist()
    assert_array_equal(record["instance_inds"], info["instance_inds"][mask])
    assert len(record["lidar2img"]) == 6 and all(Path(name).exists() for name in record["img_filename"])
    # A point one metre ahead of the front camera lies on its axis.
    camera = info["cams"]["CAM_FRONT"]
    point = camera["sensor2lidar_translation"] + camera["sensor2lidar_rotation"] @ [0, 0, 1.0]
    projected = record["lidar2img"][0] @ [*point, 1]
    assert_allclose(projected[:3], [*camera["cam_intrinsic"][:2, 2], 1], atol=1e-9)
    # x of the lidar is the vehicle's right, y its front.
    from_lidar = record["lidar2global"][:3, :3]
    heading = np.array(infos[6]["ego2global_translation"]) - info["ego2global_translation"]
    assert from_lidar[:, 1] @ heading / np.linalg.norm(heading) > 0.99


def test_future_boxes_in_test_mode(dataset_of, infos):
    dataset = dataset_of(infos, test_mode=True)
    assert "fut_boxes" not in dataset_of(infos)[0]
    record, after = dataset[2], dataset[4]
    assert [len(boxes) for boxes in record["fut_boxes"]] == [
        len(dataset[2 + k]["gt_bboxes_3d"]) for k in range(1, 6)
    ]
    to_here = np.linalg.inv(record["lidar2global"]) @ after["lidar2global"]
    boxes = record["fut_boxes"][1]
    assert_allclose(
        boxes[:, :3], after["gt_bboxes_3d"][:, :3] @ to_here[:3, :3].T + to_here[:3, 3], atol=1e-6
    )
    turn = np.arctan2(to_here[1, 0], to_here[0, 0])
    assert_allclose(np.cos(boxes[:, 6] - after["gt_bboxes_3d"][:, 6] - turn), 1, atol=1e-9)
    assert dataset[7]["fut_boxes"] == []


def test_frames_are_sorted_scene_after_scene(dataset_of, infos):
    order = np.random.default_rng(0).permutation(len(infos))
    dataset = dataset_of([infos[i] for i in order])
    assert [dataset.get_info(i)["token"] for i in range(len(dataset))] == [info["token"] for info in infos]
    assert dataset.scene_starts.tolist() == [0, 8, 16]
    # Two vehicles that record at the same time.
    interleaved = copy.deepcopy(infos[:16])
    for info in interleaved[8:]:
        info["timestamp"] = info["timestamp"] - 3_600_000_000 + 100_000
    dataset = dataset_of(interleaved)
    assert [dataset.get_info(i)["scene_token"] for i in range(16)] == ["train-0000"] * 8 + ["train-0001"] * 8
    with pytest.raises(ValueError, match="two frames of scene train-0000 are 0 us apart"):
        dataset_of(changed(infos, 1, timestamp=infos[0]["timestamp"]))


@pytest.mark.parametrize(
    ("split", "expected"),
    [(1, [8, 8, 8]), (2, [4] * 6), (3, [3, 3, 2] * 3), (-1, [1] * 24), ("all", [1] * 24)],
)
def test_sequence_flags(dataset_of, infos, split, expected):
    flag = dataset_of(infos, with_seq_flag=True, sequences_split_num=split).flag
    assert np.bincount(flag).tolist() == expected and (np.diff(flag) >= 0).all()


def test_load_interval(dataset_of, infos):
    dataset = dataset_of(infos, load_interval=3, with_seq_flag=True)
    assert [dataset.get_info(i)["token"] for i in range(3)] == [infos[i]["token"] for i in (0, 3, 6)]
    assert np.bincount(dataset.flag).tolist() == [3, 3, 2]
    for interval in (0, -1):
        with pytest.raises(UserError, match=f"load_interval must be .* got {interval}"):
            dataset_of(infos, load_interval=interval)


def test_the_truth_of_a_test_has_boxes_that_radar_alone_saw(dataset_of, infos):
    lidar = infos[0]["num_lidar_pts"]
    seen_by_radar = np.zeros_like(lidar)
    seen_by_radar[np.flatnonzero(lidar == 0)[0]] = 2
    infos = changed(infos, 0, num_radar_pts=seen_by_radar)
    num_boxes = {test: len(dataset_of(infos, test_mode=test)[0]["gt_bboxes_3d"]) for test in (False, True)}
    assert num_boxes == {False: (lidar > 0).sum(), True: (lidar > 0).sum() + 1}


def test_augmentation_limits(dataset_of, infos):
    with pytest.raises(UserError, match=r"data_aug_conf: bot_pct_lim must be .*from 0 to 1"):
        dataset_of(infos, data_aug_conf=AUGMENTATION | {"bot_pct_lim": (0.0, 22.0)})
    dataset = dataset_of(infos, data_aug_conf=AUGMENTATION)
    rng = np.random.default_rng(0)
    draws = [dataset.get_augmentation(rng) for _ in range(300)]
    resizes = [draw["resize"] for draw in draws]
    assert 0.40 <= min(resizes) < 0.41 and 0.46 < max(resizes) < 0.47
    assert 0.4 < np.mean([draw["flip"] for draw in draws]) < 0.6
    for draw in draws:
        left, top, right, bottom = draw["crop"]
        assert (right - left, bottom - top) == (704, 256) and left >= 0
        assert bottom == int(900 * draw["resize"]) and right <= max(704, draw["resize_dims"][0])
        assert abs(draw["rotate"]) <= 5.4 and abs(draw["rotate_3d"]) <= 0.3
    torch.manual_seed(0)
    one, other = (dataset[0]["aug_config"] for _ in range(2))
    torch.manual_seed(0)
    assert dataset[0]["aug_config"] == one != other
    assert dataset[dict(idx=0, aug_config="given")]["aug_config"] == "given"
    read = {key: AUGMENTATION[key] for key in ("H", "W", "final_dim", "bot_pct_lim")}
    test = dataset_of(infos, data_aug_conf=read, test_mode=True)[0]["aug_config"]
    assert test == dict(
        resize=0.44, resize_dims=(704, 396), crop=(0, 140, 704, 396), flip=False, rotate=0.0, rotate_3d=0.0
    )


def test_a_frame_without_boxes_may_have_arrays_of_any_shape(dataset_of, infos):
    keys = ("gt_boxes", "gt_names", "gt_velocity", "num_lidar_pts", "num_radar_pts", "valid_flag")
    none = {key: np.zeros(0) for key in (*keys, "instance_inds", "gt_agent_fut_trajs", "gt_agent_fut_masks")}
    record = dataset_of(changed(infos, 0, **none))[0]
    assert record["gt_agent_fut_trajs"].shape == (0, 12, 2)
    assert record["gt_agent_fut_masks"].shape == (0, 12)


@pytest.mark.parametrize(
    ("leave_out", "fields"),
    [
        (
            ("map_annos", "instance_inds", "gt_agent_fut", "gt_ego_fut", "ego_status", "lidar_path"),
            {"gt_bboxes_3d", "gt_labels_3d"},
        ),
        (("map_annos", "instance_inds", "gt_", "ego_status", "lidar_path"), set()),
    ],
    ids=["boxes", "images"],
)
def test_frames_of_little_pass_every_step(dataset_of, infos, leave_out, fields):
    """A recording of one's own may have boxes alone, and those of a test split have images alone."""
    few = [{key: value for key, value in info.items() if not key.startswith(leave_out)} for info in infos]
    steps = [
        dict(type="LoadMultiViewImageFromFiles"),
        dict(type="ResizeCropFlipImage"),
        dict(type="BBoxRotation"),
        dict(type="CircleObjectRangeFilter", class_dist_thred=55.0),
        dict(type="InstanceNameFilter", classes=DRIVING_CLASSES),
        dict(type="VectorizeMap", roi_size=(30, 60), normalize=False, simplify=True),
        dict(type="NuScenesSparse4DAdaptor"),
        dict(type="PackDrivingInputs"),
    ]
    options = dict(pipeline=steps, data_aug_conf=AUGMENTATION | dict(H=48, W=128, final_dim=(40, 120)))
    frame = dataset_of(few, **options)[2]
    assert frame["inputs"].shape == (6, 3, 40, 120)
    sample = frame["data_samples"]
    assert {*sample.keys()} == {"projection_mat", "image_wh", "focal", *fields}
    if fields:
        near = infos[2]["valid_flag"] & (np.hypot(*infos[2]["gt_boxes"][:, :2].T) < 55)
        assert sample.gt_bboxes_3d.shape == (near.sum(), 9) and near.sum() > 10


def test_recordings_without_sweeps_keep_their_scenes(dataset_of, infos):
    expected = dataset_of(infos, with_seq_flag=True)
    without = copy.deepcopy(infos)
    for info in without:
        info["sweeps"] = []
    found = dataset_of(without, with_seq_flag=True)
    assert found.scene_starts.tolist() == expected.scene_starts.tolist()
    assert found.flag.tolist() == expected.flag.tolist()


def test_boxes_without_a_track_are_told_apart(dataset_of, infos):
    """Denoising queries are followed from frame to frame by these numbers."""
    untracked = copy.deepcopy(infos)
    for info in untracked[:2]:
        info["instance_inds"] = np.full(len(info["gt_boxes"]), -1)
    dataset = dataset_of(untracked)
    first, second = dataset[0]["instance_inds"], dataset[1]["instance_inds"]
    assert len(first) > 1 and (first < -1).all() and (second < -1).all()
    assert len({*first.tolist(), *second.tolist()}) == len(first) + len(second)


def test_boxes_of_a_repeated_track_count_as_untracked(dataset_of, infos):
    tracks, measured = infos[0]["instance_inds"].copy(), infos[0]["num_lidar_pts"].copy()
    seen = np.flatnonzero(measured)
    tracks[seen[0]] = tracks[seen[1]]
    found = dataset_of(changed(infos, 0, instance_inds=tracks))[0]["instance_inds"]
    assert (found < 0).sum() == 2 == len(set(found[found < 0].tolist()))
    assert not len(dataset_of(changed(infos, 0, num_lidar_pts=0 * measured))[0]["instance_inds"])


def test_cameras_have_one_order(dataset_of, infos):
    cameras = dict(reversed(infos[1]["cams"].items()))
    dataset = dataset_of(changed(infos, 1, cams=cameras))
    dataset[0]
    with pytest.raises(ValueError, match=r"in the order of other frames, CAM_FRONT, .*, got "):
        dataset[1]


def test_wrong_files(dataset_of, infos, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"info file .*nothing.npz does not exist") as caught:
        NuScenes3DDetTrackDataset("infos/nothing.npz", data_root=str(tmp_path))
    assert f"visdet prepare-nuscenes {tmp_path} --out-dir infos" in hints_of(caught.value)[0]
    with pytest.raises(ValueError, match="holds no frames"):
        dataset_of([])
    with pytest.raises(ValueError, match=r"sequences_split_num must be .*got 0"):
        dataset_of(infos, with_seq_flag=True, sequences_split_num=0)


def test_fewer_cameras(dataset_of, infos):
    cameras = {name: camera for name, camera in infos[0]["cams"].items() if name != "CAM_BACK"}
    fewer = changed(infos, 0, cams=cameras)
    assert len(dataset_of(fewer, num_cameras=5)[0]["img_filename"]) == 5
    with pytest.raises(ValueError, match=r"train-0000-00 .* must have 6 cameras .*, got 5: CAM_FRONT, "):
        dataset_of(fewer)
