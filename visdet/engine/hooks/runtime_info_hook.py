"""A version of mmengine's hook for the log that does not wait for the device."""

from typing import Any

from mmengine.hooks import LoggerHook
from mmengine.hooks import RuntimeInfoHook as _RuntimeInfoHook

from visdet.execution.host_copy import HostCopy
from visdet.registry import HOOKS

from .progress_hook import ProgressHook


@HOOKS.register_module()
class RuntimeInfoHook(_RuntimeInfoHook):
    """Writes losses, learning rates and metrics to the message hub, where the log and other hooks read them.

    mmengine's hook waits for the GPU in every iteration to read the losses, and the GPU is idle until the next
    iteration begins. This one writes the losses of an iteration when the next one has been launched. It waits only
    where they are read: when a line of the log is due, at the end of an epoch, and before a checkpoint is saved.
    """

    def __init__(self) -> None:
        super().__init__()
        self._losses: HostCopy | None = None
        self._has_written = False

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: dict | None = None
    ) -> None:
        """Write the losses of the previous iteration, and this one's if they have arrived or a log is due."""
        self.write_losses(runner)
        self._losses = HostCopy(outputs or {})
        if self._losses.is_there or not self._has_written or self._is_due(runner, batch_idx):
            self.write_losses(runner)

    def write_losses(self, runner: Any) -> None:
        """Write the losses that have not been written yet."""
        if self._losses is None:
            return
        losses, self._losses = self._losses.read(), None
        for name, value in losses.items():
            runner.message_hub.update_scalar(f"train/{name}", value)
        self._has_written = True

    def _is_due(self, runner: Any, batch_idx: int) -> bool:
        done = runner.iter + 1
        if done == runner.max_iters or self.end_of_epoch(runner.train_dataloader, batch_idx):
            return True
        intervals = {hook.interval for hook in runner.hooks if isinstance(hook, LoggerHook | ProgressHook)}
        return any(
            count % interval == 0 for interval in intervals if interval for count in (done, batch_idx + 1)
        )
