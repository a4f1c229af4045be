"""Neighbours of points: ball query and nearest neighbours."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _library, _registration
from ._arguments import check_that, constants, numbers_to, places_in_groups
from ._declared import declared

__all__ = [
    "ball_query",
    "first_marked",
    "knn",
    "row_ranges",
    "stack_ball_query",
    "three_nn",
]

# Pairs of points whose distances are in memory at a time.
_PAIRS = 1 << 24


def row_ranges(rows: int, columns: int) -> Iterator[slice]:
    """Return slices of rows, at least one, so that a table of a slice's rows and all columns is not too large."""
    step = max(1, _PAIRS // max(1, columns))
    return (slice(start, min(start + step, rows)) for start in range(0, max(rows, 1), step))


def squared_distances(centers: Tensor, points: Tensor) -> Tensor:  # [M, D], [N, D] -> [M, N]
    distances = centers.new_zeros(len(centers), len(points))
    for center, point in zip(centers.T, points.T, strict=True):
        apart = center[:, None] - point
        distances.add_(apart.mul_(apart))
    return distances


def first_marked(marks: Tensor, count: int) -> tuple[Tensor, Tensor]:  # [M, N] bool -> [M, count], [M]
    """Return the first ``count`` marked columns of each row, and how many there are.

    Where a row has fewer marked columns, the first one fills the rest. A row without any has zeros.
    """
    row, column = marks.nonzero(as_tuple=True)
    found = marks.sum(1)
    rank = places_in_groups(row, found)
    kept = rank < count
    row, column, rank = row[kept], column[kept], rank[kept]
    first = found.new_zeros(len(marks)).index_put((row[rank == 0],), column[rank == 0])
    return first[:, None].repeat(1, count).index_put((row, rank), column), found


def _for_each_range(
    xyz: Tensor, center_xyz: Tensor, find: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Return the two results of ``find`` for the squared distances of all centers, a range of centers at a time."""
    found = [
        find(squared_distances(centers[rows], points))
        for centers, points in zip(center_xyz, xyz, strict=True)
        for rows in row_ranges(len(centers), len(points))
    ]
    found = found or [find(xyz.new_empty(0, xyz.shape[1]))]
    first, second = (torch.cat(parts) for parts in zip(*found, strict=True))
    shape = center_xyz.shape[:2]
    return first.unflatten(0, shape), second.unflatten(0, shape)


@declared(
    min_radius="number",
    max_radius="number",
    sample_num="integer, at least 0",
    xyz="real [B, N, 3]",
    center_xyz="real [B, M, 3]",
)
def ball_query(
    min_radius: float,
    max_radius: float,
    sample_num: int,
    xyz: Tensor,  # [B, N, 3]
    center_xyz: Tensor,  # [B, M, 3]
) -> Tensor:  # [B, M, sample_num] int32
    """Return the first ``sample_num`` points whose distance from each center is in [min_radius, max_radius).

    Args:
        min_radius: The smallest distance. Points at the center itself always count.
        max_radius: The distance that is too large.
        sample_num: The number of indices.
        xyz: [B, N, 3]. The points, in the unit of the radii. 16-bit types are computed in float32.
        center_xyz: [B, M, 3]. The centers.

    Returns:
        [B, M, sample_num] int32. Indices in rising order. The first one fills the rest of a ball with fewer points, and
        zeros fill an empty ball. A point or center with a NaN is in no ball.

    It is not differentiable. It is deterministic.

    Raises:
        ValueError: A shape does not fit. The message names the argument.

    Source: The signature is mmcv's without its two last arguments, the batch counts: see ``stack_ball_query``.
    """
    return _in_balls(xyz, center_xyz, min_radius**2, max_radius**2, sample_num, False)


def _in_balls(
    xyz: Tensor, center_xyz: Tensor, low: float, high: float, count: int, is_stacked: bool
) -> Tensor:
    points, centers = constants(xyz, center_xyz)
    return _ball_query(points, centers, low, high, count, is_stacked)


def ball_query_reference(
    xyz: Tensor, center_xyz: Tensor, low: float, high: float, count: int, is_stacked: bool
) -> Tensor:
    """Return what the operator ``visdet::ball_query`` returns, in plain torch: csrc/point_neighbours.h says what."""

    def find(distances: Tensor) -> tuple[Tensor, Tensor]:
        is_near = (distances >= low) & (distances < high)
        return first_marked(is_near if is_stacked else is_near | (distances == 0), count)

    index, found = _for_each_range(xyz, center_xyz, find)
    if is_stacked:
        index[..., :1].masked_fill_((found == 0)[..., None], -1)
    return index.int()


@declared(
    max_radius="number",
    sample_num="integer, at least 0",
    xyz="real [N, 3]",
    xyz_batch_cnt="integers [B]",
    center_xyz="real [M, 3]",
    center_xyz_batch_cnt="integers [B]",
)
def stack_ball_query(
    max_radius: float,
    sample_num: int,
    xyz: Tensor,  # [N, 3]
    xyz_batch_cnt: Tensor,  # [B]
    center_xyz: Tensor,  # [M, 3]
    center_xyz_batch_cnt: Tensor,  # [B]
) -> Tensor:  # [M, sample_num] int32
    """Return what ``ball_query`` returns of clouds of different sizes, which stand one after the other.

    Args:
        max_radius: The distance that is too large. The smallest one is 0.
        sample_num: The number of indices.
        xyz: [N, 3]. The points of all clouds.
        xyz_batch_cnt: [B]. The number of points of each cloud.
        center_xyz: [M, 3]. The centers of all clouds.
        center_xyz_batch_cnt: [B]. The number of centers of each cloud.

    Returns:
        [M, sample_num] int32. Indices within the cloud. The first index of an empty ball is -1.

    It is not differentiable. It is deterministic. On a GPU, the host waits for the numbers.

    Raises:
        ValueError: A shape or a sum of numbers does not fit. The message names the argument.

    Source: The signature is mmcv's.
    """
    sizes = sizes_of("stack_ball_query", "xyz", xyz, xyz_batch_cnt)
    center_sizes = sizes_of("stack_ball_query", "center_xyz", center_xyz, center_xyz_batch_cnt)
    results = [center_xyz.new_zeros(0, sample_num, dtype=torch.int32)]
    for points, centers in zip(xyz.split(sizes), center_xyz.split(center_sizes), strict=True):
        clouds = points[None], centers[None]
        results.append(_in_balls(*clouds, 0, max_radius**2, sample_num, True)[0])
    return torch.cat(results)


def sizes_of(op: str, name: str, rows: Tensor, batch_cnt: Tensor) -> list[int]:
    """Return the numbers of rows of each cloud as a list."""
    sizes = batch_cnt.tolist()
    count, fits = len(rows), min(sizes, default=0) >= 0
    fits = fits and sum(sizes) == count
    check_that(fits, op, f"{name}_batch_cnt", "add up to the {} rows of {}", sizes, count, name)
    return sizes


def _nearest(distances: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the columns of the ``count`` smallest distances of each row, of equal ones the lower first, and these.

    Where there are fewer than ``count`` numbers, the distance is infinite and the column 0.
    """
    distances = distances.nan_to_num(torch.inf, torch.inf)
    missing = count - distances.shape[1]
    if missing > 0:
        distances = F.pad(distances, (0, missing), value=torch.inf)
    if distances.dtype == torch.float32:
        # The bits of numbers from 0 on have the order of the numbers.
        key = distances.view(torch.int32).long() << 32
        key |= numbers_to(distances.shape[1], key)
        index = key.topk(count, dim=1, largest=False).values & 0xFFFFFFFF
    else:
        index = distances.sort(dim=1, stable=True).indices[:, :count]
    nearest = distances.gather(1, index)
    return torch.where(nearest < torch.inf, index, 0).int(), nearest


@declared(k="integer, at least 1", xyz="real [B, N, D]", center_xyz="real [B, M, D]")
def knn(
    k: int,
    xyz: Tensor,  # [B, N, D]
    center_xyz: Tensor,  # [B, M, D]
) -> tuple[Tensor, Tensor]:  # [B, M, k] int32, [B, M, k]
    """Return the ``k`` nearest points of each center, and their squared distances.

    Args:
        k: The number of neighbours.
        xyz: [B, N, D]. The points, or their features. 16-bit types are computed in float32.
        center_xyz: [B, M, D]. The centers.

    Returns:
        [B, M, k] int32 and [B, M, k]. Indices and squared distances, nearest first; of equal distances the lower index
        comes first. The index is 0 and the distance infinite where there are fewer than ``k`` points. Points with a NaN
        are nobody's neighbours.

    It is not differentiable. It is deterministic.

    Raises:
        ValueError: A shape or ``k`` does not fit. The message names the argument.

    Source: mmcv's ``knn(k, xyz, center_xyz, transposed=False)`` returns the indices alone, [B, k, M], and reads three
        numbers for each point whatever D is. ``visdet.compat`` provides mmcv's entry.
    """
    points, centers = constants(xyz, center_xyz)
    has_kernel = xyz.shape[2] == 3 and k <= _library.CONSTANTS.get("max_neighbours", 0)
    return (_knn if has_kernel else knn_reference)(points, centers, k)


def knn_reference(xyz: Tensor, center_xyz: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return what the operator ``visdet::knn`` returns, in plain torch: csrc/point_neighbours.h says what."""
    return _for_each_range(xyz, center_xyz, lambda distances: _nearest(distances, k))


@declared(source="floating [B, M, 3]", target="floating [B, N, 3]")
def three_nn(
    target: Tensor,  # [B, N, 3]
    source: Tensor,  # [B, M, 3]
) -> tuple[Tensor, Tensor]:  # [B, N, 3], [B, N, 3] int32
    """Return the distances from the three nearest points of ``source``, and their indices.

    Args:
        target: [B, N, 3]. The points whose neighbours are sought.
        source: [B, M, 3]. The points that may be neighbours.

    Returns:
        [B, N, 3] and [B, N, 3] int32. As from ``knn``, but the distances are not squared.

    It is not differentiable. It is deterministic.

    Raises:
        ValueError: A shape or type does not fit. The message names the argument.

    Source: The signature is mmcv's.
    """
    index, distances = knn(3, source, target)
    return distances.sqrt().to(target), index


_LAYOUTS = {"xyz": "[B, N, 3]", "center_xyz": "[B, M, 3]"}
_ball_query = _registration.without_gradient(
    "ball_query", "xyz [B, M, count] int32", ball_query_reference, **_LAYOUTS
)
_knn = _registration.without_gradient("knn", "xyz [B, M, k] int32, xyz [B, M, k]", knn_reference, **_LAYOUTS)
