"""A hook that draws predictions beside the ground truth."""

import os
from typing import Any

import numpy as np
from mmengine.dist import get_rank
from mmengine.hooks import Hook
from mmengine.structures import BaseDataElement
from torch import Tensor

from visdet.checks.arguments import also_takes
from visdet.registry import HOOKS

from ..checkpoints.score_thresholds import (
    DEFAULT_THRESHOLD,
    measured_thresholds,
    thresholds_for,
    thresholds_of,
    told_thresholds,
)
from ..errors import ConfigError
from ..inference.picture_paths import PicturePaths
from ..inference.sample_images import image_of, is_bgr
from ..process.console import say


def val_pictures_folder(runner: Any) -> str:
    """Return the folder that a run's validation pictures go to."""
    return f"{runner.work_dir}/val_pictures"


@HOOKS.register_module()
class DetVisualizationHook(Hook):
    """Draws predictions during validation and testing with the visualizer of the model's family.

    During training, every validation draws one sheet of the first ``num_val_pictures`` images, with the ground truth
    beside the predictions. It is written to ``val_pictures/iter_<iteration>.png`` in the work_dir and to the
    visualizer's backends (TensorBoard), so that the same images can be followed through training.

    Args:
        draw: whether to draw the first image of every ``interval``-th validation batch, and every image of a test,
            into the visualizer's backends.
        interval: number of validation batches between two drawn images.
        score_thr: predictions with a higher score than this are drawn. By default, each class has the score of the best
            F1 in the newest validation, or in that of the checkpoint, and 0.3 if there is none.
        show: whether a window opens for each drawn image.
        wait_time: the time in seconds that a window stays open. With 0 it stays until a key is pressed.
        test_out_dir: folder for the pictures of a test, relative to the run's log folder. A distributed test writes
            those of the main process. Images with the same name get pictures with different names.
        num_val_pictures: number of images on the sheet. With 0 no sheet is drawn.

    Raises:
        ConfigError: before training, if the visualizer cannot draw sheets.

    Source: mmdet's hook of the same name; ``num_val_pictures`` is ours.
    """

    @also_takes(backend_args=None, file_client_args=None)
    def __init__(
        self,
        draw: bool = False,
        interval: int = 50,
        score_thr: float | None = None,
        show: bool = False,
        wait_time: float = 0.0,
        test_out_dir: str | None = None,
        num_val_pictures: int = 8,
    ) -> None:
        self.draw = draw
        self.interval = interval
        self.score_thr = score_thr
        self.show = show
        self.wait_time = wait_time
        self.test_out_dir = test_out_dir
        self.num_val_pictures = num_val_pictures
        self._sheet: list[tuple[np.ndarray, BaseDataElement]] = []
        self._images_tested = 0
        self._pictures = PicturePaths("")
        self._trains = False
        self._measured: dict[str, float] = {}
        self._origin = "there is no checkpoint"

    @property
    def draws_tests(self) -> bool:
        """Whether the images of a test are drawn."""
        return self.draw or self.test_out_dir is not None

    def _thresholds(self, runner: Any) -> float | dict[str, float]:
        given = self.score_thr
        measured = self._measured
        if given is not None:
            return given
        # Visualizers of other packages know one number only.
        is_ours = hasattr(runner.visualizer, "add_contact_sheet")
        return measured if measured and is_ours else DEFAULT_THRESHOLD

    def after_load_checkpoint(self, runner: Any, checkpoint: dict) -> None:
        """Take over the thresholds of the checkpoint's own validation."""
        self._measured, self._origin = measured_thresholds(checkpoint)

    def before_train(self, runner: Any) -> None:
        """Check that the visualizer can draw the sheets of validation."""
        self._trains = True
        if self.num_val_pictures and not hasattr(runner.visualizer, "add_contact_sheet"):
            raise ConfigError(
                f"DetVisualizationHook draws sheets with the visualizer of the model's family, but visualizer is "
                f"{type(runner.visualizer).__name__}; change it, or set "
                "default_hooks.visualization.num_val_pictures=0"
            )

    def before_val_epoch(self, runner: Any) -> None:
        """Start a sheet."""
        self._sheet = []

    def after_val_iter(
        self,
        runner: Any,
        batch_idx: int,
        data_batch: Any = None,
        outputs: Any = None,
    ) -> None:
        """Keep the first images for the sheet and, with ``draw``, draw the first image of some batches."""
        if get_rank() != 0:
            return
        pairs = list(zip(data_batch["inputs"], outputs, strict=True))
        for inputs, sample in pairs[: self.num_val_pictures - len(self._sheet)]:
            self._sheet.append((image_of(sample, inputs, is_bgr(runner.cfg)), sample.to("cpu")))
        if self.draw and batch_idx % self.interval == 0:
            self._draw(runner, *pairs[0], "val_img", runner.iter + batch_idx, None)

    def after_val_epoch(self, runner: Any, metrics: dict | None = None) -> None:
        """Draw the sheet."""
        if not self._sheet or not self._trains:
            return
        self._measured = thresholds_of(runner.val_evaluator.metrics)
        step = runner.iter
        thresholds = self._thresholds(runner)
        images, samples = zip(*self._sheet, strict=True)
        for out_file in (f"{val_pictures_folder(runner)}/iter_{step}.png", None):
            runner.visualizer.add_contact_sheet(
                "val_pictures",
                images,
                samples,
                pred_score_thr=thresholds,
                out_file=out_file,
                step=step,
            )

    def before_test_epoch(self, runner: Any) -> None:
        """Start counting images, and say by which thresholds they are drawn."""
        self._images_tested = 0
        folder = self.test_out_dir
        if self.draws_tests and self.score_thr is None:
            names = (runner.visualizer.dataset_meta or {}).get("classes", ())
            given = thresholds_for(names, self._measured)
            say(told_thresholds(names, given, self._origin))
        if folder is not None:
            self._pictures = PicturePaths(os.path.join(runner.log_dir, folder))

    def after_test_iter(
        self,
        runner: Any,
        batch_idx: int,
        data_batch: Any = None,
        outputs: Any = None,
    ) -> None:
        """Draw every image if ``draw`` or ``test_out_dir`` is set."""
        if not self.draws_tests:
            return
        for inputs, sample in zip(data_batch["inputs"], outputs, strict=True):
            self._images_tested = number = self._images_tested + 1
            path = None
            if self.test_out_dir is not None:
                source = sample.get("img_path") or str(sample.get("token", f"{number:06d}"))
                path = str(self._pictures.path_of(source, os.path.basename(source)))
            self._draw(runner, inputs, sample, "test_img", number, path)

    def _draw(
        self, runner: Any, inputs: Tensor, sample: BaseDataElement, name: str, step: int, path: str | None
    ) -> None:
        runner.visualizer.add_datasample(
            name,
            image_of(sample, inputs, is_bgr(runner.cfg)),
            data_sample=sample,
            show=self.show,
            wait_time=self.wait_time,
            out_file=path,
            pred_score_thr=self._thresholds(runner),
            step=step,
        )
