"""A version of mmengine's timer whose clock goes on evenly, also if somebody sets the clock of the machine."""

import time
from typing import Any

from mmengine.hooks import IterTimerHook as _IterTimerHook

from visdet.registry import HOOKS


@HOOKS.register_module()
class IterTimerHook(_IterTimerHook):
    """Writes the time of each iteration, that of its data, and the time that remains (eta), in seconds."""

    def _before_epoch(self, runner: Any, mode: str = "train") -> None:
        self.t = time.perf_counter()

    def _before_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, mode: str = "train") -> None:
        runner.message_hub.update_scalar(f"{mode}/data_time", time.perf_counter() - self.t)

    def _after_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None, mode: str = "train"
    ) -> None:
        now = time.perf_counter()
        seconds, self.t = now - self.t, now
        runner.message_hub.update_scalar(f"{mode}/time", seconds)
        if mode == "train":
            self.time_sec_tot += seconds
            done, to_do = runner.iter - self.start_iter + 1, runner.max_iters - runner.iter - 1
            runner.message_hub.update_info("eta", self.time_sec_tot / done * to_do)
            return
        self.time_sec_test_val += seconds
        loader = runner.val_dataloader if mode == "val" else runner.test_dataloader
        done = batch_idx + 1
        runner.message_hub.update_info("eta", self.time_sec_test_val / done * (len(loader) - done))
