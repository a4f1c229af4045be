"""Averages of the weights."""

import mmengine.model
import torch
from torch import Tensor, nn

from visdet.registry import MODELS


@MODELS.register_module()
class ExponentialMovingAverage(mmengine.model.ExponentialMovingAverage):
    """mmengine's average of the weights, which a few kernels update, and not one for each tensor.

    A tensor that has several names, as branches that all layers share, is averaged once. With ``update_buffers``,
    mmengine averages it once for each name, and so faster than the others.

    Args:
        model, momentum, interval, device, update_buffers: as in mmengine.
    """

    def update_parameters(self, model: nn.Module) -> None:
        """Bring the averages one step forward.

        Args:
            model: the model whose weights are averaged.
        """
        weights = model.state_dict() if self.update_buffers else dict(model.named_parameters())
        # Tensors without elements have one address.
        of_addresses = {
            (average.data_ptr(), average.shape): (average, weights[name])
            for name, average in self.avg_parameters.items()
        }
        pairs = [*of_addresses.values()]
        buffers = (
            [] if self.update_buffers else list(zip(self.module.buffers(), model.buffers(), strict=True))
        )
        with torch.no_grad():
            if self.steps == 0:
                _copy(pairs)
            elif self.steps % self.interval == 0:
                floating = [(average, weight) for average, weight in pairs if average.is_floating_point()]
                if floating:
                    torch._foreach_lerp_(*_at_averages(floating), self.momentum)
            _copy(buffers)
        self.steps += 1


def _copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    if pairs:
        torch._foreach_copy_(*_at_averages(pairs))


def _at_averages(pairs: list[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the averages, and the weights on their devices."""
    averages = [average for average, _ in pairs]
    return averages, [weight.to(average.device) for average, weight in pairs]
