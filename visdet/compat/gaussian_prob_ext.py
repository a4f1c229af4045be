"""The functions of ``local_aggregate_prob._C`` and ``local_aggregate_prob_fast._C`` (GaussianFormer-2)."""

import torch
from torch import Tensor

from visdet.ops.mmcv.local_aggregate import local_aggregate_prob

from ._gradients import add_gradients

__all__ = ["local_aggregate", "local_aggregate_backward"]


def local_aggregate(
    pts: Tensor,
    points_int: Tensor,
    means3D: Tensor,
    means3D_int: Tensor,
    opas: Tensor,
    semantics: Tensor,
    radii: Tensor,
    cov3D: Tensor,
    H: int,
    W: int,
    D: int,
) -> tuple[int, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return 0, the three results, and four tensors that the wrapper keeps for the backward function.

    They hold the voxels and the reach of the Gaussians, which that function is not given otherwise.
    """
    results = local_aggregate_prob(
        pts, points_int, means3D, means3D_int, opas, semantics, radii, cov3D, H, W, D
    )
    empty = pts.new_empty(0)
    return 0, *results, empty, means3D_int, radii, empty


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
    opas: Tensor,
    semantics: Tensor,
    logits: Tensor,
    bin_logits: Tensor,
    density: Tensor,
    probability: Tensor,
    logits_grad: Tensor,
    bin_logits_grad: Tensor,
    density_grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of the means, the opacities, the semantics and the inverse covariances."""

    def aggregate(means: Tensor, opacities: Tensor, semantics: Tensor, cov: Tensor) -> Tensor:
        first = pts, points_int, means, geomBuffer
        results = local_aggregate_prob(*first, opacities, semantics, binningBuffer, cov, H, W, D)
        return torch.cat([one.view(len(pts), -1) for one in results], 1)

    inputs = [means3D, opas, semantics, cov3D]
    grads = [torch.zeros_like(tensor) for tensor in inputs]
    given = torch.cat([logits_grad, bin_logits_grad[:, None], density_grad[:, None]], 1)
    add_gradients("local_aggregate_backward", aggregate, inputs, given, list(grads))
    return grads[0], grads[1], grads[2], grads[3]
