"""A hook that shows progress as a live bar on a terminal, and as plain lines elsewhere."""

import time
from datetime import timedelta
from typing import Any

from mmengine.hooks import Hook, LoggerHook
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from visdet.registry import HOOKS

from ..process.console import console, is_main_process, say

_REFRESH_SECONDS = 0.2
_FIRST_LINE, _LINE_SECONDS = 10, 60.0  # iterations, and seconds


@HOOKS.register_module()
class ProgressHook(Hook):
    """Shows the progress of training, and the metrics after every validation and test.

    On a terminal, each running loop has one live line. Elsewhere, there is one line every ``interval`` iterations,
    which also shows the parts of the loss, and besides one after the first ten iterations and one each minute. The
    logger hook writes the log file and the scalars of TensorBoard.

    Args:
        interval: the number of iterations between plain lines. The default is the interval of the logger hook, or 50
            if there is none.
    """

    priority = "LOW"  # The timer and the runtime information must be up to date before.

    def __init__(self, interval: int | None = None) -> None:
        self.interval = interval
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._redrawn_at = 0.0
        self._stage_began = 0.0
        self._trains = False

    def before_run(self, runner: Any) -> None:
        """Take over the terminal."""
        if self.interval is None:
            loggers = [hook for hook in runner.hooks if isinstance(hook, LoggerHook)]
            self.interval = loggers[0].interval if loggers else 50
        if is_main_process() and console.is_terminal:
            # The bar is drawn without a thread, which could hold a lock at the moment when a data worker is forked.
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[status]}"),
                console=console,
                auto_refresh=False,
                transient=True,
            )

    def on_exit(self, runner: Any) -> None:
        """Give the terminal back."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def before_train(self, runner: Any) -> None:
        """Begin the training bar."""
        self._trains = True
        self._first, self._said_at = runner.iter, time.monotonic()
        self._begin("train", runner.max_iters, runner.iter)

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: dict | None = None
    ) -> None:
        """Show the iteration."""
        done = runner.iter + 1
        if self._progress is None:
            is_early = done == self._first + _FIRST_LINE or time.monotonic() - self._said_at > _LINE_SECONDS
            if is_early or done % self.interval == 0 or done == runner.max_iters:
                say(self._train_line(runner, outputs or {}, with_parts=True))
                self._said_at = time.monotonic()
        else:
            self._advance("train", done, self._train_line(runner, outputs or {}, with_parts=False))

    def after_train(self, runner: Any) -> None:
        """End the training bar."""
        self._end("train")

    def before_val(self, runner: Any) -> None:
        """Begin the validation bar."""
        self._begin("val", len(runner.val_dataloader), 0)

    def _after_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None, mode: str = "train"
    ) -> None:
        """Show the batch of a validation or a test."""
        self._advance(mode, batch_idx + 1, "")

    def after_val_epoch(self, runner: Any, metrics: dict | None = None) -> None:
        """Show the metrics in a line that stays on the terminal."""
        self._end("val")
        self._say_metrics(f"val  {self._position(runner, 0)}", metrics)

    def before_test(self, runner: Any) -> None:
        """Begin the test bar."""
        self._begin("test", len(runner.test_dataloader), 0)

    def after_test_epoch(self, runner: Any, metrics: dict | None = None) -> None:
        """Show the metrics."""
        self._end("test")
        self._say_metrics("test", metrics)

    def _begin(self, stage: str, total: int, done: int) -> None:
        self._stage_began = time.monotonic()
        if self._progress is not None:
            self._tasks[stage] = self._progress.add_task(stage, total=total, completed=done, status="")

    def _advance(self, stage: str, done: int, status: str) -> None:
        if self._progress is None:
            return
        self._progress.start()  # The bar starts here, so that there is none below messages before the first batch.
        self._progress.update(self._tasks[stage], completed=done, status=status)
        if time.monotonic() - self._redrawn_at > _REFRESH_SECONDS:
            self._progress.refresh()
            self._redrawn_at = time.monotonic()

    def _end(self, stage: str) -> None:
        if self._progress is not None and stage in self._tasks:
            self._progress.remove_task(self._tasks.pop(stage))
            if self._tasks:
                self._progress.refresh()
            else:
                self._progress.stop()

    def _say_metrics(self, head: str, metrics: dict | None) -> None:
        shown = [
            f"{name} {_number(value)}"
            for name, value in (metrics or {}).items()  # those of single classes have two slashes
            if isinstance(value, int | float) and name.count("/") < 2
        ]
        seconds = time.monotonic() - self._stage_began
        say("  ".join([head, *shown, f"({seconds:.1f} s)"]), style="bold")

    def _train_line(self, runner: Any, outputs: dict, with_parts: bool) -> str:
        """Return position, smoothed losses, learning rate, time per iteration and remaining time."""
        hub, window = runner.message_hub, runner.log_processor.window_size

        def smoothed(name: str) -> float:
            return float(hub.get_scalar(f"train/{name}").mean(window))

        words = [] if not with_parts else [self._position(runner, 1)]
        if "loss" in outputs:
            words.append(f"loss {_number(smoothed('loss'))}")
        if with_parts and (
            parts := _loss_parts({name: smoothed(name) for name in outputs if name != "loss"})
        ):
            words.append(f"({parts})")
        lr = hub.get_scalar("train/lr" if "train/lr" in hub.log_scalars else "train/base_lr").current()
        words.append(f"lr {lr:.2e}")
        if "train/time" in hub.log_scalars:
            words.append(f"{smoothed('time'):.3f} s/it")
            if with_parts:
                words.append(f"(data {smoothed('data_time'):.3f})")
            words.append(f"eta {timedelta(seconds=int(hub.get_info('eta')))}")
        return "  ".join(words)

    def _position(self, runner: Any, ahead: int) -> str:
        """Return the position of training as text, ``ahead`` iterations (and epochs) after the runner's counts.

        In a run that does not train, the text is empty. Reading ``runner.max_iters`` would build the training loop.
        """
        if not self._trains:
            return ""
        position = f"iter {runner.iter + ahead}/{runner.max_iters}"
        if runner.train_loop.by_epoch:
            position = f"epoch {min(runner.epoch + ahead, runner.max_epochs)}/{runner.max_epochs}  {position}"
        return position


def _loss_parts(losses: dict[str, float]) -> str:
    """Return each loss of the last layer, the sums of the losses of tasks, and that of the other layers.

    ``d0.loss_cls`` is of another layer, and ``det_loss_cls_0`` is of the task ``det``.
    """
    parts: dict[str, float] = {}
    for name, value in losses.items():
        before, loss, after = name.rpartition("loss")
        if loss:
            part = "other layers" if "." in before else before.rstrip("_") or after.lstrip("_")
            parts[part] = parts.get(part, 0.0) + value
    ordered = sorted(parts, key="other layers".__eq__)
    return "  ".join(f"{name} {_number(parts[name])}" for name in ordered)


def _number(value: int | float) -> str:
    """Return a number as text.

    A count stays as it is. A measure gets four decimals, or three digits and an exponent if it is small. The value -1,
    by which COCO says that there was nothing to measure, becomes a dash.
    """
    if value == -1:
        return "-"
    if isinstance(value, int):
        return str(value)
    return f"{value:.4f}" if abs(value) >= 1e-3 or value == 0 else f"{value:.2e}"
