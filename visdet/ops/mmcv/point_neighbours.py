"""Neighbours and samples of point clouds: ball query, nearest neighbours, and furthest point sampling."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .._arguments import computation_dtype

__all__ = [
    "ball_query",
    "check_layout",
    "first_marked",
    "furthest_point_sample",
    "furthest_point_sample_with_dist",
    "knn",
    "row_ranges",
    "stack_ball_query",
    "three_nn",
]

# Pairs of points whose distances are in memory at a time.
_PAIRS = 1 << 24


def check_layout(op: str, name: str, tensor: Tensor, expected: str, *sizes: int | None) -> None:
    """Raise a ValueError unless the tensor has these sizes, where None stands for any size."""
    fits = tensor.dim() == len(sizes)
    if not fits or any(size not in (None, given) for size, given in zip(sizes, tensor.shape, strict=True)):
        raise ValueError(f"{op}: {name} must be {expected}, got {list(tensor.shape)}")


def row_ranges(rows: int, columns: int) -> Iterator[slice]:
    """Return slices of rows, so that a table of the rows of a slice and all columns is not too large."""
    step = max(1, _PAIRS // max(1, columns))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def squared_distances(centers: Tensor, points: Tensor) -> Tensor:  # [M, 3], [N, 3] -> [M, N]
    x, y, z = ((center[:, None] - point) for center, point in zip(centers.T, points.T, strict=True))
    return x.mul_(x).add_(y.mul_(y)).add_(z.mul_(z))


def first_marked(marks: Tensor, count: int) -> tuple[Tensor, Tensor]:  # [M, N] bool -> [M, count], [M]
    """Return the first ``count`` marked columns of each row, and how many there are.

    Where a row has fewer marked columns, the first one fills the rest. A row without any has zeros.
    """
    row, column = marks.nonzero(as_tuple=True)
    found = marks.sum(1)
    rank = torch.arange(len(row), device=marks.device) - (found.cumsum(0) - found)[row]
    kept = rank < count
    row, column, rank = row[kept], column[kept], rank[kept]
    first = found.new_zeros(len(marks)).index_put((row[rank == 0],), column[rank == 0])
    return first[:, None].repeat(1, count).index_put((row, rank), column), found


def _for_each_cloud(
    centers: Tensor, points: Tensor, count: int, find: Callable[[Tensor, Tensor], Tensor | tuple[Tensor, ...]]
) -> list[Tensor]:
    """Return the results of ``find`` for ranges of centers, put together as [B, M, count]."""
    dtype = computation_dtype(points)
    results = []
    for center, cloud in zip(centers.detach().to(dtype), points.detach().to(dtype), strict=True):
        for rows in row_ranges(len(center), len(cloud)):
            results.append(find(center[rows], cloud))
    shape = (*centers.shape[:2], count)
    if not results:
        return [points.new_zeros(shape, dtype=torch.int32), points.new_zeros(shape, dtype=dtype)]
    columns = zip(*(result if isinstance(result, tuple) else (result,) for result in results), strict=True)
    return [torch.cat(parts).reshape(shape) for parts in columns]


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

    It is not differentiable. It is deterministic. On a GPU, the host waits for the number of points in the balls.

    Raises:
        ValueError: A shape does not fit. The message names the argument.

    Source: The signature is mmcv's.
    """
    check_layout("ball_query", "xyz", xyz, "[B, N, 3]", None, None, 3)
    check_layout("ball_query", "center_xyz", center_xyz, f"[{len(xyz)}, M, 3]", len(xyz), None, 3)

    def find(centers: Tensor, points: Tensor) -> Tensor:
        distances = squared_distances(centers, points)
        is_near = (distances >= min_radius**2) & (distances < max_radius**2)
        return first_marked(is_near | (distances == 0), sample_num)[0].int()

    return _for_each_cloud(center_xyz, xyz, sample_num, find)[0]


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
    check_layout("stack_ball_query", "xyz", xyz, "[N, 3]", None, 3)
    check_layout("stack_ball_query", "center_xyz", center_xyz, "[M, 3]", None, 3)
    dtype = computation_dtype(xyz)
    results = [center_xyz.new_zeros(0, sample_num, dtype=torch.int32)]
    sizes = sizes_of("stack_ball_query", "xyz", xyz, xyz_batch_cnt)
    center_sizes = sizes_of("stack_ball_query", "center_xyz", center_xyz, center_xyz_batch_cnt, len(sizes))
    wide_centers, wide_points = center_xyz.detach().to(dtype), xyz.detach().to(dtype)
    clouds = zip(wide_centers.split(center_sizes), wide_points.split(sizes), strict=True)
    for centers, points in clouds:
        for rows in row_ranges(len(centers), len(points)):
            is_near = squared_distances(centers[rows], points) < max_radius**2
            index, found = first_marked(is_near, sample_num)
            index[:, :1].masked_fill_((found == 0)[:, None], -1)
            results.append(index.int())
    return torch.cat(results)


def sizes_of(op: str, name: str, rows: Tensor, batch_cnt: Tensor, clouds: int | None = None) -> list[int]:
    """Return the numbers of rows of each cloud as a list."""
    check_layout(op, f"{name}_batch_cnt", batch_cnt, f"[{'B' if clouds is None else clouds}]", clouds)
    sizes = batch_cnt.tolist()
    if sum(sizes) != len(rows) or min(sizes, default=0) < 0:
        raise ValueError(f"{op}: {name}_batch_cnt must add up to the {len(rows)} rows of {name}, got {sizes}")
    return sizes


def _nearest(distances: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the ``count`` smallest distances of each row and their columns, of equal ones the lower column first.

    Where there are fewer than ``count`` numbers, the distance is infinite and the column 0.
    """
    missing = count - distances.shape[1]
    if missing > 0:
        distances = torch.nn.functional.pad(distances, (0, missing), value=torch.inf)
    if distances.dtype == torch.float32:
        # The bits of numbers from 0 on have the order of the numbers, with NaN at the end.
        key = distances.view(torch.int32).long() << 32
        key |= torch.arange(distances.shape[1], device=key.device)
        index = key.topk(count, dim=1, largest=False).values & 0xFFFFFFFF
    else:
        index = distances.sort(dim=1, stable=True).indices[:, :count]
    nearest = distances.gather(1, index)
    is_number = nearest < torch.inf
    return torch.where(is_number, nearest, torch.inf), torch.where(is_number, index, 0).int()


def knn(
    k: int,
    xyz: Tensor,  # [B, N, 3]
    center_xyz: Tensor,  # [B, M, 3]
) -> tuple[Tensor, Tensor]:  # [B, M, k] int32, [B, M, k]
    """Return the ``k`` nearest points of each center, and their squared distances.

    Args:
        k: The number of neighbours.
        xyz: [B, N, 3]. The points. 16-bit types are computed in float32.
        center_xyz: [B, M, 3]. The centers.

    Returns:
        [B, M, k] int32 and [B, M, k]. Indices and squared distances, nearest first; of equal distances the lower index
        comes first. The index is 0 and the distance infinite where there are fewer than ``k`` points. Points with a NaN
        are nobody's neighbours.

    It is not differentiable. It is deterministic.

    Raises:
        ValueError: A shape or ``k`` does not fit. The message names the argument.

    Source: The signature is mmcv's.
    """
    if k < 1:
        raise ValueError(f"knn: k must be at least 1, got {k}")
    check_layout("knn", "xyz", xyz, "[B, N, 3]", None, None, 3)
    check_layout("knn", "center_xyz", center_xyz, f"[{len(xyz)}, M, 3]", len(xyz), None, 3)

    def find(centers: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
        distances, index = _nearest(squared_distances(centers, points), k)
        return index, distances

    index, distances = _for_each_cloud(center_xyz, xyz, k, find)
    return index, distances


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
        ValueError: A shape does not fit. The message names the argument.

    Source: The signature is mmcv's.
    """
    check_layout("three_nn", "source", source, "[B, M, 3]", None, None, 3)
    check_layout("three_nn", "target", target, f"[{len(source)}, N, 3]", len(source), None, 3)
    index, distances = knn(3, source, target)
    return distances.sqrt().to(target.dtype), index


def furthest_point_sample(
    points_xyz: Tensor,  # [B, N, 3]
    num_points: int,
) -> Tensor:  # [B, num_points] int32
    """Return samples of each cloud: its first point, and then always the point that is furthest from all samples.

    Args:
        points_xyz: [B, N, 3]. The points. 16-bit types are computed in float32.
        num_points: The number of samples. Beyond the number of points, samples are repeated.

    Returns:
        [B, num_points] int32. The indices. Of points at the same distance the lower index is taken. Distances that
        are NaN do not count, and none is larger than 1e5.

    It is not differentiable. It is deterministic.

    Raises:
        ValueError: A shape or ``num_points`` does not fit. The message names the argument.

    Source: The signature is mmcv's.
    """
    check_layout("furthest_point_sample", "points_xyz", points_xyz, "[B, N, 3]", None, None, 3)
    points = points_xyz.detach().to(computation_dtype(points_xyz))
    nearest = points.new_full(points.shape[:2], 1e10)
    return sample_furthest("furthest_point_sample", points, nearest, num_points)


def furthest_point_sample_with_dist(
    points_dist: Tensor,  # [B, N, N]
    num_points: int,
) -> Tensor:  # [B, num_points] int32
    """Return what ``furthest_point_sample`` returns, given the distance of each pair of points.

    Args:
        points_dist: [B, N, N]. The distances, of any kind.
        num_points: As of ``furthest_point_sample``.

    Returns:
        [B, num_points] int32. As from ``furthest_point_sample``.

    It is not differentiable. It is deterministic.

    Raises:
        ValueError: A shape or ``num_points`` does not fit. The message names the argument.

    Source: The signature is mmcv's.
    """
    op = "furthest_point_sample_with_dist"
    size = points_dist.shape[1] if points_dist.dim() > 1 else None
    check_layout(op, "points_dist", points_dist, "[B, N, N]", None, size, size)
    distances = points_dist.detach().to(computation_dtype(points_dist))
    return sample_furthest(op, distances, distances.new_full(distances.shape[:2], 1e10), num_points)


def sample_furthest(op: str, points: Tensor, nearest: Tensor, num_points: int) -> Tensor:
    """Return the samples, given points [B, N, 3] or distances [B, N, N] as the operator says.

    ``nearest`` [B, N] holds the squared distance of each point from the samples so far, and is updated.
    """
    if num_points < 0 or (num_points > 0 and points.shape[1] == 0):
        expected = "0" if points.shape[1] == 0 else "0 or more"
        raise ValueError(
            f"{op}: num_points must be {expected} for {points.shape[1]} points, got {num_points}"
        )
    cloud = torch.arange(len(points), device=points.device)
    samples = cloud.new_zeros(num_points, len(points))
    for i in range(1, num_points):
        row = points[cloud, samples[i - 1]]
        if not op.endswith("with_dist"):
            row = (points - row[:, None]).square_().sum(2)
        torch.fmin(nearest, row, out=nearest)
        torch.argmax(nearest, 1, out=samples[i])
    return samples.T.int()
