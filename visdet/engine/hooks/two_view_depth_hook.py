"""Pictures of predicted depth."""

import os

import numpy as np
from mmengine.dist import get_rank
from mmengine.hooks import Hook

from visdet.registry import HOOKS

from ..errors import ConfigError
from .visualization_hook import val_pictures_folder

__all__ = ["TwoViewDepthHook"]


@HOOKS.register_module()
class TwoViewDepthHook(Hook):
    """Writes a sheet of the first pairs of every validation and test: both views, true and predicted depth, the error.

    The sheets go to ``val_pictures/iter_<iteration>.png`` in the work_dir, or ``test_pictures.png`` in the run's log
    folder, and to the visualizer's backends.

    Args:
        num_pairs: rows of a sheet.

    Raises:
        ConfigError: before the run, the visualizer draws no such sheets.
    """

    def __init__(self, num_pairs: int = 6) -> None:
        self.num_pairs = num_pairs
        self._pairs: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def before_run(self, runner) -> None:
        """Check that the visualizer can do what validation will ask for."""
        if not hasattr(runner.visualizer, "add_depth_sheet"):
            raise ConfigError(
                "TwoViewDepthHook draws with TwoViewDepthVisualizer, but visualizer is "
                f"{type(runner.visualizer).__name__}"
            )

    def before_val_epoch(self, runner) -> None:
        """Start a sheet."""
        self._pairs = []

    def after_val_iter(self, runner, batch_idx: int, data_batch=None, outputs=None) -> None:
        """Keep the first pairs."""
        if get_rank() != 0:
            return
        for views, sample in zip(data_batch["inputs"], outputs, strict=True):
            if len(self._pairs) == self.num_pairs:
                break
            depths = (sample[name].float().cpu().numpy() for name in ("gt_depth", "pred_depth"))
            self._pairs.append((views.cpu().numpy(), *depths))

    def after_val_epoch(self, runner, metrics=None) -> None:
        """Write the sheet."""
        step = runner.iter
        self._write(
            runner, "val_pictures", os.path.join(val_pictures_folder(runner), f"iter_{step}.png"), step
        )

    before_test_epoch = before_val_epoch
    after_test_iter = after_val_iter

    def after_test_epoch(self, runner, metrics=None) -> None:
        """Write the sheet."""
        self._write(runner, "test_pictures", os.path.join(runner.log_dir, "test_pictures.png"), 0)

    def _write(self, runner, name: str, path: str, step: int) -> None:
        if self._pairs:
            for out_file in (path, None):
                runner.visualizer.add_depth_sheet(name, self._pairs, out_file=out_file, step=step)
        self._pairs = []
