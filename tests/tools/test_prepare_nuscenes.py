"""The converter on a small data set in nuScenes' layout: what went in comes out."""

import pickle
from pathlib import Path

import numpy as np
import pytest
from json_files import read_json
from numpy.testing import assert_allclose, assert_array_equal, assert_equal
from nuscenes_layout import NAMES, converted, write_nuscenes
from scipy.spatial.distance import cdist
from toolbox import fail_here, succeed_here

from visdet.datasets import NuScenes3DDetTrackDataset, load_infos
from visdet.datasets.nuscenes_converter import NuScenesConverter, split_of_scene
from visdet.datasets.nuscenes_tables import NuScenesTables
from visdet.structures.polylines import resample


@pytest.fixture(scope="module")
def nuscenes(tmp_path_factory):
    root = tmp_path_factory.mktemp("nuscenes")
    return root, write_nuscenes(root)


EQUAL = [
    *("scene_token", "timestamp", "lidar_path", "lidar2ego_rotation", "ego2global_translation"),
    *("gt_names", "num_lidar_pts", "valid_flag", "gt_ego_fut_masks"),
]


def test_boxes_futures_and_poses(nuscenes):
    root, sources = nuscenes
    infos, converter = converted(root, with_map=False, can_bus_root=root)
    assert converter.scenes_without_can_bus == [NAMES[1]]
    assert [info["token"] for info in infos] == [info["token"] for info in sources]
    for info, source in zip(infos, sources, strict=True):
        for key in EQUAL:
            assert_array_equal(info[key], source[key])
        assert bool(info["sweeps"]) == bool(source["sweeps"]) and list(info["cams"]) == list(source["cams"])
        for name, camera in info["cams"].items():
            for key in ("sensor2lidar_rotation", "sensor2lidar_translation", "cam_intrinsic"):
                assert_allclose(camera[key], source["cams"][name][key], atol=1e-6)
            assert camera["data_path"] == source["cams"][name]["data_path"]
        boxes, expected = info["gt_boxes"], source["gt_boxes"]
        assert_allclose(boxes[:, :6], expected[:, :6], atol=1e-6)
        assert_allclose(np.cos(boxes[:, 6] - expected[:, 6]), 1, atol=1e-9)
        is_car = source["gt_names"] == "car"
        assert info["gt_attributes"].tolist() == np.where(is_car, "vehicle.moving", "").tolist()
        assert_allclose(info["gt_ego_fut_trajs"], _masked(source, "gt_ego_fut"), atol=1e-4)
        assert info["gt_agent_fut_trajs"].shape == (len(boxes), 12, 2)
        both = (info["gt_agent_fut_masks"] * source["gt_agent_fut_masks"]).astype(bool)
        assert_allclose(info["gt_agent_fut_trajs"][both], source["gt_agent_fut_trajs"][both], atol=1e-4)
        # An agent out of sight is not annotated: its future ends there.
        assert (info["gt_agent_fut_masks"] <= source["gt_agent_fut_masks"]).all()
        assert both.sum() >= 0.8 * source["gt_agent_fut_masks"].sum()
        status = source["ego_status"] if source["scene_token"] == "val-0000" else np.zeros(10)
        assert_array_equal(info["ego_status"], status)


def _masked(source, name):
    return source[f"{name}_trajs"] * source[f"{name}_masks"][:, None]


def test_velocities(nuscenes):
    root, sources = nuscenes
    infos, _ = converted(root, with_map=False)
    inner, last = infos[3], infos[7]
    known = ~np.isnan(inner["gt_velocity"][:, 0])
    assert known.mean() > 0.8
    # The simulator's are central differences as well.
    assert_allclose(inner["gt_velocity"][known], sources[3]["gt_velocity"][known], atol=1e-4)
    known = ~np.isnan(last["gt_velocity"][:, 0])
    assert_allclose(last["gt_velocity"][known], sources[7]["gt_velocity"][known], atol=1.0)


def test_instances_are_numbered_over_all_scenes(nuscenes):
    infos, _ = converted(nuscenes[0], with_map=False)
    first, second = (
        set(np.concatenate([i["instance_inds"] for i in infos[k : k + 8]]).tolist()) for k in (0, 8)
    )
    assert not first & second and first | second == set(range(len(first | second)))


def test_map(nuscenes):
    pytest.importorskip("shapely", reason="shapely is not installed: make setup")
    root, sources = nuscenes
    infos, _ = converted(root, with_map=True)
    checked = 0
    for info, source in zip(infos, sources, strict=True):
        lines = info["map_annos"]
        assert sorted(lines) == [0, 1, 2]
        for label in (0, 2):
            ours, expected = lines[label], source["map_annos"][label]
            # At the rim of the region the two parts of a crossing may be cut so that they point another way.
            is_inner = [label == 2 or (np.abs(line) < [14.9, 29.9]).all() for line in expected]
            for line in (line for line, inner in zip(expected, is_inner, strict=True) if inner):
                line = resample(line, 100)
                # Boundaries are cut 0.2 m inside the region.
                line = line[(np.abs(line) < [14.8, 29.8]).all(axis=1)] if label == 2 else line
                if not len(line):
                    continue
                points = np.concatenate([resample(one, 2000) for one in ours])
                assert cdist(points, line).min(axis=0).max() < 0.05
                checked += 1
        for line in lines[0]:
            assert_array_equal(line[0], line[-1])
        for label in (1, 2):
            expected = np.concatenate([resample(line, 500) for line in source["map_annos"][label]])
            for line in lines[label]:
                assert line.shape[1] == 2 and (np.abs(line) <= np.array([15, 30]) + 1e-6).all()
                assert cdist(line, expected).min(axis=1).max() < 0.3
    assert checked > 20


def test_tool_writes_what_the_loader_reads(nuscenes, tmp_path, monkeypatch, capsys):
    root, _ = nuscenes
    printed = succeed_here(
        monkeypatch,
        capsys,
        "prepare-nuscenes",
        root,
        "--version",
        "v1.0-mini",
        "--can-bus",
        root,
        "--out-dir",
        tmp_path,
        "--no-map",
    )
    assert "1 scenes have no CAN bus messages" in printed and "wrote 8 frames to" in printed
    for split, scene in (("train", "val-0000"), ("val", "val-0001")):
        path = tmp_path / f"nuscenes_infos_{split}.npz"
        dataset = NuScenes3DDetTrackDataset(
            str(path), data_root=str(root), with_seq_flag=True, test_mode=True
        )
        assert len(dataset) == 8 and dataset.flag.tolist() == [0] * 8
        assert {dataset.get_info(i)["scene_token"] for i in range(8)} == {scene}
        assert all(Path(name).exists() for name in dataset[2]["img_filename"])
        assert dataset.metainfo["version"] == "v1.0-mini" and len(dataset[0]["gt_attributes"])


def test_tool_converts_published_files(nuscenes, tmp_path, monkeypatch, capsys):
    infos, _ = converted(nuscenes[0], with_map=False)
    path = tmp_path / "nuscenes_infos_train.pkl"
    path.write_bytes(pickle.dumps({"infos": infos, "metadata": {"version": "v1.0-mini"}}))
    assert "wrote 16 frames" in succeed_here(monkeypatch, capsys, "prepare-nuscenes", "--convert", path)
    assert_equal(list(load_infos(path.with_suffix(".npz"))[0]), infos)


def test_splits():
    assert split_of_scene("v1.0-mini", "scene-0103") == split_of_scene("v1.0-trainval", "scene-0103") == "val"
    assert split_of_scene("v1.0-mini", "scene-0061") == "train"
    assert split_of_scene("v1.0-test", "scene-0077") == "test"
    names = [f"scene-{number:04d}" for number in range(1, 1111)]
    assert sum(split_of_scene("v1.0-trainval", name) == "val" for name in names) == 150


def test_errors(nuscenes, tmp_path, monkeypatch, capsys):
    root, _ = nuscenes
    message = fail_here(monkeypatch, capsys, "prepare-nuscenes", root, "--version", "v1.0-trainval")
    assert "is not in" in message
    with pytest.raises(FileNotFoundError, match=r"v1.0-mini/attribute.json does not exist"):
        (tmp_path / "v1.0-mini").mkdir()
        NuScenesTables(tmp_path, "v1.0-mini")
    tables = NuScenesTables(root, "v1.0-mini")
    with pytest.raises(KeyError, match=r"table scene.json of v1.0-mini has no token 'x'"):
        tables.get("scene", "x")
    with pytest.raises(KeyError, match="frame val-0000-00 has no data of RADAR"):
        tables.data(tables.get("sample", "val-0000-00"), "RADAR")


def test_missing_files(tmp_path):
    write_nuscenes(tmp_path)
    (tmp_path / "samples" / "CAM_BACK" / "val-0000-02.jpg").unlink()
    converter = NuScenesConverter(tmp_path, "v1.0-mini", with_map=False)
    with pytest.raises(FileNotFoundError, match=r"CAM_BACK/val-0000-02.jpg does not exist"):
        list(converter.infos_of_scene(converter.tables.scenes()[0]))
    pytest.importorskip("shapely", reason="shapely is not installed: make setup")
    (tmp_path / "maps" / "expansion" / "boston-seaport.json").unlink()
    converter = NuScenesConverter(tmp_path, "v1.0-mini")
    with pytest.raises(FileNotFoundError, match="unpack nuScenes' map expansion"):
        list(converter.infos_of_scene(converter.tables.scenes()[1]))
    assert read_json(tmp_path / "v1.0-mini" / "log.json")
