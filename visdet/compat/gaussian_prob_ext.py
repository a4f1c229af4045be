"""The functions of ``local_aggregate_prob._C`` and ``local_aggregate_prob_fast._C`` (GaussianFormer-2)."""

from typing import Any

import torch
from torch import Tensor

from visdet.ops.mmcv.local_aggregate import local_aggregate_prob

from .gaussian_ext import gradients_of_gaussians, kept

__all__ = ["local_aggregate", "local_aggregate_backward"]


def local_aggregate(*arguments: Any) -> tuple[int, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return 0, the three results of ``visdet.ops.local_aggregate_prob``, and four tensors that the wrapper keeps."""
    results = local_aggregate_prob(*arguments)
    return 0, *results, arguments[0].new_empty(0), *kept(arguments)


def local_aggregate_backward(*arguments: Any) -> tuple[Tensor, ...]:
    """Return the gradients of the means, the opacities, the semantics and the inverse covariances.

    The arguments are those of ``gradients_of_gaussians``, four results of the forward call, and the gradients of the
    first three.
    """

    def aggregate(*given: Any) -> Tensor:
        return torch.cat([one.view(len(given[0]), -1) for one in local_aggregate_prob(*given)], 1)

    grads = [grad.view(len(grad), -1) for grad in arguments[17:]]
    return gradients_of_gaussians(aggregate, arguments[:13], torch.cat(grads, 1))
