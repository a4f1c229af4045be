"""Key points of 3-D boxes, which are given in sizes of the box and are rotated and moved with it."""

import torch
from torch import Tensor

from . import _registration
from ._declared import declared

__all__ = ["box_key_points", "box_key_points_reference"]


@declared(
    anchors="floating [B, Q, D]",
    fixed="real [F, 3]",
    logits="None or real [B, Q, 3 * M]",
    max_log_size="number",
)
def box_key_points(
    anchors: Tensor,  # [B, Q, D]
    fixed: Tensor,  # [F, 3]
    logits: Tensor | None = None,  # [B, Q, M * 3]
    max_log_size: float = 10.0,
) -> Tensor:  # [B, Q, F + M, 3]
    """Return points of each box: fixed points, and points within half a size of the centre that logits choose.

    An anchor is x, y, z, the logarithms of the box's sizes along its own three axes, and sin and cos of its yaw, which
    are used as they are, not normalised. The rest of D is not read. A point is given in sizes from the centre: it is a
    row of ``fixed``, or ``sigmoid(logit) - 0.5`` of three neighbouring logits. It is multiplied by the sizes, rotated
    about z, and added to the centre.

    Args:
        anchors: [B, Q, D]. The boxes in metres, float32 or float64, with D at least 8.
        fixed: [F, 3]. The fixed points, which may be any numbers. They are converted to the type of ``anchors``.
        logits: [B, Q, M * 3]. The logits of M further points, or None if there are none. They are converted likewise.
        max_log_size: The logarithm at which sizes are clamped. Beyond it their gradient is zero.

    Returns:
        [B, Q, F + M, 3]. The points in metres, the fixed ones first. NaN and infinity go where the formula takes them.

    It is differentiable with respect to ``anchors`` and ``logits``, on CUDA once, and to ``fixed``. It is
    deterministic, forward and backward, on every device. On the CPU, with a gradient of ``fixed``, and where no library
    is built for CUDA, plain torch computes it.

    Raises:
        RuntimeError: A device does not fit. The message names the argument.
        ValueError: A shape or type does not fit. The message names the argument.

    Source: The key points of Sparse4D, arXiv 2211.10581, with the anchors of SparseDrive, arXiv 2405.19620.
    """
    shape = anchors.shape
    if shape[2] < 8 or anchors.dtype not in (torch.float64, torch.float32):
        raise ValueError(
            "box_key_points: anchors must be float64 or float32 [B, Q, D] with D of at least 8, got "
            f"{anchors.dtype} {list(shape)}"
        )
    if logits is None:
        logits = anchors.new_empty(*shape[:2], 0)
    fixed, logits = fixed.to(anchors), logits.to(anchors)
    is_plain = anchors.is_cpu or (fixed.requires_grad and torch.is_grad_enabled())
    compute = box_key_points_reference if is_plain else _box_key_points
    return compute(anchors, fixed, logits, max_log_size)


def box_key_points_reference(
    anchors: Tensor,  # [B, Q, D]
    fixed: Tensor,  # [F, 3]
    logits: Tensor | None = None,  # [B, Q, M * 3]
    max_log_size: float = 10.0,
) -> Tensor:  # [B, Q, F + M, 3]
    """Return what ``box_key_points`` returns, in plain torch: the definition kernels are tested against."""
    centre, log_size, heading = anchors[..., None, :8].split((3, 3, 2), -1)  # [B, Q, 1, ...]
    points = fixed.to(anchors).expand(*anchors.shape[:2], -1, -1)
    if logits is not None:
        points = torch.cat([points, logits.to(anchors).unflatten(-1, (-1, 3)).sigmoid() - 0.5], -2)
    x, y, z = (points * log_size.clamp(max=max_log_size).exp()).unbind(-1)  # [B, Q, P]
    sin, cos = heading.unbind(-1)
    return torch.stack([cos * x - sin * y, sin * x + cos * y, z], -1) + centre


_box_key_points = _registration.differentiable(
    "box_key_points",
    lambda given: given.anchors.new_empty(
        *given.anchors.shape[:2], given.fixed.shape[0] + given.logits.shape[2] // 3, 3
    ),
    layouts={"anchors": "[B, Q, D]", "logits": "[B, Q, M * 3]"},
    elsewhere=box_key_points_reference,
    needs_library=False,
)
