"""A hook that shows progress as a live bar on a terminal, and as plain lines elsewhere."""

from collections import defaultdict
from datetime import timedelta
from time import monotonic
from typing import Any

from mmengine.hooks import Hook, LoggerHook
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from visdet.registry import HOOKS

from ..first_hook import first_hook
from ..process.console import console, is_main_process, say

_REFRESH_SECONDS = 0.2
_FIRST_LINE = 10  # iterations
_LINE_SECONDS = 60.0


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
        self._bars = Progress(disable=True)
        self._tasks: dict[str, TaskID] = {}
        self._redrawn_at = 0.0
        self._stage_began = 0.0
        self._trains = False

    def before_run(self, runner: Any) -> None:
        """Take over the terminal."""
        if self.interval is None:
            logger = first_hook(runner.hooks, LoggerHook)
            self.interval = logger.interval if logger else 50
        # The bar is drawn without a thread, which could hold a lock at the moment when a data worker is forked.
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            console=console,
            auto_refresh=False,
            transient=True,
            disable=not (is_main_process() and console.is_terminal),
        )
        self._tasks = {}

    def on_exit(self, runner: Any = None) -> None:
        """Give the terminal back."""
        if not self._bars.disable:  # rich would print an empty line.
            self._bars.stop()

    def before_train(self, runner: Any) -> None:
        """Begin the training bar."""
        self._trains = True
        self._first = runner.iter
        self._said_at = monotonic()
        self._begin("train", runner.max_iters, runner.iter)

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: dict | None = None
    ) -> None:
        """Show the iteration."""
        done = runner.iter + 1
        values = outputs or {}
        if not self._bars.disable:
            self._advance("train", done, self._train_line(runner, values, with_parts=False))
            return
        now = monotonic()
        is_early = done == self._first + _FIRST_LINE or now - self._said_at > _LINE_SECONDS
        if is_early or done % self.interval == 0 or done == runner.max_iters:
            say(self._train_line(runner, values, with_parts=True))
            self._said_at = now

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
        self._end_evaluation("val", f"val  {self._position(runner, 0)}", metrics)

    def before_test(self, runner: Any) -> None:
        """Begin the test bar."""
        self._begin("test", len(runner.test_dataloader), 0)

    def after_test_epoch(self, runner: Any, metrics: dict | None = None) -> None:
        """Show the metrics."""
        self._end_evaluation("test", "test", metrics)

    def _begin(self, stage: str, total: int, done: int) -> None:
        self._stage_began = monotonic()
        self._tasks[stage] = self._bars.add_task(stage, total=total, completed=done, status="")

    def _advance(self, stage: str, done: int, status: str) -> None:
        bars = self._bars
        now = monotonic()
        bars.start()  # The bar starts here, so that there is none below messages before the first batch.
        bars.update(self._tasks[stage], completed=done, status=status)
        if now - self._redrawn_at > _REFRESH_SECONDS:
            bars.refresh()
            self._redrawn_at = now

    def _end(self, stage: str) -> None:
        bars = self._bars
        tasks = self._tasks
        bars.remove_task(tasks.pop(stage))
        bars.refresh()
        if not tasks:
            self.on_exit()

    def _end_evaluation(self, stage: str, head: str, metrics: dict | None) -> None:
        self._end(stage)
        shown = [
            f"{name} {_number(value)}"
            for name, value in (metrics or {}).items()  # those of single classes have two slashes
            if isinstance(value, int | float) and name.count("/") < 2
        ]
        seconds = monotonic() - self._stage_began
        say("  ".join([head, *shown, f"({seconds:.1f} s)"]), style="bold")

    def _train_line(self, runner: Any, outputs: dict, with_parts: bool) -> str:
        """Return position, smoothed losses, learning rate, time per iteration and remaining time."""
        hub = runner.message_hub
        window = runner.log_processor.window_size

        def smoothed(name: str) -> float:
            return float(hub.get_scalar(f"train/{name}").mean(window))

        known = hub.log_scalars
        losses = {name: smoothed(name) for name in outputs if with_parts or name == "loss"}
        loss = f"loss {_number(losses.pop('loss'))}" if "loss" in losses else ""
        parts = _loss_parts(losses)
        lr = hub.get_scalar("train/lr").current()
        words = [
            self._position(runner, 1) if with_parts else "",
            loss,
            parts and f"({parts})",
            f"lr {lr:.2e}",
        ]
        if "train/time" in known:
            data = f"(data {smoothed('data_time'):.3f})" if with_parts else ""
            eta = timedelta(seconds=int(hub.get_info("eta")))
            words += [f"{smoothed('time'):.3f} s/it", data, f"eta {eta}"]
        return "  ".join(filter(None, words))

    def _position(self, runner: Any, ahead: int) -> str:
        """Return the position of training as text, ``ahead`` iterations (and epochs) after the runner's counts.

        In a run that does not train, the text is empty. Reading ``runner.max_iters`` would build the training loop.
        """
        if not self._trains:
            return ""
        position = f"iter {runner.iter + ahead}/{runner.max_iters}"
        total = runner.max_epochs
        if runner.train_loop.by_epoch:
            position = f"epoch {min(runner.epoch + ahead, total)}/{total}  {position}"
        return position


def _loss_parts(losses: dict[str, float]) -> str:
    """Return each loss of the last layer, the sums of the losses of tasks, and that of the other layers.

    ``d0.loss_cls`` is of another layer, and ``det_loss_cls_0`` is of the task ``det``.
    """
    parts: dict[str, float] = defaultdict(float)
    for name, value in losses.items():
        before, loss, after = name.rpartition("loss")
        if loss:
            part = "other layers" if "." in before else before.rstrip("_") or after.lstrip("_")
            parts[part] += value
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
