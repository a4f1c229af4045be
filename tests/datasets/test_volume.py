"""Volumes and point samples: coordinates, scales, and what is refused."""

import numpy as np
import pytest
import torch

from visdet.datasets import PointSampleDataset, VolumeDataset
from visdet.registry import DATASETS


def saved(tmp_path, array, name="volume.npy"):
    path = tmp_path / name
    np.save(path, array) if isinstance(array, np.ndarray) else np.savez(path, **array)
    return str(path)


def test_voxels_lie_where_the_array_says(tmp_path):
    volume = np.arange(2 * 3 * 5, dtype=np.int16).reshape(2, 3, 5)
    dataset = DATASETS.build(dict(type="VolumeDataset", path=saved(tmp_path, volume), volume_size=10.0))
    assert len(dataset) == 30 and dataset.voxel_size == 2.0
    item = dataset[1 * 15 + 2 * 5 + 4]
    assert item["inputs"].tolist() == [[3.0, 5.0, 9.0]]  # (1.5, 2.5, 4.5) voxels of 2
    assert item["data_samples"].gt_field.tolist() == [1.0] and dataset.metainfo["value_scale"] == 29.0
    assert dataset.metainfo["sides"] == [4.0, 6.0, 10.0]
    assert torch.allclose(dataset.volume * 29, torch.from_numpy(volume).float())
    (chunk,) = dataset.__getitems__([0, 29, 7])
    points, values = dataset.samples()
    assert torch.equal(chunk["inputs"], points[[0, 29, 7]])
    assert torch.equal(chunk["data_samples"].gt_field, values[[0, 29, 7]])


def test_in_test_mode_the_item_is_the_whole_field(tmp_path):
    path = saved(tmp_path, np.arange(2 * 3 * 5, dtype=np.int16).reshape(2, 3, 5))
    dataset = VolumeDataset(path, test_mode=True)
    assert len(dataset) == 1
    for item in (dataset[0], *dataset.__getitems__([0]), VolumeDataset(path).whole()):
        points, values = VolumeDataset(path).samples()
        assert torch.equal(item["inputs"], points) and torch.equal(item["data_samples"].gt_field, values)
        assert item["data_samples"].volume_shape == (2, 3, 5)
    with pytest.raises(IndexError, match="there is no item 1 of 1"):
        dataset[1]
    table = np.column_stack([np.eye(3), np.arange(3.0)])
    (chunk,) = PointSampleDataset(saved(tmp_path, table, "points.npy"), test_mode=True)
    assert chunk["inputs"].shape == (3, 3) and "volume_shape" not in chunk["data_samples"]


def test_voxel_units_and_values_as_they_are(tmp_path):
    path = saved(tmp_path, {"scan": np.eye(4)[None] * 7, "other": np.zeros(3)}, "volume.npz")
    dataset = VolumeDataset(path, key="scan", volume_size=0, normalize=False)
    assert (
        dataset[5]["inputs"].tolist() == [[0.5, 1.5, 1.5]]
        and dataset[5]["data_samples"].gt_field.item() == 7.0
    )


BAD_VOLUMES = {
    "flat": (np.zeros((3, 4)), r"must be \[D0, D1, D2\], got \[3, 4\]"),
    "constant": (np.full((2, 2, 2), 3.5), "has one value everywhere: there is nothing to fit"),
    "complex": (np.ones((2, 2, 2), complex), "must hold real numbers, got complex128"),
    "nan": (
        np.where(np.arange(8).reshape(2, 2, 2) == 6, np.nan, 1.0),
        r"must be finite, got 1 NaN or infinite numbers, the first at \[1, 1, 0\]",
    ),
}


@pytest.mark.parametrize("name", BAD_VOLUMES)
def test_rejects_volumes(tmp_path, name):
    volume, message = BAD_VOLUMES[name]
    path = saved(tmp_path, volume)
    with pytest.raises(ValueError, match=message) as caught:
        VolumeDataset(path)
    assert str(caught.value).startswith(f"VolumeDataset: {path}")


@pytest.mark.parametrize("as_table", [True, False])
def test_point_samples(tmp_path, as_table):
    points = np.array([[1.0, 2.0, 3.0], [5.0, 2.0, 4.0], [3.0, 4.0, 3.0]])
    values = np.array([2.0, -4.0, 1.0])
    if as_table:
        path = saved(tmp_path, np.column_stack([points, values]))
    else:
        path = saved(tmp_path, {"points": points, "values": values}, "samples.npz")
    dataset = DATASETS.build(dict(type="PointSampleDataset", path=path, volume_size=10.0))
    found, scaled = dataset.samples()
    assert found.tolist() == [[0.0, 0.0, 0.0], [10.0, 0.0, 2.5], [5.0, 5.0, 0.0]]
    assert scaled.tolist() == [0.5, -1.0, 0.25]
    meta = dataset.metainfo
    assert np.allclose(found.numpy() * meta["voxel_size"] + meta["offset"], points)


BAD_POINTS = {
    "columns": (np.zeros((5, 3)), r"must be \[M, 4\] \(x, y, z, value\), got \[5, 3\]"),
    "lengths": (
        {"points": np.zeros((5, 3)), "values": np.arange(4.0)},
        r"points must be \[M, 3\] and values \[M\], got \[5, 3\] and \[4\]",
    ),
    "nan": (
        {"points": np.array([[0, 0, 0], [1, np.nan, 1]]), "values": np.arange(2.0)},
        r"points must be finite, got 1 NaN or infinite numbers, the first at \[1, 1\]",
    ),
    "one place": ({"points": np.ones((4, 3)), "values": np.arange(4.0)}, "all points are at one place"),
}


@pytest.mark.parametrize("name", BAD_POINTS)
def test_rejects_points(tmp_path, name):
    arrays, message = BAD_POINTS[name]
    path = saved(tmp_path, arrays, "points.npy" if isinstance(arrays, np.ndarray) else "points.npz")
    with pytest.raises(ValueError, match=message):
        PointSampleDataset(path)


def test_synthetic_volume():
    dataset = VolumeDataset(synthetic=dict(size=(8, 12, 10), num_blobs=3, seed=1))
    assert dataset.shape == (8, 12, 10) and np.ptp(dataset.volume.numpy()) > 0.3
    again = VolumeDataset(synthetic=dict(size=(8, 12, 10), num_blobs=3, seed=1))
    assert torch.equal(dataset.volume, again.volume)
