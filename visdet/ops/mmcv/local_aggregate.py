"""Semantics of points from Gaussians in their neighbourhood, for occupancy."""

import torch
from torch import Tensor

from .._arguments import check_layout, computation_dtype
from ..point_neighbours import row_ranges

__all__ = ["local_aggregate"]


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
        ValueError: A shape does not fit. The message names the argument.

    Source: Paper "GaussianFormer" (Huang et al.).
    """
    G, N = len(means3D), len(pts)
    check_layout("local_aggregate", "pts", pts, "[N, 3]", None, 3)
    check_layout("local_aggregate", "points_int", points_int, f"[{N}, 3]", N, 3)
    check_layout("local_aggregate", "means3D", means3D, "[G, 3]", None, 3)
    check_layout("local_aggregate", "means3D_int", means3D_int, f"[{G}, 3]", G, 3)
    check_layout("local_aggregate", "semantics", semantics, f"[{G}, C]", G, None)
    check_layout("local_aggregate", "cov3D", cov3D, f"[{G}, 6]", G, 6)
    if opacities.numel() != G or radii.shape not in ((G,), (G, 3)):
        name, given = ("opacities", opacities) if opacities.numel() != G else ("radii", radii)
        raise ValueError(f"local_aggregate: {name} must be [{G}], got {list(given.shape)}")
    reach = (radii if radii.dim() == 2 else radii[:, None]).expand(G, 3)
    dtype = computation_dtype(semantics)
    shape = points_int.new_tensor([H, W, D])
    is_inside = ((points_int >= 0) & (points_int < shape)).all(1)
    parts = [semantics.new_zeros(0, semantics.shape[1], dtype=dtype)]
    for rows in row_ranges(N, G):
        is_near = is_inside[rows, None].expand(-1, G)
        for voxel, mean, most in zip(points_int[rows].T, means3D_int.T, reach.T, strict=True):
            is_near = is_near & ((voxel[:, None] - mean).abs() <= most)
        point, gaussian = is_near.nonzero(as_tuple=True)
        x, y, z = (means3D[gaussian] - pts[rows][point]).to(dtype).unbind(1)
        xx, yy, zz, xy, yz, xz = cov3D[gaussian].to(dtype).unbind(1)
        power = -0.5 * (xx * x * x + yy * y * y + zz * z * z) - xy * x * y - yz * y * z - xz * x * z
        weight = opacities.flatten()[gaussian].to(dtype) * power.exp()
        summed = semantics.new_zeros(rows.stop - rows.start, semantics.shape[1], dtype=dtype)
        parts.append(summed.index_add(0, point, weight[:, None] * semantics[gaussian].to(dtype)))
    return torch.cat(parts).to(semantics.dtype)
