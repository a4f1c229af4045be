"""A version of mmengine's hook for the log that leaves out no last iteration."""

from typing import Any

from mmengine.hooks import LoggerHook as _LoggerHook

from visdet.registry import HOOKS


@HOOKS.register_module()
class LoggerHook(_LoggerHook):
    """Writes a line of the log and the scalars every ``interval`` iterations, and after the last iteration of a run.

    The arguments are those of :class:`mmengine.hooks.LoggerHook`.
    """

    interval: int

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: dict | None = None
    ) -> None:
        """Log the iteration if it is due, as the last one always is."""
        interval = self.interval
        if runner.iter + 1 == runner.max_iters:
            self.interval = 1
        super().after_train_iter(runner, batch_idx, data_batch, outputs)
        self.interval = interval
