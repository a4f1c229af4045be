"""A guard against losses that are not numbers."""

import math

import torch
from mmengine.dist import all_reduce
from mmengine.hooks import Hook
from mmengine.logging import print_log

from visdet.errors import InvalidInputError
from visdet.registry import HOOKS

from ..errors import UserError

__all__ = ["CheckInvalidLossHook", "NonFiniteLossError"]


class NonFiniteLossError(UserError):
    """A loss became NaN or infinite; the message names it and the last good checkpoint."""


@HOOKS.register_module()
class CheckInvalidLossHook(Hook):
    """Stops, or skips the update, when a loss is NaN or infinite, and names the losses that are.

    Args:
        action: 'stop' ends training before a checkpoint with the damaged weights is written. 'skip' leaves
            the parameters as they are in an iteration with a gradient that is not finite.
        max_skips: consecutive bad iterations after which 'skip' stops too.
        interval: look at the losses every so many iterations.

    Raises:
        ValueError: an unknown action.
        NonFiniteLossError: during training, as above.

    Source: the name and ``interval`` are mmdet's; ``action`` is ours.
    """

    priority = "VERY_HIGH"  # before the logger and the checkpoint hook

    def __init__(self, action: str = "stop", max_skips: int = 20, interval: int = 1) -> None:
        if action not in ("stop", "skip"):
            raise InvalidInputError(f"CheckInvalidLossHook: action must be 'stop' or 'skip', got {action!r}")
        self.action = action
        self.max_skips = max_skips
        self.interval = interval
        self.skips_in_a_row = 0

    def before_train(self, runner) -> None:
        """Let the optimizer skip steps with gradients that are not finite."""
        if self.action == "skip":
            runner.optim_wrapper.optimizer.register_step_pre_hook(_drop_non_finite_gradients)

    def after_train_iter(self, runner, batch_idx: int, data_batch=None, outputs: dict | None = None) -> None:
        """Look at the losses of the iteration."""
        if not self.every_n_train_iters(runner, self.interval):
            return
        values = {name: float(torch.as_tensor(value).detach()) for name, value in (outputs or {}).items()}
        bad = {name: value for name, value in values.items() if not math.isfinite(value)}
        # All processes decide alike: one that stops or counts by itself would leave the others waiting for it.
        num_bad = torch.tensor(float(bool(bad)))
        all_reduce(num_bad)
        if num_bad == 0:
            self.skips_in_a_row = 0
            return
        self.skips_in_a_row += 1
        what = ", ".join(f"{name} = {value}" for name, value in bad.items()) or "a loss of another process"
        where = f"iteration {runner.iter + 1}: {what}"
        if self.action == "stop" or self.skips_in_a_row >= self.max_skips:
            last = runner.message_hub.get_info("last_ckpt")
            raise NonFiniteLossError(
                f"{where}. Training stopped; "
                + (f"the last checkpoint is {last}. " if last else "no checkpoint was written yet. ")
                + "Usual remedies: a lower learning rate (optim_wrapper.optimizer.lr), clipped gradients "
                "(optim_wrapper.clip_grad.max_norm=0.1), training without --amp; "
                "default_hooks.invalid_loss.action=skip passes over single bad batches."
            )
        print_log(f"{where}; the update was skipped", logger="current", level=30)


def _drop_non_finite_gradients(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
    """Before an optimizer's step: if any gradient is NaN or infinite drop all, which makes the step do nothing."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if not parameters:
        return
    norms = torch._foreach_norm([p.grad for p in parameters])
    if not torch.stack([norm.float() for norm in norms]).isfinite().all():
        for parameter in parameters:
            parameter.grad = None
