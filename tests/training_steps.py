"""Losses and gradients of training steps."""

from torch import Tensor, nn


def are_finite(losses: dict[str, Tensor]) -> bool:
    return all(loss.isfinite() for loss in losses.values())


def backward(losses: dict[str, Tensor]) -> None:
    """Compute the gradients of the sum of the losses, which must be finite."""
    assert are_finite(losses)
    sum(losses.values()).backward()


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients of the parameters that have one."""
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def without_gradient(model: nn.Module) -> set[str]:
    """Return the names of the parameters whose gradient is missing or not finite."""
    found = {name for name, gradient in gradients_of(model).items() if gradient.isfinite().all()}
    return {name for name, _ in model.named_parameters()} - found
