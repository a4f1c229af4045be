"""Semantics of points from Gaussians in their neighbourhood, for occupancy."""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .._arguments import computation_dtype
from .._declared import declared
from ..point_neighbours import row_ranges

__all__ = ["local_aggregate", "local_aggregate_prob", "local_aggregate_prob_sq"]


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
    gaussians = means3D, means3D_int, opacities, semantics, radii
    pairs = _near_pairs("local_aggregate", pts, points_int, gaussians, (cov3D,), (H, W, D))
    parts = [
        _sum_by_point(point, rows, (opacity * _normal(apart, *form))[:, None] * values)
        for rows, point, apart, opacity, values, form in pairs
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
        [N, C], [N] and [N]. Where the weights add up to 1e-9 or less, the semantics are ``1 / (C - 1)`` each but the
        last one, which is 0, without a gradient. 16-bit types are computed in float32.

    It is differentiable with respect to ``means3D``, ``opacities``, ``semantics`` and ``cov3D``.

    Raises:
        ValueError: A shape or type does not fit. The message names the argument.

    Source: Paper "GaussianFormer-2" (Huang et al.).
    """

    def weigh(apart: Tensor, cov3D: Tensor) -> tuple[Tensor, Tensor]:
        density, (xx, yy, zz, xy, yz, xz) = _normal(apart, cov3D), cov3D.unbind(1)
        volume = xx * yy * zz + 2 * xy * yz * xz - xx * yz * yz - yy * xz * xz - zz * xy * xy
        return density, volume.clamp(min=0).sqrt() * density / (2 * math.pi) ** 1.5

    gaussians = means3D, means3D_int, opacities, semantics, radii
    pairs = _near_pairs("local_aggregate_prob", pts, points_int, gaussians, (cov3D,), (H, W, D))
    return _expectations(pairs, weigh, semantics)


@declared(
    pts="real [N, 3]",
    points_int="real [N, 3]",
    means3D="real [G, 3]",
    means3D_int="real [G, 3]",
    opacities="real",
    u="real",
    v="real",
    semantics="floating [G, C]",
    scales3D="real [G, 3]",
    rot3D="real [G, 9]",
    radii="real",
    H="integer",
    W="integer",
    D="integer",
)
def local_aggregate_prob_sq(
    pts: Tensor,  # [N, 3]
    points_int: Tensor,  # [N, 3]
    means3D: Tensor,  # [G, 3]
    means3D_int: Tensor,  # [G, 3]
    opacities: Tensor,  # [G]
    u: Tensor,  # [G]
    v: Tensor,  # [G]
    semantics: Tensor,  # [G, C]
    scales3D: Tensor,  # [G, 3]
    rot3D: Tensor,  # [G, 9]
    radii: Tensor,  # [G]
    H: int,
    W: int,
    D: int,
) -> tuple[Tensor, Tensor, Tensor]:  # [N, C], [N], [N]
    """Return what ``local_aggregate_prob`` returns, of superquadrics, without the weights' factor of the volume.

    With ``(x, y, z)``, the point turned into the axes of superquadric g and divided by its scales, ``e[g] = exp(-0.5 *
    ((|x|^(2 / u) + |y|^(2 / u))^(u / v) + |z|^(2 / v)))``, and the weight is ``opacities[g] * e[g]``.

    Args:
        pts: [N, 3]. As of ``local_aggregate``.
        points_int: [N, 3]. As of ``local_aggregate``.
        means3D: [G, 3]. The centres of the superquadrics.
        means3D_int: [G, 3]. Their voxels.
        opacities: [G]. Their prior weights, or [G, 1].
        u: [G]. Their exponents across the third axis, above 0, or [G, 1].
        v: [G]. Their exponents along it, above 0, or [G, 1].
        semantics: [G, C]. As of ``local_aggregate``.
        scales3D: [G, 3]. Their scales along their own axes.
        rot3D: [G, 9]. The rows of the matrices that turn a vector into these axes.
        radii: [G]. As of ``local_aggregate``.
        H: As of ``local_aggregate``.
        W: As of ``local_aggregate``.
        D: As of ``local_aggregate``.

    Returns:
        [N, C], [N] and [N]. As of ``local_aggregate_prob``.

    It is differentiable with respect to all tensors of real numbers but ``pts`` and ``radii``. Within 1e-15 scales of
    a plane between two axes, the derivative across it is 0.

    Raises:
        ValueError: A shape or type does not fit. The message names the argument.

    Source: Paper "QuadricFormer" (Zuo et al.).
    """

    def weigh(apart: Tensor, u: Tensor, v: Tensor, scales: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor]:
        within = (rotation.unflatten(1, (3, 3)) @ -apart[..., None])[..., 0] / scales
        x, y, z = within.square().clamp(min=1e-30).log().unbind(1)
        # Sums of powers by their logarithms neither overflow nor vanish, which would make gradients NaN.
        across = torch.logaddexp(x / u, y / u) * (u / v)
        density = torch.exp(-0.5 * (across.exp() + (z / v).exp()))
        return density, density

    superquadrics = means3D, means3D_int, opacities, semantics, radii
    form = _of_each("local_aggregate_prob_sq", means3D, u=u, v=v)
    pairs = _near_pairs(
        "local_aggregate_prob_sq",
        pts,
        points_int,
        superquadrics,
        (*form, scales3D, rot3D),
        (H, W, D),
    )
    return _expectations(pairs, weigh, semantics)


_Pairs = Iterator[tuple[slice, Tensor, Tensor, Tensor, Tensor, list[Tensor]]]


def _normal(apart: Tensor, cov3D: Tensor) -> Tensor:
    """Return ``exp(-0.5 * d' P d)`` of differences d [K, 3] and the six entries [K, 6] of P."""
    x, y, z = apart.unbind(1)
    xx, yy, zz, xy, yz, xz = cov3D.unbind(1)
    return torch.exp(-0.5 * (xx * x * x + yy * y * y + zz * z * z) - xy * x * y - yz * y * z - xz * x * z)


def _expectations(
    pairs: _Pairs, weigh: Callable[..., tuple[Tensor, Tensor]], semantics: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of ``local_aggregate_prob``. ``weigh`` gives densities, and weights without the opacity."""
    C, parts = semantics.shape[1], []
    for rows, point, apart, opacity, values, form in pairs:
        density, weight = weigh(apart, *form)
        weight = opacity * weight
        total = _sum_by_point(point, rows, weight)
        summed = _sum_by_point(point, rows, weight[:, None] * values)
        unknown = values.new_full((C,), 1 / max(C - 1, 1))
        unknown[-1:] = 0  # the class of free space
        is_seen = (total > 1e-9)[:, None]
        expected = torch.where(is_seen, summed / torch.where(is_seen, total[:, None], 1), unknown)
        # A product by point has no forward derivative in torch, but a sum of logarithms has.
        log_free = _sum_by_point(point, rows, (1 - density).clamp(min=1e-30).log())
        occupied = -torch.expm1(log_free)
        parts.append((expected, occupied, _sum_by_point(point, rows, density)))
    expected, occupied, density = (torch.cat(part).to(semantics.dtype) for part in zip(*parts, strict=True))
    return expected, occupied, density


def _sum_by_point(point: Tensor, rows: slice, values: Tensor) -> Tensor:
    return values.new_zeros(rows.stop - rows.start, *values.shape[1:]).index_add(0, point, values)


def _of_each(op: str, means3D: Tensor, **numbers: Tensor) -> list[Tensor]:
    """Return the numbers [G] of each Gaussian, which may be [G, 1]."""
    G = len(means3D)
    for name, given in numbers.items():
        if given.numel() != G:
            raise ValueError(f"{op}: {name} must be [{G}], got {list(given.shape)}")
    return [given.flatten() for given in numbers.values()]


def _near_pairs(
    op: str,
    pts: Tensor,
    points_int: Tensor,
    gaussians: tuple[Tensor, ...],
    form: tuple[Tensor, ...],
    shape: tuple[int, int, int],
) -> _Pairs:
    """Yield ranges of points and, of each pair, the point, the mean less it, and the Gaussian's other numbers: the
    opacity, the semantics, and those of its form."""
    means3D, means3D_int, opacities, semantics, radii = gaussians
    G, N = len(means3D), len(pts)
    of_each = _of_each(op, means3D, opacities=opacities)
    if radii.shape not in ((G,), (G, 3)):
        raise ValueError(f"{op}: radii must be [{G}], got {list(radii.shape)}")
    reach = (radii if radii.dim() == 2 else radii[:, None]).expand(G, 3)
    dtype = computation_dtype(semantics)
    is_inside = ((points_int >= 0) & (points_int < points_int.new_tensor(shape))).all(1)
    # The gradient of a Gaussian is a sum over points, which needs float32.
    centers, opacity, values, *numbers = (
        tensor.to(dtype) for tensor in (means3D, *of_each, semantics, *form)
    )
    for rows in row_ranges(N, G):
        is_near = is_inside[rows, None].expand(-1, G)
        for voxel, mean, most in zip(points_int[rows].T, means3D_int.T, reach.T, strict=True):
            is_near = is_near & ((voxel[:, None] - mean).abs() <= most)
        point, gaussian = is_near.nonzero(as_tuple=True)
        apart = centers[gaussian] - pts[rows].to(dtype)[point]
        form_of_pair = [tensor[gaussian] for tensor in numbers]
        yield rows, point, apart, opacity[gaussian], values[gaussian], form_of_pair
