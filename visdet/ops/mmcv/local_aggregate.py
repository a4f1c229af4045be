"""Semantics of points from Gaussians in their neighbourhood, for occupancy."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _registration
from .._arguments import check_that, constant, widened
from .._declared import declared
from ..gaussian_field import space_order

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
        points_int: [N, 3]. Their voxels, whole numbers below 2**24.
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

    It is differentiable once with respect to ``means3D``, ``opacities``, ``semantics`` and ``cov3D``, and
    deterministic, forward and backward.

    Raises:
        ValueError: A shape or type does not fit. The message names the argument.
        NotBuiltError: The library for the device is not built.

    Source: Paper "GaussianFormer" (Huang et al.).
    """
    (opacity,) = _of_each("local_aggregate", means3D, semantics, opacities=opacities)
    places = pts, points_int, means3D, means3D_int, radii
    values = opacity[:, None] * widened(semantics, semantics)
    sums = _sums("local_aggregate", places, _matrices(widened(cov3D, semantics)), values, (H, W, D))
    return sums[:, :-1].to(semantics)


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

    It is differentiable once with respect to ``means3D``, ``opacities``, ``semantics`` and ``cov3D``, and
    deterministic, forward and backward.

    Raises:
        ValueError: A shape or type does not fit. The message names the argument.
        NotBuiltError: The library for the device is not built.

    Source: Paper "GaussianFormer-2" (Huang et al.).
    """

    (opacity,) = _of_each("local_aggregate_prob", means3D, semantics, opacities=opacities)
    matrices = _matrices(widened(cov3D, semantics))
    xx, xy, xz, _, yy, yz, _, _, zz = matrices.unbind(1)
    volume = xx * yy * zz + 2 * xy * yz * xz - xx * yz * yz - yy * xz * xz - zz * xy * xy
    weights = opacity * volume.clamp(min=0).sqrt() / (2 * math.pi) ** 1.5
    places = pts, points_int, means3D, means3D_int, radii
    return _expectations("local_aggregate_prob", places, matrices, weights, semantics, (H, W, D))


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

    It is differentiable once with respect to all tensors of real numbers but ``pts`` and ``radii``, and deterministic,
    forward and backward. Within 1e-15 scales of a plane between two axes, the derivative across it is 0.

    Raises:
        ValueError: A shape or type does not fit. The message names the argument.
        NotBuiltError: The library for the device is not built.

    Source: Paper "QuadricFormer" (Zuo et al.).
    """
    op = "local_aggregate_prob_sq"
    weights, u, v = _of_each(op, means3D, semantics, opacities=opacities, u=u, v=v)
    axes = widened(rot3D, semantics).unflatten(1, (3, 3)) / widened(scales3D, semantics)[..., None]
    form = torch.cat([axes.flatten(1), u[:, None], v[:, None]], 1)
    places = pts, points_int, means3D, means3D_int, radii
    return _expectations(op, places, form, weights, semantics, (H, W, D))


_GROUP = 32  # the boxes of a group, as in csrc/local_aggregate.h
_Places = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # pts, points_int, means3D, means3D_int and radii


def _matrices(cov3D: Tensor) -> Tensor:  # [G, 6] -> [G, 9]
    xx, yy, zz, xy, yz, xz = cov3D.unbind(1)
    return torch.stack([xx, xy, xz, xy, yy, yz, xz, yz, zz], 1)


def _of_each(op: str, means3D: Tensor, beside: Tensor, **numbers: Tensor) -> list[Tensor]:
    """Return the numbers [G] of each Gaussian, which may be [G, 1]."""
    G = means3D.shape[0]
    for name, given in numbers.items():
        check_that(given.numel() == G, op, name, "be [{}]", given, G)
    return [widened(given.flatten(), beside) for given in numbers.values()]


def _expectations(
    op: str, places: _Places, form: Tensor, weights: Tensor, semantics: Tensor, shape: tuple[int, int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of ``local_aggregate_prob``."""
    C, pad = semantics.shape[1], F.pad
    # The sums of weighted semantics, of weights, of densities, and of the logarithms of what densities leave free.
    values = pad(weights[:, None] * pad(semantics.to(weights), (0, 1), value=1.0), (0, 1), value=1.0)
    summed, total, density, log_free = _sums(op, places, form, values, shape).split((C, 1, 1, 1), 1)
    unknown = torch.full_like(summed, 1 / max(C - 1, 1))
    unknown[:, -1:] = 0  # the class of free space
    is_seen = total > 1e-9
    expected = torch.where(is_seen, summed / torch.where(is_seen, total, 1), unknown)
    results = expected, -torch.expm1(log_free[:, 0]), density[:, 0]
    expected, occupied, density = (result.to(semantics) for result in results)
    return expected, occupied, density


def _sums(
    op: str, places: _Places, form: Tensor, values: Tensor, shape: tuple[int, int, int]
) -> Tensor:  # [N, C + 1]
    """Return the sums of the kernels. form: [G, 9] of Gaussians, or [G, 11] of superquadrics. values: [G, C]."""
    pts, points_int, means3D, means3D_int, radii = places
    G = means3D.shape[0]
    check_that(radii.shape in ((G,), (G, 3)), op, "radii", "be [{}]", radii, G)
    voxels, cells, reach = (constant(tensor, values) for tensor in (points_int, means3D_int, radii))
    reach = reach if reach.dim() == 2 else reach[:, None]
    # Boxes of Gaussians end where the grid does, so that points outside it are in none.
    ends = [end.clamp(min=1 - size) for end, size in zip((-cells - reach).unbind(1), shape, strict=True)]
    starts = (cells - reach).clamp(min=0)
    order, boxes = _in_groups(torch.cat([starts, torch.stack(ends, 1)], 1))
    point_order, point_boxes = _in_groups(torch.cat([voxels, -voxels], 1))
    gaussians = torch.cat([means3D.to(values), form, values], 1).index_select(0, order)
    points = constant(pts, values).index_select(0, point_order)
    sums = _local_aggregate(points, gaussians, point_boxes, boxes, form.shape[1] > 9)
    return torch.empty_like(sums).index_copy(0, point_order, sums)


def _in_groups(boxes: Tensor) -> tuple[Tensor, Tensor]:  # [M, 6] -> [M], [M / 32 + 1, 33, 6]
    """Return an order that brings neighbours together, and the boxes in groups, each behind the box around it."""
    boxes = boxes.nan_to_num(math.inf, math.inf, -math.inf)
    order = space_order(boxes[:, :3])
    padding = (0, 0, 0, _GROUP - boxes.shape[0] % _GROUP)
    groups = F.pad(boxes.index_select(0, order), padding, value=math.inf)
    groups = groups.view(-1, _GROUP, 6)
    return order, torch.cat([groups.amin(1, keepdim=True), groups], 1)


_local_aggregate = _registration.differentiable(
    "local_aggregate",
    lambda given: given.points.new_empty(
        given.points.shape[0], given.gaussians.shape[1] - (13 if given.superquadrics else 11)
    ),
)
