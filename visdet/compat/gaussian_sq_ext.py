"""The functions of ``local_aggregate_prob_sq._C`` (QuadricFormer)."""

from typing import Any

from torch import Tensor

from visdet import ops

from ._served import GradOutput, serves

__all__ = ["local_aggregate", "local_aggregate_backward"]


def local_aggregate(*arguments: Any) -> tuple[Any, ...]:
    """Return 0, the results of ``visdet.ops.local_aggregate_prob_sq``, and four tensors that the wrapper keeps."""
    _, _, means3D, means3D_int, *_, radii, _, _, _ = arguments
    empty = means3D.new_empty(0)
    return 0, *ops.local_aggregate_prob_sq(*arguments), empty, means3D_int, radii, empty


@serves(
    ops.local_aggregate_prob_sq,
    "local_aggregate_prob_sq._C.local_aggregate_backward",
    returns=("means3D", "opacities", "u", "v", "semantics", "rot3D", "scales3D"),
)
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
    scales3D: Tensor,
    rot3D: Tensor,
    opacities: Tensor,
    u: Tensor,
    v: Tensor,
    semantics: Tensor,
    logits: object,
    bin_logits: object,
    density: object,
    probability: object,
    grad_logits: GradOutput,
    grad_bin_logits: GradOutput,
    grad_density: GradOutput,
) -> Any: ...
