"""Losses and gradients of training steps."""

from torch import Tensor, nn
from torch.testing import assert_close


def are_finite(losses: dict[str, Tensor]) -> bool:
    return all(loss.isfinite() for loss in losses.values())


def backward(losses: dict[str, Tensor]) -> None:
    """Compute the gradients of the sum of the losses, which must be finite."""
    assert are_finite(losses)
    sum(losses.values()).backward()


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients of the parameters that have one."""
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def assert_gradients_close(found: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    """Compare to 1e-4 of the largest gradient: some, as of biases before a norm, are rounding errors around zero."""
    largest = max(float(grad.abs().max()) for grad in expected.values() if grad is not None)
    for key, grad in expected.items():
        assert (grad is None) == (found[key] is None), key
        if grad is not None:
            assert_close(
                found[key], grad, rtol=1e-4, atol=1e-4 * largest, msg=lambda text, key=key: f"{key}: {text}"
            )


def without_gradient(model: nn.Module) -> set[str]:
    """Return the names of the parameters whose gradient is missing or not finite."""
    found = {name for name, gradient in gradients_of(model).items() if gradient.isfinite().all()}
    return {name for name, _ in model.named_parameters()} - found
