"""The functions of ``dvr``, the voxel renderer of RayIoU (SparseOcc), 4D-Occ and ViDAR.

``render_forward`` is that of RayIoU, which gives the first occupied voxel. That of 4D-Occ and ViDAR has the same name
and arguments, but gives two results, of which the first is that of ``render``.
"""

import torch
from torch import Tensor

from visdet import ops
from visdet.errors import check_choice

__all__ = ["init", "render", "render_forward"]


def init(points: Tensor, tindex: Tensor, grid: list[int]) -> Tensor:
    """Return the grids [B, T, D, H, W] with 1 in the voxels that hold a point [B, N, 3 or more], and 0 elsewhere."""
    T, D, H, W = grid
    occupancy = points.new_zeros(len(points), *grid)
    if T == 1:  # There is one time, whatever the index.
        tindex = tindex.clamp(max=0)
    places = torch.cat([points[..., :3].trunc(), tindex[..., None]], -1)
    is_inside = ((places >= 0) & (places < places.new_tensor([W, H, D, T]))).all(-1)
    image, _ = is_inside.nonzero(as_tuple=True)
    x, y, z, time = places[is_inside].long().unbind(1)
    occupancy[image, time, z, y, x] = 1
    return occupancy


def render_forward(
    sigma: Tensor, origin: Tensor, points: Tensor, tindex: Tensor, grid: object, phase_name: str
) -> list[Tensor]:
    """Return the distances [B, N] of the first occupied voxels and of the points, and those voxels [B, N, 3]."""
    check_choice("dvr.render_forward: phase_name", phase_name, ("test", "train"))
    given = sigma, origin, points[..., :3], tindex.long()
    distances, exits, voxels = ops.cast_rays(*given)
    lengths = _lengths(*given[1:])
    if phase_name == "train":
        lengths = lengths.fmin(exits)
    is_missed = voxels[..., 0] < 0
    return [distances, lengths.masked_fill(is_missed, -1).to(distances), voxels.clamp(min=0).to(distances)]


def render(sigma: Tensor, origin: Tensor, points: Tensor, tindex: Tensor, loss_name: str) -> list[Tensor]:
    """Return the expected distances [B, N], those of the points within the grid, and the loss's gradient of sigma."""
    check_choice("dvr.render: loss_name", loss_name, ("l1", "l2", "absrel", "bce"))
    rays = origin, points[..., :3], tindex.long()
    with torch.enable_grad():
        density = sigma.detach().double().requires_grad_()
        expected, exits = ops.render_rays(density, *rays)
    lengths = _lengths(*rays).fmin(exits)
    found = expected.detach()
    slope = torch.where(found >= lengths, 1.0, -1.0).double()
    if loss_name == "l2":
        slope = found - lengths
    elif loss_name == "absrel":
        slope = slope / lengths
    (gradient,) = torch.autograd.grad(expected, density, slope)
    return [found.float(), lengths.float(), gradient.to(sigma)]


def _lengths(origin: Tensor, points: Tensor, times: Tensor) -> Tensor:
    """Return the distances of points [B, N, 3] from their origins in float64."""
    start = origin.take_along_dim(times.clamp(0, origin.shape[1] - 1)[..., None], 1)
    return (points.double() - start).norm(dim=-1)
