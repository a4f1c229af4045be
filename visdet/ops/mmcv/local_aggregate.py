"""Semantics of points from Gaussians in their neighbourhood, for occupancy."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from .._arguments import computation_dtype
from .._declared import declared
from ..point_neighbours import row_ranges

__all__ = ["local_aggregate", "local_aggregate_prob"]


@declared(
    pts="real [N, 3]",
    points_int="real [N, 3]",
    means3D="real [G, 3]",
    means3D_int="real [G, 3]",
    opacities="real",
    semantics="floating [G, C]",
    radii="real",
    cov3D="real [G, 6]",
    H="integer",
    W="integer",
    D="integer",
)
def local_aggregate(
    pts: Tensor,  # [N, 3]
    points_int: Tensor,  # [N, 3]
    means3D: Tensor,  # [G, 3]
    means3D_int: Tensor,  # [G, 3]
    opacities: Tensor,  # [G]
    semantics: Tensor,  # [G, C]
    radii: Tensor,  # [G]
    cov3D: Tensor,  # [G, 6]
    H: int,
    W: int,
    D: int,
) -> Tensor:  # [N, C]
    """Return the semantics of the Gaussians around each point, weighted by opacity and density at the point.

    ``out[n] = sum over g of opacities[g] * exp(-0.5 * d' P d) * semantics[g]`` with ``d`` from the point to the mean of
    g, and P its inverse covariance, over the Gaussians whose voxel is at most ``radii[g]`` voxels from the point's in
    every direction.

    Args:
        pts: [N, 3]. The points (x, y, z).
        points_int: [N, 3]. Their voxels.
        means3D: [G, 3]. The means of the Gaussians.
        means3D_int: [G, 3]. Their voxels.
        opacities: [G]. Their opacities, or [G, 1].
        semantics: [G, C]. Their semantics.
        radii: [G]. Their reach in voxels, or [G, 3] in each direction.
        cov3D: [G, 6]. The entries xx, yy, zz, xy, yz and xz of their inverse covariances.
        H: The number of voxels in x. A point outside the grid has 0.
        W: The number of voxels in y.
        D: The number of voxels in z.

    Returns:
        [N, C]. The sums. 16-bit types are computed in float32.

    It is differentiable with respect to ``means3D``, ``opacities``, ``semantics`` and ``cov3D``.

    Raises:
        ValueError: A shape or type does not fit. The message names the argument.

    Source: Paper "GaussianFormer" (Huang et al.).
    """
    gaussians = means3D, means3D_int, opacities, semantics, radii, cov3D
    pairs = _near_pairs("local_aggregate", pts, points_int, gaussians, (H, W, D))
    parts = [
        _sum_by_point(point, rows, (opacity * density)[:, None] * values)
        for rows, point, density, opacity, values, _ in pairs
    ]
    return torch.cat(parts).to(semantics.dtype)


@declared(
    pts="real [N, 3]",
    points_int="real [N, 3]",
    means3D="real [G, 3]",
    means3D_int="real [G, 3]",
    opacities="real",
    semantics="floating [G, C]",
    radii="real",
    cov3D="real [G, 6]",
    H="integer",
    W="integer",
    D="integer",
)
def local_aggregate_prob(
    pts: Tensor,  # [N, 3]
    points_int: Tensor,  # [N, 3]
    means3D: Tensor,  # [G, 3]
    means3D_int: Tensor,  # [G, 3]
    opacities: Tensor,  # [G]
    semantics: Tensor,  # [G, C]
    radii: Tensor,  # [G]
    cov3D: Tensor,  # [G, 6]
    H: int,
    W: int,
    D: int,
) -> tuple[Tensor, Tensor, Tensor]:  # [N, C], [N], [N]
    """Return the semantics expected at each point, the probability that it is occupied, and its density.

    With the Gaussians around a point as of ``local_aggregate``, and ``e[g] = exp(-0.5 * d' P d)``, the semantics are
    the mean of ``semantics[g]`` weighted by ``opacities[g] * sqrt(det P) / (2 pi)^1.5 * e[g]``. The probability is 1
    less the product of ``1 - e[g]``, and the density is the sum of ``e[g]``.

    Args:
        pts: [N, 3]. As of ``local_aggregate``.
        points_int: [N, 3]. As of ``local_aggregate``.
        means3D: [G, 3]. As of ``local_aggregate``.
        means3D_int: [G, 3]. As of ``local_aggregate``.
        opacities: [G]. The prior weights of the Gaussians, or [G, 1].
        semantics: [G, C]. As of ``local_aggregate``.
        radii: [G]. As of ``local_aggregate``.
        cov3D: [G, 6]. As of ``local_aggregate``.
        H: As of ``local_aggregate``.
        W: As of ``local_aggregate``.
        D: As of ``local_aggregate``.

    Returns:
        [N, C], [N] and [N]. Where the weights add up to 1e-9 or less, the semantics are ``1 / (C - 1)`` each, without a
        gradient. 16-bit types are computed in float32.

    It is differentiable with respect to ``means3D``, ``opacities``, ``semantics`` and ``cov3D``.

    Raises:
        ValueError: A shape or type does not fit. The message names the argument.

    Source: Paper "GaussianFormer-2" (Huang et al.).
    """
    C, parts = semantics.shape[1], []
    gaussians = means3D, means3D_int, opacities, semantics, radii, cov3D
    pairs = _near_pairs("local_aggregate_prob", pts, points_int, gaussians, (H, W, D))
    for rows, point, density, opacity, values, (xx, yy, zz, xy, yz, xz) in pairs:
        volume = xx * yy * zz + 2 * xy * yz * xz - xx * yz * yz - yy * xz * xz - zz * xy * xy
        weight = opacity * volume.clamp(min=0).sqrt() * density / (2 * math.pi) ** 1.5
        total = _sum_by_point(point, rows, weight)
        summed = _sum_by_point(point, rows, weight[:, None] * values)
        is_seen = (total > 1e-9)[:, None]
        expected = torch.where(is_seen, summed / torch.where(is_seen, total[:, None], 1), 1 / max(C - 1, 1))
        # A product by point has no forward derivative in torch, but a sum of logarithms has.
        log_free = _sum_by_point(point, rows, (1 - density).clamp(min=1e-30).log())
        occupied = -torch.expm1(log_free)
        parts.append((expected, occupied, _sum_by_point(point, rows, density)))
    expected, occupied, density = (torch.cat(part).to(semantics.dtype) for part in zip(*parts, strict=True))
    return expected, occupied, density


def _sum_by_point(point: Tensor, rows: slice, values: Tensor) -> Tensor:
    return values.new_zeros(rows.stop - rows.start, *values.shape[1:]).index_add(0, point, values)


def _near_pairs(
    op: str, pts: Tensor, points_int: Tensor, gaussians: tuple[Tensor, ...], shape: tuple[int, int, int]
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor, Tensor, tuple[Tensor, ...]]]:
    """Yield ranges of points and, of each pair, the point, ``exp(-0.5 * d' P d)``, and the Gaussian's other numbers:
    the opacity, the semantics, and the six of P."""
    means3D, means3D_int, opacities, semantics, radii, cov3D = gaussians
    G, N = len(means3D), len(pts)
    if opacities.numel() != G or radii.shape not in ((G,), (G, 3)):
        name, given = ("opacities", opacities) if opacities.numel() != G else ("radii", radii)
        raise ValueError(f"{op}: {name} must be [{G}], got {list(given.shape)}")
    reach = (radii if radii.dim() == 2 else radii[:, None]).expand(G, 3)
    dtype = computation_dtype(semantics)
    is_inside = ((points_int >= 0) & (points_int < points_int.new_tensor(shape))).all(1)
    # The gradient of a Gaussian is a sum over points, which needs float32.
    centers, opacity, values, precision = (
        tensor.to(dtype) for tensor in (means3D, opacities.flatten(), semantics, cov3D)
    )
    for rows in row_ranges(N, G):
        is_near = is_inside[rows, None].expand(-1, G)
        for voxel, mean, most in zip(points_int[rows].T, means3D_int.T, reach.T, strict=True):
            is_near = is_near & ((voxel[:, None] - mean).abs() <= most)
        point, gaussian = is_near.nonzero(as_tuple=True)
        x, y, z = (centers[gaussian] - pts[rows].to(dtype)[point]).unbind(1)
        xx, yy, zz, xy, yz, xz = entries = precision[gaussian].unbind(1)
        power = -0.5 * (xx * x * x + yy * y * y + zz * z * z) - xy * x * y - yz * y * z - xz * x * z
        yield rows, point, power.exp(), opacity[gaussian], values[gaussian], entries
