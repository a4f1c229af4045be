"""A hook that guards training against losses that are NaN or infinite."""

import math
from typing import Any, Literal

import torch
from mmengine.dist import all_reduce
from mmengine.hooks import Hook
from mmengine.logging import print_log

from visdet.execution.host_copy import HostCopy, stack_numbers
from visdet.registry import HOOKS

from ..errors import ConfigError, UserError
from ..optim.optim_wrapper import OptimWrapper

_NUM_BAD = "number of processes with a bad loss"


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
        self._has_dropped_gradients = False  # in the iteration that runs
        self._has_dropped = False  # in the iteration that is unchecked
        self._unchecked: tuple[int, HostCopy] | None = None

    def before_train(self, runner: Any) -> None:
        """Let the optimizer skip updates with losses or gradients that are not finite."""
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
        """Look at the losses of the iteration. With 'stop' and on a GPU, this is done after the next iteration."""
        self.check_losses(runner)
        self._has_dropped, self._has_dropped_gradients = self._has_dropped_gradients, False
        if not self.every_n_train_iters(runner, self.interval):
            return
        losses = {name: value for name, value in (outputs or {}).items() if "loss" in name}
        # All processes decide alike: one that stops or counts by itself would leave the others waiting for it.
        num_bad = (~stack_numbers(losses.values()).isfinite()).any().float()
        all_reduce(num_bad)
        self._unchecked = runner.iter + 1, HostCopy({**losses, _NUM_BAD: num_bad})
        if self.action == "skip" or self._unchecked[1].is_there:
            self.check_losses(runner)

    def check_losses(self, runner: Any, checkpoint: Any = None) -> None:
        """Look at losses that have not been looked at, and at what their update did.

        Raises:
            NonFiniteLossError: as in the class.
        """
        if self._unchecked is None:
            return
        (iteration, copy), self._unchecked = self._unchecked, None
        losses = copy.read()
        num_bad = losses.pop(_NUM_BAD)
        if num_bad == 0 and not self._has_dropped:
            self.skips_in_a_row = 0
            return
        self.skips_in_a_row += 1
        bad = {name: value for name, value in losses.items() if not math.isfinite(value)}
        elsewhere = "a loss of another process" if num_bad else "a gradient is NaN or infinite"
        what = ", ".join(f"{name} = {value}" for name, value in bad.items()) or elsewhere
        where = f"iteration {iteration}: {what}"
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

    # Damaged weights are neither saved nor validated.
    before_save_checkpoint = before_val = after_train = check_losses

    def _drop_non_finite_gradients(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        """Drop all gradients before the optimizer's step if any is NaN or infinite. The step then does nothing."""
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not parameters:
            return
        norms = torch._foreach_norm([p.grad for p in parameters])
        if not torch.stack([norm.float() for norm in norms]).isfinite().all():
            self._has_dropped_gradients = True
            for parameter in parameters:
                parameter.grad = None
