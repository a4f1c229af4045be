"""The functions of ``local_aggregate_prob._C`` and ``local_aggregate_prob_fast._C`` (GaussianFormer-2)."""

from typing import Any

from torch import Tensor

from visdet import ops

from ._served import GradOutput, serves
from .gaussian_ext import GRADIENTS, kept

__all__ = ["local_aggregate", "local_aggregate_backward"]


def local_aggregate(*arguments: Any) -> tuple[Any, ...]:
    """Return 0, the results of ``visdet.ops.local_aggregate_prob``, and four tensors that the wrapper keeps."""
    return 0, *ops.local_aggregate_prob(*arguments), arguments[0].new_empty(0), *kept(arguments)


@serves(ops.local_aggregate_prob, "local_aggregate_prob._C.local_aggregate_backward", returns=GRADIENTS)
def local_aggregate_backward(
    means3D_int: Tensor,
    radii: Tensor,
    image: object,
    H: int,
    W: int,
    D: int,
    count: object,
    means3D: Tensor,
    pts: Tensor,
    points_int: Tensor,
    cov3D: Tensor,
    opacities: Tensor,
    semantics: Tensor,
    logits: object,
    bin_logits: object,
    density: object,
    probability: object,
    grad_logits: GradOutput,
    grad_bin_logits: GradOutput,
    grad_density: GradOutput,
) -> Any: ...
