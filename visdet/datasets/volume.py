"""Data sets of values at points in space, which are the voxels of a volume or other samples."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from visdet.checks.arguments import Count, Positive, Seed, checked
from visdet.checks.array_files import load_arrays
from visdet.checks.finite import check_finite
from visdet.errors import InvalidInputError
from visdet.registry import DATASETS
from visdet.structures import FieldDataSample


class FieldDataset(Dataset):
    """Base class of data sets of fields, which hold the values of a field at points.

    In training, an item is one point, ``dict(inputs=points [1, 3], data_samples=FieldDataSample)`` with ``gt_field``
    [1]. A batch is looked up at once. The loader of torch calls ``__getitems__`` with its indices, which returns a list
    of one such dict with all points. In test mode, the only item is the whole field.

    Args:
        values: [M], the values at the points.
        test_mode: whether the whole field is the only item.
    """

    def __init__(self, values: Tensor, test_mode: bool) -> None:
        self.values = values
        self.test_mode = test_mode
        self.unit = "field" if test_mode else "points"

    def points_at(self, indices: Tensor) -> Tensor:
        """Return the points [M, 3] of ``indices``."""
        raise NotImplementedError

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"{type(self).__name__}: there is no item {index} of {len(self)}")
        return self.whole() if self.test_mode else self.chunk(torch.tensor([index]))

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        if self.test_mode:
            return [self[index] for index in indices]
        return [self.chunk(torch.tensor(indices, dtype=torch.int64))]

    def whole(self) -> dict[str, Any]:
        """Return all points and values in their order."""
        return self.chunk(torch.arange(len(self.values)))

    def chunk(self, indices: Tensor) -> dict[str, Any]:
        """Return the points and values of ``indices``."""
        return {
            "inputs": self.points_at(indices),
            "data_samples": FieldDataSample(gt_field=self.values[indices]),
        }

    def samples(self) -> tuple[Tensor, Tensor]:
        """Return all points [M, 3] and values [M]."""
        item = self.whole()
        return item["inputs"], item["data_samples"].gt_field

    def __len__(self) -> int:
        return 1 if self.test_mode else len(self.values)


@DATASETS.register_module()
class VolumeDataset(FieldDataset):
    """The voxels of a volume. The voxel (i, j, k) is at the point ``(i + 0.5, j + 0.5, k + 0.5) * voxel_size``.

    ``metainfo`` holds ``voxel_size``, ``value_scale``, by which a fitted value must be multiplied, and ``sides``.

    Args:
        path: a ``.npy`` file, or a ``.npz`` file with one array, of shape [D0, D1, D2] and real numbers.
        key: the name of the array in a ``.npz`` file with several arrays.
        synthetic: arguments of :func:`make_volume`, instead of a file.
        volume_size: the length that the longest side is scaled to. With 0, voxels have size 1.
        normalize: divide by the largest magnitude, so that one learning rate suits every volume. Metrics are then those
            of the divided values, but PSNR and R2 do not change.
        test_mode: see :class:`FieldDataset`. The sample of the whole volume has ``volume_shape``.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: neither or both of ``path`` and ``synthetic`` are given, or the array is not a volume, is empty,
            holds NaN or infinity, or has the same value everywhere.
    """

    def __init__(
        self,
        path: str | None = None,
        key: str | None = None,
        synthetic: dict[str, Any] | None = None,
        volume_size: float = 10.0,
        normalize: bool = True,
        test_mode: bool = False,
    ) -> None:
        if (path is None) == (synthetic is None):
            raise InvalidInputError("VolumeDataset: give either path or synthetic")
        name = f"VolumeDataset: {path if path is not None else 'the synthetic volume'}"
        volume = make_volume(**(synthetic or {})) if path is None else _read(path, name, key)[0]
        if volume.ndim != 3:
            raise InvalidInputError(f"{name} must be [D0, D1, D2], got {list(volume.shape)}")
        values, scale = _checked_values(volume, name, normalize)
        super().__init__(values.reshape(-1), test_mode)
        self.shape = volume.shape
        self.voxel_size = volume_size / max(volume.shape) if volume_size > 0 else 1.0
        self.metainfo = {
            "voxel_size": self.voxel_size,
            "value_scale": scale,
            "sides": [self.voxel_size * side for side in volume.shape],
        }

    @property
    def volume(self) -> Tensor:
        """The values [D0, D1, D2]."""
        return self.values.view(self.shape)

    def whole(self) -> dict[str, Any]:
        """Return all voxels in their order."""
        item = super().whole()
        item["data_samples"].set_metainfo({"volume_shape": self.shape})
        return item

    def points_at(self, indices: Tensor) -> Tensor:
        """Return the centres [..., 3] of voxels, given their indices in the flattened volume."""
        _, D1, D2 = self.shape
        place = torch.stack([indices // (D1 * D2), indices // D2 % D1, indices % D2], -1)
        return (place.to(torch.float32) + 0.5) * self.voxel_size


@DATASETS.register_module()
class PointSampleDataset(FieldDataset):
    """Samples of a scalar at points.

    ``metainfo`` holds ``value_scale``, and ``offset`` and ``voxel_size`` of the points. The coordinates in the file are
    ``point * voxel_size + offset``.

    Args:
        path: a ``.npy`` file [M, 4] of x, y, z and value, or a ``.npz`` file with ``points`` [M, 3] and ``values`` [M].
        volume_size: the longest side of the box to which the points are moved and scaled. With 0, they are not changed.
        normalize: divide the values by the largest magnitude.
        test_mode: see :class:`FieldDataset`.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the arrays have other shapes, are empty, or hold NaN or infinity, all points are equal, or all
            values are equal.
    """

    def __init__(
        self, path: str, volume_size: float = 10.0, normalize: bool = True, test_mode: bool = False
    ) -> None:
        name = f"PointSampleDataset: {path}"
        if str(path).endswith(".npz"):
            points, values = _read(path, name, "points", "values")
        else:
            (table,) = _read(path, name, None)
            if table.ndim != 2 or table.shape[1] != 4:
                raise InvalidInputError(f"{name} must be [M, 4] (x, y, z, value), got {list(table.shape)}")
            points, values = table[:, :3], table[:, 3]
        if points.ndim != 2 or points.shape[1] != 3 or values.shape != points.shape[:1]:
            raise InvalidInputError(
                f"{name}: points must be [M, 3] and values [M], got {list(points.shape)} and {list(values.shape)}"
            )
        checked, value_scale = _checked_values(values, name, normalize)
        super().__init__(checked, test_mode)
        points = np.asarray(points, np.float64)
        check_finite(name, points=points)
        low, side = points.min(0), float(np.ptp(points, axis=0).max())
        if side == 0:
            raise InvalidInputError(f"{name}: all points are at one place")
        offset, scale = (low, side / volume_size) if volume_size > 0 else (np.zeros(3), 1.0)
        self._points = torch.from_numpy(((points - offset) / scale).astype(np.float32))
        self.metainfo = {"offset": offset.tolist(), "voxel_size": scale, "value_scale": value_scale}

    def points_at(self, indices: Tensor) -> Tensor:
        """Return points [..., 3] by index."""
        return self._points[indices]


@checked
def make_volume(
    size: Positive | tuple[Positive, Positive, Positive] = 48, num_blobs: Count = 12, seed: Seed = 0
) -> np.ndarray:
    """Return a float32 volume [D0, D1, D2] of smooth, rotated and stretched blobs, and of a ring, which no blob fits.

    Args:
        size: number of voxels along each axis, which is one number or three.
        num_blobs: number of Gaussian blobs, some of which are negative.
        seed: seed of the random numbers.

    Raises:
        ValueError: the size is not one or three positive numbers.
    """
    shape = (size,) * 3 if isinstance(size, int) else tuple(size)
    rng = np.random.default_rng(seed)
    axes = [(np.arange(n) + 0.5) / max(shape) for n in shape]
    points = np.stack(np.meshgrid(*axes, indexing="ij"), -1)  # [D0, D1, D2, 3]
    sides = np.array(shape) / max(shape)
    volume = np.zeros(shape)
    for _ in range(num_blobs):
        turn, _ = np.linalg.qr(rng.normal(size=(3, 3)))
        offsets = (points - rng.uniform(0.2, 0.8, 3) * sides) @ (turn / rng.uniform(0.05, 0.14, 3))
        volume += rng.choice([1.0, 0.7, -0.4]) * np.exp(-0.5 * (offsets**2).sum(-1))
    along = points - 0.5 * sides
    from_ring = np.hypot(np.hypot(along[..., 0], along[..., 1]) - 0.3, along[..., 2])
    return (volume + 0.5 * np.exp(-0.5 * (from_ring / 0.05) ** 2)).astype(np.float32)


def _read(path: str, name: str, *keys: str | None) -> list[np.ndarray]:
    """Return the arrays of a file by their names. A name of None stands for the only array."""
    loaded = load_arrays(path)
    if isinstance(loaded, np.ndarray):
        return [loaded]
    if keys == (None,) and len(loaded) == 1:
        return [*loaded.values()]
    if any(key not in loaded for key in keys):
        wanted = "one array, or key" if keys == (None,) else f"arrays {', '.join(map(str, keys))}"
        raise InvalidInputError(f"{name} must have {wanted}; it has {', '.join(loaded) or 'none'}")
    return [loaded[str(key)] for key in keys]


def _checked_values(array: np.ndarray, name: str, normalize: bool) -> tuple[Tensor, float]:
    """Return the values in float32, divided by a scale, and that scale."""
    if array.dtype.kind not in "fiub":
        raise InvalidInputError(f"{name} must hold real numbers, got {array.dtype}")
    values = np.asarray(array, np.float64)
    check_finite(name, values=values)
    if not values.size or values.min() == values.max():
        raise InvalidInputError(f"{name} is empty or has one value everywhere: there is nothing to fit")
    scale = float(np.abs(values).max()) if normalize else 1.0
    return torch.from_numpy((values / scale).astype(np.float32)), scale
