"""A version of mmengine's timer whose clock goes on evenly, also if somebody sets the clock of the machine."""

from time import perf_counter
from typing import Any

from mmengine.hooks import IterTimerHook as _IterTimerHook

from visdet.registry import HOOKS


@HOOKS.register_module()
class IterTimerHook(_IterTimerHook):
    """Writes the time of each iteration, that of its data, and the time that remains (eta), in seconds."""

    time_sec_tot: float
    time_sec_test_val: float

    def _before_epoch(self, runner: Any, mode: str = "train") -> None:
        self.t = perf_counter()

    def _before_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, mode: str = "train") -> None:
        runner.message_hub.update_scalar(f"{mode}/data_time", perf_counter() - self.t)

    def _after_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None, mode: str = "train"
    ) -> None:
        now = perf_counter()
        hub = runner.message_hub
        seconds = now - self.t
        self.t = now
        hub.update_scalar(f"{mode}/time", seconds)
        if mode == "train":
            first = self.start_iter
            done = runner.iter - first + 1
            total = runner.max_iters - first
            self.time_sec_tot = spent = self.time_sec_tot + seconds
        else:
            done = batch_idx + 1
            total = len(getattr(runner, f"{mode}_dataloader"))
            self.time_sec_test_val = spent = self.time_sec_test_val + seconds
        hub.update_info("eta", spent / done * (total - done))
