"""What fitting a field of Gaussians needs besides the loop: a start from data, and moves between."""

from typing import Any

import torch
from mmengine.hooks import Hook
from mmengine.model import is_model_wrapper
from torch import Tensor

from visdet.errors import InvalidInputError
from visdet.registry import HOOKS, MODELS

from ..errors import ConfigError

__all__ = ["InitializeFieldHook", "SplitGaussiansHook"]


def _field(runner: Any, hook: Hook) -> Any:
    model = runner.model.module if is_model_wrapper(runner.model) else runner.model
    if not isinstance(model, MODELS.get("LearnableGaussianField")):
        raise ConfigError(
            f"{type(hook).__name__} is for LearnableGaussianField, but model is {type(model).__name__}"
        )
    return model


@HOOKS.register_module()
class InitializeFieldHook(Hook):
    """Places a field's Gaussians by the training data before the first iteration of a run from scratch.

    A resumed run, and one with ``load_from``, keep the weights they loaded. Every process places the same.

    Args:
        method: 'kmeans' or 'random', see ``LearnableGaussianField.initialize``.
        seed: of the draws.
    """

    def __init__(self, method: str = "kmeans", seed: int = 0) -> None:
        self.method = method
        self.seed = seed

    def before_train(self, runner) -> None:
        """Place the Gaussians."""
        if runner.iter == 0 and not runner._has_loaded:
            points, values = runner.train_dataloader.dataset.samples()
            _field(runner, self).initialize(points, values, self.method, self.seed)


@HOOKS.register_module()
class SplitGaussiansHook(Hook):
    """Gives up Gaussians that carry next to nothing and splits the heaviest ones into their places.

    The number of Gaussians stays, so optimizer, checkpoints and distributed training do not notice; the optimizer's
    moments of changed Gaussians start again from zero. What is chosen follows from the weights alone: a resumed run,
    and every process of a distributed one, chooses the same.

    Args:
        interval: iterations between two rounds.
        begin, end: rounds happen after iterations ``begin < i <= end``; ``end`` None for the first half of the run.
        prune_below: a Gaussian counts as nothing below this share of the mean mass (\\|weight\\| times volume).
        max_share: of all Gaussians, at most this share is replaced in a round.
    """

    def __init__(
        self,
        interval: int = 100,
        begin: int = 0,
        end: int | None = None,
        prune_below: float = 0.02,
        max_share: float = 0.1,
    ) -> None:
        if interval < 1 or prune_below < 0 or not 0 <= max_share <= 0.5:
            raise InvalidInputError(
                "SplitGaussiansHook: interval must be at least 1, prune_below at least 0 and max_share in 0..0.5, "
                f"got {interval}, {prune_below}, {max_share}"
            )
        self.interval, self.begin, self.end = interval, begin, end
        self.prune_below, self.max_share = prune_below, max_share

    def after_train_iter(self, runner, batch_idx: int, data_batch=None, outputs: dict | None = None) -> None:
        """Prune and split where it is time."""
        done = runner.iter + 1
        end = runner.max_iters // 2 if self.end is None else self.end
        if done % self.interval != 0 or not self.begin < done <= end:
            return
        field = _field(runner, self)
        masses = field.masses()
        order = masses.argsort(stable=True)
        most = int(self.max_share * len(order))
        given_up = order[:most][masses[order[:most]] < self.prune_below * masses.mean()]
        if len(given_up) == 0:
            return
        split = order[len(order) - len(given_up) :]
        field.split(split, given_up)
        forget_moments(runner.optim_wrapper.optimizer, torch.cat([split, given_up]), len(order))
        runner.logger.info(f"split {len(split)} of {len(order)} Gaussians into the places of spent ones")


def forget_moments(optimizer: torch.optim.Optimizer, rows: Tensor, count: int) -> None:
    """Zero an optimizer's state in ``rows`` of every parameter that has ``count`` of them."""
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor) and value.dim() > 0 and len(value) == count:
                value[rows] = 0
