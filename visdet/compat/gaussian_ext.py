"""The functions of ``local_aggregate._C`` (GaussianFormer)."""

from typing import Any

from torch import Tensor

from visdet import ops

from ._entries import functions_of

__all__ = ["local_aggregate", "local_aggregate_backward"]

KEPT = "means3D_int radii image H W D count means3D pts points_int cov3D opacities semantics"
GRADIENTS = "means3D opacities semantics cov3D"


def kept(arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return three tensors that the wrapper keeps: the voxels and the reach of the Gaussians, and an empty one.

    The backward function is not given the first two otherwise.
    """
    return arguments[3], arguments[6], arguments[0].new_empty(0)


def local_aggregate(*arguments: Any) -> tuple[Any, ...]:
    """Return 0, the result of ``visdet.ops.local_aggregate``, and the tensors of ``kept``."""
    return 0, ops.local_aggregate(*arguments), *kept(arguments)


local_aggregate_backward = functions_of(
    "local_aggregate._C",
    {
        "local_aggregate_backward": (ops.local_aggregate, f"{KEPT} <grad_output -> {GRADIENTS}"),
    },
)["local_aggregate_backward"]
