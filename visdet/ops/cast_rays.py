"""Rays through grids of voxels: the first occupied voxel of each, and the distance that a density lets them go."""

import math
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _registration
from ._arguments import constant, is_index, numbers_to, widened
from ._declared import declared
from .tracing import recorded_as_one

__all__ = ["cast_rays", "cast_rays_reference", "render_rays", "render_rays_reference"]

_MAX_VOXELS = 1001  # of a ray, those before the grid included


@declared(
    occupancy="floating [B, T, D, H, W]",
    origins="real [B, S, 3]",
    points="real [B, N, 3]",
    times="integers [B, N]",
)
def cast_rays(
    occupancy: Tensor,  # [B, T, D, H, W]
    origins: Tensor,  # [B, S, 3]
    points: Tensor,  # [B, N, 3]
    times: Tensor,  # [B, N]
) -> tuple[Tensor, Tensor, Tensor]:  # [B, N], [B, N], [B, N, 3]
    """Return the distance of each ray's first occupied voxel, that at which the ray leaves the grid, and the voxel.

    Ray n goes from ``origins[b, times[b, n]]`` through ``points[b, n]``, and on until it has left the grid, from voxel
    to the neighbour whose border is nearest. The distance of a voxel is that from the origin to where the ray leaves
    it. A voxel is occupied above 0.5. A ray that meets none has the last voxel in the grid.

    Args:
        occupancy: [B, T, D, H, W]. The grids of each image, one or S. 16-bit types are computed in float32.
        origins: [B, S, 3]. Where rays begin, as (x, y, z) in voxels, whose borders are whole numbers. The ray's first
            voxel is the origin's whole part, rounded towards 0.
        points: [B, N, 3]. A point of each ray, in the same unit.
        times: [B, N]. The origin of each ray, and the grid if there are S.

    Returns:
        [B, N], [B, N] and int32 [B, N, 3]. The distances in voxels, and the voxel (x, y, z). All are -1 for a ray with
        a time outside 0..S - 1, and for one that does not reach the grid within 1001 voxels. The distances of a ray
        without a length, or with a NaN, are NaN if its first voxel is in the grid.

    It has no gradient, and is deterministic.

    Raises:
        RuntimeError: A device does not fit, or T is neither 1 nor S. The message names the argument.
        ValueError: A shape or type does not fit. The message names the argument.

    Source: The traversal of "A Fast Voxel Traversal Algorithm for Ray Tracing" (Amanatides, Woo) as in the
        differentiable voxel renderer (dvr) of "4D Occupancy Forecasting", which RayIoU of SparseOcc changes so.
    """
    given = constant(origins, occupancy), constant(points, occupancy), times.long()
    distances, exits, voxels = _cast_rays(constant(occupancy, occupancy), *given)
    return distances.to(occupancy), exits.to(occupancy), voxels


@declared(
    density="floating [B, T, D, H, W]",
    origins="real [B, S, 3]",
    points="real [B, N, 3]",
    times="integers [B, N]",
)
def render_rays(
    density: Tensor,  # [B, T, D, H, W]
    origins: Tensor,  # [B, S, 3]
    points: Tensor,  # [B, N, 3]
    times: Tensor,  # [B, N]
) -> tuple[Tensor, Tensor]:  # [B, N], [B, N]
    """Return the distance that each ray is expected to go, and that at which it leaves the grid.

    With ``e[i] = exp(-sum_(j <= i) density[j] * length[j])`` over the voxels j of the ray, as of ``cast_rays``, in
    which it has these lengths, the first is ``sum_i (e[i - 1] - e[i]) * distance[i] + e[last] * distance[last]``.

    Args:
        density: [B, T, D, H, W]. The density of each voxel per length. 16-bit types are computed in float32.
        origins: [B, S, 3]. As of ``cast_rays``.
        points: [B, N, 3]. As of ``cast_rays``, where a ray ends that has not reached the grid.
        times: [B, N]. As of ``cast_rays``.

    Returns:
        [B, N] each. The distances in voxels, or -1 as of ``cast_rays``. They are computed in float64.

    The first is differentiable with respect to ``density``. On CUDA, the gradient is a sum in any order, unless
    deterministic algorithms are asked for.

    Raises:
        RuntimeError: A device does not fit, or T is neither 1 nor S. The message names the argument.
        ValueError: A shape or type does not fit. The message names the argument.

    Source: The differentiable voxel renderer (dvr) of "4D Occupancy Forecasting" (Khurana et al.).
    """
    given = constant(origins, density), constant(points, density), times.long()
    expected, exits = _render_rays(widened(density, density), *given).to(density).unbind(-1)
    return expected, exits.detach()


def cast_rays_reference(
    occupancy: Tensor, origins: Tensor, points: Tensor, times: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what ``cast_rays`` returns, in plain torch: the definition kernels are tested against."""
    voxels, _, ends, last = _walk(occupancy, origins, points, times, False)
    steps = numbers_to(len(voxels), voxels)[:, None, None]
    is_hit = _values(occupancy, voxels, times) > 0.5
    first = torch.where(is_hit & (voxels >= 0), steps, last).amin(0, keepdim=True)
    distances, exits = ends.gather(0, first), ends.gather(0, last)
    is_missed = (voxels < 0).all(0)
    H, W = occupancy.shape[3:]
    voxel = voxels.gather(0, first)[0]
    place = torch.stack([voxel % max(W, 1), voxel // max(W, 1) % max(H, 1), voxel // max(H * W, 1)], -1)
    distances, exits = (one[0].masked_fill(is_missed, -1).to(occupancy) for one in (distances, exits))
    return distances, exits, place.masked_fill(is_missed[..., None], -1).int()


def render_rays_reference(density: Tensor, origins: Tensor, points: Tensor, times: Tensor) -> Tensor:
    """Return the results of ``render_rays`` as [B, N, 2], in plain torch: the definition kernels are tested against."""
    voxels, starts, ends, last = _walk(density, origins, points, times, True)
    is_inside = voxels >= 0
    lengths = torch.where(is_inside & (ends > starts), ends - starts, 0)
    terms = torch.where(is_inside, _values(density, voxels, times) * lengths, 0)
    depth = torch.stack(list(accumulate(terms)))  # torch.cumsum has no deterministic form on CUDA.
    left = torch.cat([torch.ones_like(depth[:1]), torch.exp(-depth)])
    exits = ends.gather(0, last)[0]
    expected = ((left[:-1] - left[1:]) * torch.where(is_inside, ends, 0)).sum(0) + left[-1] * exits
    return torch.stack([expected, exits], -1).masked_fill(~is_inside.any(0)[..., None], -1).to(density)


def _values(grid: Tensor, voxels: Tensor, times: Tensor) -> Tensor:
    """Return the numbers of voxels of the grids of rays in float64, and 0 for the voxel -1."""
    image = numbers_to(len(times), times)[:, None]
    _, num_times, *size = grid.shape
    place = (image * num_times + times * (num_times > 1)) * math.prod(size) + voxels
    values = torch.cat([grid.double().flatten(), grid.new_zeros(1, dtype=torch.float64)])
    return values[torch.where(voxels < 0, -1, place)]


def _walk(
    grid: Tensor, origins: Tensor, points: Tensor, times: Tensor, to_point: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # [K, B, N] each, and [1, B, N]
    """Return the voxel of each step, or -1 outside the grid, where the ray enters and leaves it, and the last step."""
    D, H, W = grid.shape[2:]
    S = origins.shape[1]
    is_walking = is_index(times, S)
    origins = F.pad(origins.double(), (0, 0, 0, 1))
    origin = origins.take_along_dim(torch.where(is_walking, times, S)[..., None], 1)
    path = points.double() - origin
    # torch.sqrt of the CPU may be off by a bit, which decides between borders that are equally near.
    length = torch.linalg.vector_norm(path.movedim(-1, 0).contiguous(), dim=0)
    along = path / length[..., None] + 0.0  # A negative zero would lead to a border at -inf.
    voxel = origin.nan_to_num(0.0).clamp(-1e9, 1e9).long()
    step = torch.where(along >= 0, 1, -1)
    never = torch.finfo(torch.float64).max  # along an axis that the ray does not follow
    border, pace = ((voxel + (along >= 0) - origin) / along).clamp(max=never), step / along
    start, steps = torch.zeros_like(length), []
    for _ in range(_MAX_VOXELS):
        x, y, z = voxel.unbind(-1)
        is_below, is_above = voxel < 0, torch.stack([x >= W, y >= H, z >= D], -1)
        is_inside = ~(is_below | is_above).any(-1)
        has_ended = torch.where(step > 0, is_above, is_below).any(
            -1
        )  # The ray will not enter the grid any more.
        if to_point:
            has_ended = has_ended | ((start > length) & ~is_inside)
        is_walking = is_walking & ~has_ended
        place = torch.where(is_walking & is_inside, (z * H + y) * W + x, -1)
        x, y, z = border.unbind(-1)
        nearest = torch.where(x < y, torch.where(x < z, 0, 2), torch.where(y < z, 1, 2))[..., None]
        end = border.gather(-1, nearest)[..., 0]
        steps.append((place, start, end))
        if is_walking.is_meta or not is_walking.any():
            break
        is_chosen = numbers_to(3, grid) == nearest
        border, voxel, start = torch.where(is_chosen, border + pace, border), voxel + step * is_chosen, end
    voxels, starts, ends = (torch.stack(each) for each in zip(*steps, strict=True))
    order = numbers_to(len(voxels), grid)[:, None, None]
    return voxels, starts, ends, torch.where(voxels >= 0, order, 0).amax(0, keepdim=True)


_cast_rays = _registration.without_gradient(
    "cast_rays",
    "occupancy [B, N], occupancy [B, N], points [B, N, 3] int32",
    cast_rays_reference,
    occupancy="[B, T, D, H, W]",
    points="[B, N, 3]",
)
_render_in_torch = recorded_as_one(
    render_rays_reference,
    "Tensor density, Tensor origins, Tensor points, Tensor times",
    leaves=1,
    fake=lambda density, origins, points, times: density.new_empty(*times.shape, 2),
)
_render_rays = _registration.differentiable(
    "render_rays",
    "density [B, N, 2]",
    layouts={"density": "[B, T, D, H, W]", "points": "[B, N, 3]"},
    reference=_render_in_torch,
    elsewhere=_render_in_torch,
    needs_library=False,
)
