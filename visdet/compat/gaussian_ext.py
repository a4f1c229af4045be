"""The functions of ``local_aggregate._C`` (GaussianFormer), computed by ``visdet.ops.mmcv.local_aggregate``."""

import torch
from torch import Tensor

from visdet.ops.mmcv.local_aggregate import local_aggregate as aggregate

from ._gradients import add_gradients

__all__ = ["local_aggregate", "local_aggregate_backward"]


def local_aggregate(
    pts: Tensor,
    points_int: Tensor,
    means3D: Tensor,
    means3D_int: Tensor,
    opacity: Tensor,
    semantics: Tensor,
    radii: Tensor,
    cov3D: Tensor,
    H: int,
    W: int,
    D: int,
) -> tuple[int, Tensor, Tensor, Tensor, Tensor]:
    """Return 0, the semantics, and three tensors that the wrapper keeps for the backward function.

    They hold the voxels and the reach of the Gaussians, which that function is not given otherwise.
    """
    arguments = pts, points_int, means3D, means3D_int, opacity, semantics, radii, cov3D, H, W, D
    return 0, aggregate(*arguments), means3D_int, radii, pts.new_empty(0)


def local_aggregate_backward(
    geomBuffer: Tensor,
    binningBuffer: Tensor,
    imageBuffer: Tensor,
    H: int,
    W: int,
    D: int,
    R: int,
    means3D: Tensor,
    pts: Tensor,
    points_int: Tensor,
    cov3D: Tensor,
    opacities: Tensor,
    semantics: Tensor,
    out_grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of the means, the opacities, the semantics and the inverse covariances."""

    def sum_around(means: Tensor, opacities: Tensor, semantics: Tensor, cov: Tensor) -> Tensor:
        first = pts, points_int, means, geomBuffer
        return aggregate(*first, opacities, semantics, binningBuffer, cov, H, W, D)

    inputs = [means3D, opacities, semantics, cov3D]
    grads = [torch.zeros_like(tensor) for tensor in inputs]
    add_gradients("local_aggregate._C.local_aggregate_backward", sum_around, inputs, out_grad, list(grads))
    return grads[0], grads[1], grads[2], grads[3]
