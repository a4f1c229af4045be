"""A hook that guards training against losses that are NaN or infinite."""

import math
from functools import partial
from typing import Any, Literal

import torch
from mmengine.device import get_device
from mmengine.hooks import Hook

from visdet.registry import HOOKS

from ..errors import ConfigError, UserError
from ..late_numbers import LateNumbers, StepNumbers, losses_among
from ..optim.gradients import parameters_in
from ..optim.optim_wrapper import OptimWrapper
from ..process.console import warn


class NonFiniteLossError(UserError):
    """A loss became NaN or infinite. The message names it and the last good checkpoint."""


@HOOKS.register_module()
class CheckInvalidLossHook(Hook):
    """Stops training or skips the update when a loss is NaN or infinite, and names the losses that are.

    Args:
        action: 'stop' ends training before a checkpoint with the damaged weights is written. 'skip' leaves out
            every update to which an iteration with a loss or a gradient that is not finite contributes. All
            processes leave out the same updates.
        max_skips: number of consecutive bad iterations after which 'skip' stops training too.
        interval: number of iterations between two looks at the losses.

    A loss is a value of the training step with "loss" in its name, as it is for the sum of the losses.

    Raises:
        ValueError: the action is unknown.
        ConfigError: before training, if the action is 'skip' and the optimizer wrapper is not visdet's.
        NonFiniteLossError: during training, as described above.

    Source: the name and ``interval`` are mmdet's; ``action`` is ours.
    """

    priority = "VERY_HIGH"  # before the logger and the checkpoint hook

    def __init__(
        self, action: Literal["stop", "skip"] = "stop", max_skips: int = 20, interval: int = 1
    ) -> None:
        self.action = action
        self.max_skips = max_skips
        self.interval = interval
        self.skips_in_a_row = 0
        self._has_dropped_gradients = False  # in the iteration that is checked next

    def state_dict(self) -> dict[str, int]:
        """Return what a resumed run goes on with, which is nothing if no update is skipped."""
        return {"skips_in_a_row": self.skips_in_a_row} if self.action == "skip" else {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take over the count of the run that is resumed."""
        self.skips_in_a_row = state.get("skips_in_a_row", 0)

    def before_train(self, runner: Any) -> None:
        """Listen to the losses, and let the optimizer skip updates with losses or gradients that are not finite."""
        if numbers := getattr(runner, "late_numbers", None):
            numbers.listen(partial(self._check, runner))
        if self.action != "skip":
            return
        wrapper = runner.optim_wrapper
        if not isinstance(wrapper, OptimWrapper):
            raise ConfigError(
                "CheckInvalidLossHook: action 'skip' needs optim_wrapper.type to be 'OptimWrapper' or "
                f"'AmpOptimWrapper' of visdet, got {type(wrapper).__module__}.{type(wrapper).__name__}"
            )
        wrapper.spoils_gradients_of_bad_losses = True
        wrapper.optimizer.register_step_pre_hook(self._drop_non_finite_gradients)

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: dict | None = None
    ) -> None:
        """With 'skip', look at the losses of the iteration. With 'stop', this is done when they have arrived."""
        numbers = getattr(runner, "late_numbers", None)
        if numbers is None:  # mmengine's own runner
            numbers = LateNumbers()
            numbers.listen(partial(self._check, runner))
            numbers.take(runner.iter + 1, outputs or {}, get_device())
            numbers.read()
        elif self.action == "skip":
            numbers.read()

    def _check(self, runner: Any, step: StepNumbers) -> None:
        """Look at the losses of an iteration, and at what its update did."""
        has_dropped = self._has_dropped_gradients
        self._has_dropped_gradients = False
        if step.iteration % self.interval:
            return
        if not (step.has_bad_loss or has_dropped):
            self.skips_in_a_row = 0
            return
        self.skips_in_a_row += 1
        losses = losses_among(step.values).items()
        bad = [f"{name} = {value}" for name, value in losses if not math.isfinite(value)]
        elsewhere = "a loss of another process" if step.has_bad_loss else "a gradient is NaN or infinite"
        where = f"iteration {step.iteration}: {', '.join(bad) or elsewhere}"
        if self.action == "stop" or self.skips_in_a_row >= self.max_skips:
            last = runner.message_hub.get_info("last_ckpt")
            written = f"the last checkpoint is {last}" if last else "no checkpoint was written yet"
            raise NonFiniteLossError(
                f"{where}. Training stopped; {written}. Usual remedies: a lower learning rate "
                "(optim_wrapper.optimizer.lr), clipped gradients (optim_wrapper.clip_grad.max_norm=0.1), training "
                "without --amp; default_hooks.invalid_loss.action=skip passes over single bad batches."
            )
        warn(f"{where}; the update was skipped")

    def _drop_non_finite_gradients(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        """Drop all gradients before the optimizer's step if any is NaN or infinite. The step then does nothing."""
        parameters = parameters_in(optimizer.param_groups)
        gradients: list[Any] = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norms = [norm.float() for norm in torch._foreach_norm(gradients)] if gradients else []
        if norms and not torch.stack(norms).isfinite().all():
            self._has_dropped_gradients = True
            optimizer.zero_grad()
