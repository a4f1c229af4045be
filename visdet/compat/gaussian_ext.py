"""The functions of ``local_aggregate._C`` (GaussianFormer)."""

from typing import Any

from torch import Tensor

from visdet import ops

from ._served import GradOutput, serves

__all__ = ["local_aggregate", "local_aggregate_backward"]

GRADIENTS = ("means3D", "opacities", "semantics", "cov3D")


def kept(arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return three tensors that the wrapper keeps: the voxels and the reach of the Gaussians, and an empty one.

    The backward function is not given the first two otherwise.
    """
    return arguments[3], arguments[6], arguments[0].new_empty(0)


def local_aggregate(*arguments: Any) -> tuple[Any, ...]:
    """Return 0, the result of ``visdet.ops.local_aggregate``, and the tensors of ``kept``."""
    return 0, ops.local_aggregate(*arguments), *kept(arguments)


@serves(ops.local_aggregate, "local_aggregate._C.local_aggregate_backward", returns=GRADIENTS)
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
    grad_output: GradOutput,
) -> Any: ...
