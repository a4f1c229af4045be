"""Anchors by k-means."""

import numpy as np
from datasets.driving_files import SMALL, driving_scenes
from numpy.testing import assert_allclose, assert_array_equal
from scipy.spatial.distance import cdist
from toolbox import fail_here, succeed_here

from visdet.datasets import load_infos
from visdet.datasets.anchors import cluster, detection_anchors, map_anchors, motion_anchors, planning_anchors
from visdet.datasets.synthetic.driving_world import DRIVING_CLASSES


def test_clusters_are_found():
    rng = np.random.default_rng(0)
    truth = np.array([[0.0, 0, 0], [10, 0, 0], [0, 10, 5], [7, 7, 7]])
    samples = (truth[:, None] + rng.normal(0, 0.1, (4, 500, 3))).reshape(-1, 3)
    centers = cluster(samples, 4)
    distance = cdist(centers, truth)
    assert sorted(distance.argmin(axis=1)) == [0, 1, 2, 3] and distance.min(axis=1).max() < 0.02
    assert_array_equal(centers, cluster(samples, 4))
    # Each centre is the mean of what is nearest to it.
    many = cluster(samples, 60)
    nearest = cdist(samples, many).argmin(axis=1)
    means = np.stack([samples[nearest == k].mean(axis=0) for k in range(60)])
    assert_allclose(many, means, atol=2e-2)


def test_few_samples():
    assert_array_equal(
        cluster(np.array([[1.0, 2], [1, 2], [3, 4]]), 5), [[1, 2], [3, 4], [1, 2], [3, 4], [1, 2]]
    )
    assert_array_equal(cluster(np.zeros((0, 2)), 2), np.zeros((2, 2)))


def test_anchors_by_hand():
    """One car that turns left with its heading along y, one frame."""
    info = {
        "gt_boxes": np.array([[3.0, 4.0, -1.0, 4.0, 2.0, 1.5, np.pi / 2], [100, 0, 0, 4, 2, 1.5, 0]]),
        "gt_names": np.array(["car", "car"]),
        "gt_agent_fut_trajs": np.stack([np.tile([-0.5, 1.0], (12, 1)), np.zeros((12, 2))]),
        "gt_agent_fut_masks": np.ones((2, 12)),
        "gt_ego_fut_trajs": np.tile([0.25, 2.0], (6, 1)),
        "gt_ego_fut_masks": np.ones(6),
        "gt_ego_fut_cmd": np.array([1.0, 0, 0]),
        "map_annos": {0: [], 1: [np.array([[2.0, -4.0], [2.0, 8.0]])], 2: []},
    }
    boxes = detection_anchors([info], 2)
    assert_allclose(boxes, [[3, 4, -1, 1, 1, 1, 1, 0, 0, 0, 0]] * 2)
    assert_array_equal(boxes, detection_anchors([info, {"gt_boxes": []}], 2))
    lines = map_anchors([info], 1, num_points=3)
    assert_allclose(lines, [[[2, -2], [2, 2], [2, 6]]])
    motion = motion_anchors([info], ("car", "bus"), 1)
    assert motion.shape == (2, 1, 12, 2)
    assert_allclose(motion[0, 0, [0, 11]], [[1.0, 0.5], [12.0, 6.0]], atol=1e-12)
    assert not motion[1].any()
    plan = planning_anchors([info], 2)
    assert_allclose(plan[0, :, -1], [[1.5, 12]] * 2)
    assert plan.shape == (3, 2, 6, 2) and not plan[1:].any()


def test_tool(tmp_path, monkeypatch, capsys):
    infos = f"{driving_scenes()}/driving_infos_train.npz"
    arguments = ("--det", 12, "--map", 5, "--motion", 2, "--plan", 0, "--classes", *DRIVING_CLASSES)
    printed = succeed_here(
        monkeypatch, capsys, "make-anchors", infos, "--out-dir", tmp_path / "a", *arguments
    )
    assert f"[12, 11] from {SMALL['num_train'] * SMALL['num_frames']} frames" in printed
    shapes = {path.name: np.load(path).shape for path in (tmp_path / "a").iterdir()}
    assert shapes == {
        "kmeans_det_12.npy": (12, 11),
        "kmeans_map_5.npy": (5, 20, 2),
        "kmeans_motion_2.npy": (5, 2, 12, 2),
    }
    det = np.load(tmp_path / "a" / "kmeans_det_12.npy")
    assert det.dtype == np.float32
    boxes = np.concatenate([info["gt_boxes"] for info in load_infos(infos)[0]])
    assert_allclose(det, detection_anchors(list(load_infos(infos)[0]), 12), rtol=1e-5)
    assert (np.hypot(*det[:, :2].T) < 55).all() and boxes[:, 2].min() <= det[:, 2].min()


def test_tool_without_a_file(tmp_path, monkeypatch, capsys):
    assert "none.npz does not exist" in fail_here(monkeypatch, capsys, "make-anchors", tmp_path / "none.npz")
