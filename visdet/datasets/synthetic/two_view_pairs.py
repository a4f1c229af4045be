"""Pairs of views of textured planes with exact depth, which are drawn when they are read."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from mmengine.dataset import BaseDataset

from visdet.checks.arguments import Positive, Seed
from visdet.errors import InvalidInputError
from visdet.registry import DATASETS
from visdet.structures import TwoViewDataSample

_TEXTURE_CELLS = 64
_CELL_PER_DEPTH = 0.07  # size of a texture cell divided by its depth, so that every cell is a few pixels wide


@dataclass
class _Plane:
    centre: np.ndarray  # [3], in the frame of the reference camera
    axes: np.ndarray  # [3, 3], whose rows are two directions within the plane and its normal
    radius: float  # that of the disc, half the side of the square, or inf for the whole plane
    is_disc: bool  # whether it is a disc or a square
    texture: np.ndarray  # [cells, cells, 3] in 0..1, repeated over the plane
    cell: float  # the size of a cell of the texture


@DATASETS.register_module()
class TwoViewPairs(BaseDataset):
    """Pairs of views of a slanted wall behind discs and squares, with the depth of the reference view.

    Pair i is always drawn from ``numpy.random.default_rng([seed, i])``. An item is::

        inputs: uint8 [2, 3, H, W], the reference view and the source view, RGB
        data_samples: dict of
            intrinsics: float32 [3, 3], the camera matrix of both views in pixels, whose centres are at + 0.5
            source_from_reference: float32 [4, 4], the transform of points
            gt_depth: float32 [H / depth_stride, W / depth_stride], z in the reference view at the centres of squares of
                depth_stride pixels
            pair: the number of the pair

    Args:
        num_pairs: number of pairs in the data set.
        image_size: (height, width), multiples of ``depth_stride``.
        depth_range: the nearest depth of a shape's centre and the farthest depth of the wall's centre.
        noise: standard deviation of the noise of each view, on the scale 0..255.
        depth_stride: the side, in pixels, of the squares at whose centres the depth is given.
        seed: seed of the random numbers. Data sets with different seeds share no pair.
    """

    unit = "pairs"
    METAINFO = {"dataset_type": "two_view_pairs"}

    def __init__(
        self,
        num_pairs: Positive,
        image_size: tuple[int, int] = (48, 64),
        depth_range: tuple[float, float] = (1.5, 6.0),
        noise: float = 3.0,
        depth_stride: int = 2,
        seed: Seed = 0,
        **base_arguments: Any,
    ) -> None:
        if any(side < 1 or side % depth_stride for side in image_size):
            raise InvalidInputError(
                f"TwoViewPairs: image_size must be positive multiples of {depth_stride}, got {tuple(image_size)}"
            )
        if not 0 < depth_range[0] < depth_range[1]:
            raise InvalidInputError(
                f"TwoViewPairs: depth_range must be positive and rising, got {tuple(depth_range)}"
            )
        self.num_pairs = num_pairs
        self.image_size = tuple(image_size)
        self.depth_range = tuple(depth_range)
        self.noise = noise
        self.depth_stride = depth_stride
        self.seed = seed
        super().__init__(ann_file="", **base_arguments)

    def load_data_list(self) -> list[dict]:
        """Return one entry per pair. The pictures are drawn later."""
        return [{"pair": pair} for pair in range(self.num_pairs)]

    def prepare_data(self, idx: int) -> dict:
        """Return pair ``idx``, which is drawn now."""
        pair = self.get_data_info(idx)["pair"]
        rng = np.random.default_rng([self.seed, pair])
        height, width = self.image_size
        focal = 0.9 * width
        intrinsics = np.array([[focal, 0.0, width / 2], [0.0, focal, height / 2], [0.0, 0.0, 1.0]])
        planes = self._scene(rng)
        source = _pose(rng)
        rays = _pixel_rays(intrinsics, height, width, 1)
        views = []
        for pose in (np.eye(4), source):
            colours, _ = _render(planes, pose, rays)
            colours = 255 * colours + rng.normal(0.0, self.noise, colours.shape)
            views.append(colours.round().clip(0, 255).astype(np.uint8).transpose(2, 0, 1))
        _, depth = _render(planes, np.eye(4), _pixel_rays(intrinsics, height, width, self.depth_stride))
        return {
            "inputs": torch.from_numpy(np.stack(views)),
            "data_samples": TwoViewDataSample(
                metainfo={"pair": pair},
                intrinsics=torch.from_numpy(intrinsics).float(),
                source_from_reference=torch.from_numpy(source).float(),
                gt_depth=torch.from_numpy(depth).float(),
            ),
        }

    def _scene(self, rng: np.random.Generator) -> list[_Plane]:
        nearest, farthest = self.depth_range
        wall_depth = rng.uniform(0.6, 1.0) * farthest
        planes = [_plane(rng, np.array([0.0, 0.0, wall_depth]), np.inf, 0.35)]
        for _ in range(rng.integers(2, 5)):
            depth = 1 / rng.uniform(1 / (0.8 * wall_depth), 1 / nearest)
            place = rng.uniform(-0.45, 0.45, 2) * depth
            planes.append(_plane(rng, np.array([*place, depth]), rng.uniform(0.12, 0.25) * depth, 0.3))
        return planes


def _plane(rng: np.random.Generator, centre: np.ndarray, radius: float, max_slope: float) -> _Plane:
    normal = np.array([*rng.uniform(-max_slope, max_slope, 2), 1.0])
    normal /= np.linalg.norm(normal)
    angle = rng.uniform(0, 2 * np.pi)
    across = np.cross(normal, [-np.sin(angle), np.cos(angle), 0.0])
    across /= np.linalg.norm(across)
    axes = np.stack((across, np.cross(normal, across), normal))
    # The texture consists of shades of a random colour, which tells nothing about the depth.
    texture = rng.uniform(0.2, 0.8, 3) + rng.uniform(-0.35, 0.35, (_TEXTURE_CELLS, _TEXTURE_CELLS, 3))
    return _Plane(
        centre, axes, radius, bool(rng.integers(2)), texture.clip(0, 1), _CELL_PER_DEPTH * centre[2]
    )


def _pose(rng: np.random.Generator) -> np.ndarray:
    """Return source_from_reference [4, 4], a small rotation and a translation parallel to the image plane."""
    angle, distance = rng.uniform(0, 2 * np.pi), rng.uniform(0.3, 0.6)
    x, y, z = rng.uniform(-0.04, 0.04, 3)
    turn_x = np.array([[1, 0, 0], [0, np.cos(x), -np.sin(x)], [0, np.sin(x), np.cos(x)]])
    turn_y = np.array([[np.cos(y), 0, np.sin(y)], [0, 1, 0], [-np.sin(y), 0, np.cos(y)]])
    turn_z = np.array([[np.cos(z), -np.sin(z), 0], [np.sin(z), np.cos(z), 0], [0, 0, 1]])
    pose = np.eye(4)
    pose[:3, :3] = turn_x @ turn_y @ turn_z
    pose[:3, 3] = distance * np.cos(angle), distance * np.sin(angle), 0.0
    return pose


def _pixel_rays(intrinsics: np.ndarray, height: int, width: int, stride: int) -> np.ndarray:
    """Return rays [H / stride, W / stride, 3] with z = 1 through the centres of squares of ``stride`` pixels."""
    x, y = np.meshgrid(np.arange(stride / 2, width, stride), np.arange(stride / 2, height, stride))
    return np.stack((x, y, np.ones_like(x)), axis=-1) @ np.linalg.inv(intrinsics).T


def _render(planes: list[_Plane], pose: np.ndarray, rays: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the colours [H, W, 3] in 0..1 and the depth [H, W] that a camera at ``pose`` sees along its rays."""
    rotation, eye = pose[:3, :3], -pose[:3, :3].T @ pose[:3, 3]
    directions = rays @ rotation  # in the frame of the reference camera
    colours = np.zeros(rays.shape)
    depth = np.full(rays.shape[:2], np.inf)
    for plane in planes:
        with np.errstate(divide="ignore", invalid="ignore"):
            distance = ((plane.centre - eye) @ plane.axes[2]) / (directions @ plane.axes[2])
        hit = (distance > 0) & (distance < depth)
        points = eye + distance[hit, None] * directions[hit]
        place = (points - plane.centre) @ plane.axes[:2].T  # [hits, 2]
        size = np.hypot(*place.T) if plane.is_disc else np.abs(place).max(axis=-1, initial=0.0)
        inside = size < plane.radius
        hit[hit] = inside
        depth[hit] = distance[hit]
        colours[hit] = _shade(plane.texture, place[inside] / plane.cell)
    return colours, depth


def _shade(texture: np.ndarray, place: np.ndarray) -> np.ndarray:
    """Return the bilinear colours of a repeated texture at places [N, 2] in cells."""
    low = np.floor(place)
    fraction = place - low
    i, j = low.astype(np.int64).T
    x, y = fraction[:, :1], fraction[:, 1:]
    corner = {(a, b): texture[(i + a) % len(texture), (j + b) % len(texture)] for a in (0, 1) for b in (0, 1)}
    near = (1 - y) * corner[0, 0] + y * corner[0, 1]
    far = (1 - y) * corner[1, 0] + y * corner[1, 1]
    return (1 - x) * near + x * far
