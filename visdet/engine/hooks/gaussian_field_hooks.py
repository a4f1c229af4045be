"""Hooks that fit a field of Gaussians: one initializes it from data, the other splits Gaussians during training."""

from typing import Annotated, Any

import torch
from mmengine.hooks import Hook
from torch import Tensor

from visdet.checks.arguments import AtLeast0, Positive, Range
from visdet.registry import HOOKS, MODELS

from ..errors import ConfigError
from ..optim.wrappers import unwrapped


def _field(runner: Any, hook: Hook) -> Any:
    model = unwrapped(runner.model)
    if not isinstance(model, MODELS.get("LearnableGaussianField")):
        raise ConfigError(
            f"{type(hook).__name__} is for LearnableGaussianField, but model is {type(model).__name__}"
        )
    return model


@HOOKS.register_module()
class InitializeFieldHook(Hook):
    """Initializes the Gaussians of a field from the training data before the first iteration of a run from scratch.

    A resumed run and a run with ``load_from`` keep the weights that they loaded. All processes place the Gaussians
    alike.

    Args:
        method: 'kmeans' or 'random', see ``LearnableGaussianField.initialize``.
        seed: the seed of the random draws.
    """

    def __init__(self, method: str = "kmeans", seed: int = 0) -> None:
        self.method = method
        self.seed = seed

    def before_train(self, runner: Any) -> None:
        """Place the Gaussians."""
        if runner.iter == 0 and not runner.cfg.get("load_from"):
            points, values = runner.train_dataloader.dataset.samples()
            _field(runner, self).initialize(points, values, self.method, self.seed)


@HOOKS.register_module()
class SplitGaussiansHook(Hook):
    """Prunes Gaussians of small mass, and splits the Gaussians of the largest mass into their places.

    The number of Gaussians stays the same, so the optimizer, checkpoints and distributed training need no change. The
    optimizer's moments of changed Gaussians start again from zero. The choice follows from the weights alone, so a
    resumed run and all processes of a distributed run choose the same Gaussians.

    Args:
        interval: number of iterations between two rounds.
        begin, end: rounds take place after iterations ``begin < i <= end``. With None, ``end`` is half of the run.
        prune_below: a Gaussian is pruned below this share of the mean mass, which is \\|weight\\| times volume.
        max_share: the largest share of all Gaussians that a round replaces.

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(
        self,
        interval: Positive = 100,
        begin: int = 0,
        end: int | None = None,
        prune_below: AtLeast0 = 0.02,
        max_share: Annotated[float, Range(0, 0.5)] = 0.1,
    ) -> None:
        self.interval, self.begin, self.end = interval, begin, end
        self.prune_below, self.max_share = prune_below, max_share

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: dict | None = None
    ) -> None:
        """Prune and split Gaussians if a round is due."""
        done = runner.iter + 1
        end = runner.max_iters // 2 if self.end is None else self.end
        if done % self.interval != 0 or not self.begin < done <= end:
            return
        field = _field(runner, self)
        masses = field.masses()
        order = masses.argsort(stable=True)
        count = len(order)
        most = int(self.max_share * count)
        given_up = order[:most][masses[order[:most]] < self.prune_below * masses.mean()]
        if len(given_up) == 0:
            return
        split = order[count - len(given_up) :]
        field.split(split, given_up)
        forget_moments(runner.optim_wrapper.optimizer, torch.cat([split, given_up]), count)
        runner.logger.info(f"split {len(split)} of {count} Gaussians into the places of spent ones")


def forget_moments(optimizer: torch.optim.Optimizer, rows: Tensor, count: int) -> None:
    """Set the optimizer's state to zero in ``rows`` of every parameter that has ``count`` rows."""
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor) and value.dim() > 0 and len(value) == count:
                value[rows] = 0
