"""A version of mmengine's hook for the log that does not wait for the device."""

from functools import partial
from typing import Any

from mmengine.hooks import LoggerHook
from mmengine.hooks import RuntimeInfoHook as _RuntimeInfoHook

from visdet.registry import HOOKS

from ..late_numbers import StepNumbers
from .progress_hook import ProgressHook


@HOOKS.register_module()
class RuntimeInfoHook(_RuntimeInfoHook):
    """Writes losses, learning rates and metrics to the message hub, where the log and other hooks read them.

    The losses of an iteration are written when they have arrived (see :class:`LateNumbers`). This hook waits for them
    only where they are read: when a line of the log is due, and at the end of an epoch.
    """

    def __init__(self) -> None:
        super().__init__()
        self._has_written = False

    def before_train(self, runner: Any) -> None:
        """Write the facts of the run, and listen to its numbers."""
        super().before_train(runner)
        if numbers := getattr(runner, "late_numbers", None):
            numbers.listen(partial(self._write, runner))

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: dict | None = None
    ) -> None:
        """Write the losses if a log is due."""
        numbers = getattr(runner, "late_numbers", None)
        if numbers is None:  # mmengine's own runner
            super().after_train_iter(runner, batch_idx, data_batch, outputs)
        elif not self._has_written or self._is_due(runner, batch_idx):
            numbers.read()

    def _write(self, runner: Any, step: StepNumbers) -> None:
        for name, value in step.values.items():
            runner.message_hub.update_scalar(f"train/{name}", value)
        self._has_written = True

    def _is_due(self, runner: Any, batch_idx: int) -> bool:
        done = runner.iter + 1
        if done == runner.max_iters or self.end_of_epoch(runner.train_dataloader, batch_idx):
            return True
        for hook in runner.hooks:
            interval = hook.interval if isinstance(hook, LoggerHook | ProgressHook) else None
            if interval and (done % interval == 0 or (batch_idx + 1) % interval == 0):
                return True
        return False
