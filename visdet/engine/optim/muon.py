"""Muon: an optimizer that orthogonalises the momentum of matrices. Small models then learn in fewer iterations."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.optim import AdamW

from visdet.checks.arguments import Positive, Range
from visdet.registry import OPTIMIZERS

# The coefficients of Keller Jordan's quintic iteration, and the factor with which an orthogonal matrix of n columns has
# entries as large as AdamW's updates usually are.
_ITERATION = (3.4445, -4.7750, 2.0315)
_RMS_OF_ADAMW = 0.2


@OPTIMIZERS.register_module()
class MuonWithAuxAdam(AdamW):
    """Muon for the weights of linear layers, and AdamW for all other parameters.

    A matrix moves by the orthogonal matrix that is nearest to its momentum, so that all directions are learned at the
    same pace. Its update is scaled to the size of AdamW's. Therefore, learning rate and weight decay mean what they
    mean for AdamW, and one learning rate serves all parameters. Convolutions are left to AdamW, too.

    The orthogonal matrix is found by matrix products in float32. Matrices of equal shapes take them together, and
    AdamW's second moment is not kept for them.

    Args:
        params: parameters or groups, which may have a ``momentum``, ``ns_steps`` or ``min_size`` of their own.
        lr: the learning rate.
        momentum: the decay of the momentum of matrices, in [0, 1). The momentum is Nesterov's.
        ns_steps: the number of Newton-Schulz iterations, at least 1.
        min_size: matrices with fewer rows or columns are left to AdamW. Among them are layers that output few classes
            or a box.
        **adamw: other keywords of :class:`torch.optim.AdamW`, such as ``weight_decay``, ``betas`` and ``fused``.

    Raises:
        ValueError: an argument is not in its range.

    Source: K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024, with the scale of J. Liu
    et al., "Muon is Scalable for LLM Training", 2025. ``torch.optim.Muon`` computes the same in bfloat16, matrix by
    matrix, and takes no other parameters.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: Annotated[float, Range(0, 0.9999)] = 0.95,
        ns_steps: Positive = 5,
        min_size: Positive = 16,
        **adamw: Any,
    ) -> None:
        super().__init__(params, lr=lr, **adamw)
        # A GradScaler then looks for infinite gradients itself and skips the step. It would leave that to fused AdamW.
        self._step_supports_amp_scaling = False
        self.defaults.update(momentum=momentum, ns_steps=ns_steps, min_size=min_size)
        self._complete_groups()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._complete_groups()

    def _complete_groups(self) -> None:
        """Give every group the values of Muon, which AdamW and earlier checkpoints do not know."""
        for group in self.param_groups:
            for name in ("momentum", "ns_steps", "min_size"):
                group.setdefault(name, self.defaults[name])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have gradients, and return the loss of ``closure``, if it is given."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        gradients: dict[Tensor, Tensor] = {}
        try:
            for group in self.param_groups:
                of_shape: dict[Any, dict[Tensor, Tensor]] = defaultdict(dict)
                for parameter in group["params"]:
                    gradient = parameter.grad
                    if (
                        gradient is not None
                        and gradient.layout == torch.strided
                        and gradient.ndim == 2
                        and gradient.is_floating_point()
                        and min(gradient.shape) >= group["min_size"]
                    ):
                        gradients[parameter] = gradient
                        of_shape[parameter.shape, parameter.device, parameter.dtype][parameter] = gradient
                        parameter.grad = None  # so that AdamW passes it by
                for alike in of_shape.values():
                    self._update(alike, group)
            super().step()
        finally:
            for parameter, gradient in gradients.items():
                parameter.grad = gradient
        return loss

    def _update(self, gradients: dict[Tensor, Tensor], group: dict[str, Any]) -> None:
        """Update matrices of one shape by their gradients."""
        lr = group["lr"]
        decay = group["momentum"]
        directions = []
        for parameter, gradient in gradients.items():
            gradient = -gradient if group["maximize"] else gradient
            state = self.state[parameter]
            if "momentum_buffer" not in state:  # The state may be AdamW's.
                state.clear()
                # AdamW expects it in a state that it loads. A CUDA graph counts on the device.
                state["step"] = torch.zeros((), device=parameter.device if group["capturable"] else None)
                state["momentum_buffer"] = torch.zeros_like(parameter)
            state["step"] += 1
            momentum = state["momentum_buffer"].lerp_(gradient, 1 - decay)
            directions.append(gradient.lerp(momentum, decay))
        matrices = torch.stack(directions)
        _, *sizes = matrices.shape
        scale = lr * _RMS_OF_ADAMW * max(sizes) ** 0.5
        updates = orthogonalized(matrices, group["ns_steps"])
        on_device = isinstance(lr, Tensor)  # A number that the host does not know cannot be an ``alpha``.
        for parameter, update in zip(gradients, updates * scale if on_device else updates, strict=True):
            parameter.mul_(1 - lr * group["weight_decay"]).add_(update, alpha=-1 if on_device else -scale)


def orthogonalized(matrices: Tensor, steps: int) -> Tensor:
    """Return matrices with the singular vectors of the given ones and singular values of about 1.

    Args:
        matrices: (count, rows, columns). A matrix of zeros stays zeros.
        steps: the number of Newton-Schulz iterations.

    Returns:
        Tensor: (count, rows, columns), in the type of ``matrices``.
    """
    x = matrices.float()
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    _, rows, columns = x.shape
    wide = rows <= columns
    x = x if wide else x.mT
    a, b, c = _ITERATION
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x if wide else x.mT).to(matrices.dtype)
