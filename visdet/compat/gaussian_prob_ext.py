"""The functions of ``local_aggregate_prob._C`` and ``local_aggregate_prob_fast._C`` (GaussianFormer-2)."""

from typing import Any

from visdet import ops

from ._entries import functions_of
from .gaussian_ext import GRADIENTS, KEPT, kept

__all__ = ["local_aggregate", "local_aggregate_backward"]


def local_aggregate(*arguments: Any) -> tuple[Any, ...]:
    """Return 0, the results of ``visdet.ops.local_aggregate_prob``, and four tensors that the wrapper keeps."""
    return 0, *ops.local_aggregate_prob(*arguments), arguments[0].new_empty(0), *kept(arguments)


local_aggregate_backward = functions_of(
    "local_aggregate_prob._C",
    {
        "local_aggregate_backward": (
            ops.local_aggregate_prob,
            f"{KEPT} logits bin_logits density probability <grad_logits <grad_bin_logits <grad_density -> {GRADIENTS}",
        )
    },
)["local_aggregate_backward"]
