"""The functions of ``mmcv._ext`` for the focal losses."""

import torch
from torch import Tensor

from visdet import ops

from ._gradients import add_gradients, write

__all__ = [
    "sigmoid_focal_loss_backward",
    "sigmoid_focal_loss_forward",
    "softmax_focal_loss_backward",
    "softmax_focal_loss_forward",
]


def sigmoid_focal_loss_forward(
    input: Tensor, target: Tensor, weight: Tensor, output: Tensor, gamma: float, alpha: float
) -> None:
    loss = ops.sigmoid_focal_loss(input, target, gamma, alpha, _given(weight), "none")
    write("sigmoid_focal_loss_forward", "output", output, loss)


def sigmoid_focal_loss_backward(
    input: Tensor, target: Tensor, weight: Tensor, grad_input: Tensor, gamma: float, alpha: float
) -> None:
    def loss(input: Tensor) -> Tensor:
        return ops.sigmoid_focal_loss(input, target, gamma, alpha, _given(weight), "none")

    add_gradients("sigmoid_focal_loss_backward", loss, [input], torch.ones_like(input), [grad_input])


def softmax_focal_loss_forward(
    softmax: Tensor, target: Tensor, weight: Tensor, output: Tensor, gamma: float, alpha: float
) -> None:
    loss = ops.softmax_focal_loss(_logits(softmax), target, gamma, alpha, _given(weight), "none")
    write("softmax_focal_loss_forward", "output", output, loss)


def softmax_focal_loss_backward(
    softmax: Tensor,
    target: Tensor,
    weight: Tensor,
    buff: Tensor,
    grad_input: Tensor,
    gamma: float,
    alpha: float,
) -> None:
    def loss(logits: Tensor) -> Tensor:
        return ops.softmax_focal_loss(logits, target, gamma, alpha, _given(weight), "none")

    add_gradients(
        "softmax_focal_loss_backward", loss, [_logits(softmax)], torch.ones_like(buff), [grad_input]
    )


def _logits(softmax: Tensor) -> Tensor:
    """Return logits whose softmax is given, because the wrapper does not pass its own logits."""
    return softmax.clamp(min=torch.finfo(softmax.dtype).tiny).log()


def _given(tensor: Tensor) -> Tensor | None:
    """Return a tensor, or None if it is empty, because mmcv's wrappers pass an empty tensor for an absent one."""
    return tensor if tensor.numel() else None
