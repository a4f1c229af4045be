"""Averages of the weights."""

from collections.abc import Callable
from typing import Any

import mmengine.model
import torch
from torch import Tensor, nn

from visdet.registry import MODELS

Pairs = list[tuple[Tensor, Tensor]]


@MODELS.register_module()
class ExponentialMovingAverage(mmengine.model.ExponentialMovingAverage):
    """mmengine's average of the weights, which a few kernels update, and not one for each tensor.

    A tensor that has several names, as branches that all layers share, is averaged once. With ``update_buffers``,
    mmengine averages it once for each name, and so faster than the others.

    Args:
        model, momentum, interval, device, update_buffers: as in mmengine.

    Attributes:
        replay: a function of this average and a model that does what :meth:`average` does, such as a
            :class:`GraphedAverage`.
    """

    replay: Callable[["ExponentialMovingAverage", nn.Module], Any] | None = None

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Bring the averages one step forward.

        Args:
            model: the model whose weights are averaged.
        """
        is_first = self.steps == 0
        is_due = self.steps % self.interval == 0 and not is_first
        if is_due and self.replay is not None:
            self.replay(self, model)
        else:
            pairs, buffers = self.pairs_with(model)
            if is_due:
                self.average(pairs, buffers)
            else:
                _copy([*pairs, *buffers] if is_first else buffers)
        self.steps += 1

    def pairs_with(self, model: nn.Module) -> tuple[Pairs, Pairs]:
        """Return the averages with the weights of a model, each once, and the copies with the other buffers."""
        weights = model.state_dict() if self.update_buffers else dict(model.named_parameters())
        # Tensors without elements have one address.
        of_addresses = {
            (average.data_ptr(), average.shape): (average, weights[name])
            for name, average in self.avg_parameters.items()
        }
        buffers = (
            [] if self.update_buffers else list(zip(self.module.buffers(), model.buffers(), strict=True))
        )
        return list(of_addresses.values()), buffers

    @torch.no_grad()
    def average(self, pairs: Pairs, buffers: Pairs) -> None:
        """Move the averages towards the weights, and copy the other buffers (see :meth:`pairs_with`)."""
        floating = [(average, weight) for average, weight in pairs if average.is_floating_point()]
        if floating:
            torch._foreach_lerp_(*_at_averages(floating), self.momentum)
        _copy(buffers)


def _copy(pairs: Pairs) -> None:
    if pairs:
        torch._foreach_copy_(*_at_averages(pairs))


def _at_averages(pairs: Pairs) -> tuple[list[Tensor], list[Tensor]]:
    """Return the averages, and the weights on their devices."""
    averages = [average for average, _ in pairs]
    return averages, [weight.to(average.device) for average, weight in pairs]
