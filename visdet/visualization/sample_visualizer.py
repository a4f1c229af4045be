"""What the visualizers of all families have in common: pictures of samples, one by one and on sheets."""

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from mmengine.dist import master_only
from mmengine.structures import BaseDataElement
from mmengine.visualization import Visualizer
from PIL import Image

from .drawing import contact_sheet, side_by_side

__all__ = ["SampleVisualizer"]


class SampleVisualizer(Visualizer):
    """Draws the samples of a family: a subclass draws one, this class shows, writes and arranges the pictures.

    Attributes:
        captions: the texts above the pictures of a sample, used where a sample has as many pictures.
        sheet_columns: the number of samples in a row of a sheet.
    """

    captions: ClassVar[tuple[str, ...]] = ()
    sheet_columns: ClassVar[int] = 1

    @classmethod
    def get_instance(cls, name: str = "visualizer", **arguments: Any) -> "SampleVisualizer":
        """Return the instance called ``name``, made with ``arguments`` if it is new. mmengine's needs the name."""
        return super().get_instance(name, **arguments)

    @abstractmethod
    def draw_sample(
        self,
        image: np.ndarray,
        data_sample: Any,
        draw_gt: bool = True,
        draw_pred: bool = True,
        pred_score_thr: float = 0.3,
    ) -> list[np.ndarray]:
        """Return the pictures of one sample, RGB uint8 [H, W, 3], side by side from left to right.

        Args:
            image: RGB [H, W, 3], or [V, H, W, 3] of several views, or the points [n, 3] of a field.
            data_sample: what to draw.
            draw_gt, draw_pred: draw the ground truth, and the predictions.
            pred_score_thr: draw predictions with a higher score only.
        """

    @master_only
    def add_datasample(
        self,
        name: str,
        image: np.ndarray,
        data_sample: BaseDataElement | None = None,
        draw_gt: bool = True,
        draw_pred: bool = True,
        show: bool = False,
        wait_time: float = 0,
        out_file: str | None = None,
        pred_score_thr: float = 0.3,
        step: int = 0,
    ) -> None:
        """Draw a sample, and show it, write it to ``out_file``, or hand it to the backends.

        Args:
            name: the picture's name in the backends and the window's title.
            image: see :meth:`draw_sample`, as are ``data_sample``, ``draw_gt``, ``draw_pred``,
                ``pred_score_thr``.
            show: open a window and wait ``wait_time`` seconds, or for a key if that is 0.
            out_file: write the picture here instead of to the backends.
            step: the step that backends file the picture under.
        """
        pictures = self.draw_sample(image, data_sample, draw_gt, draw_pred, pred_score_thr)
        captions = self.captions if len(pictures) == len(self.captions) else None
        drawn = side_by_side(pictures, captions) if len(pictures) > 1 else pictures[0]
        self._publish(name, drawn, show, wait_time, out_file, step)

    @master_only
    def add_contact_sheet(
        self,
        name: str,
        images: Sequence[np.ndarray],
        data_samples: Sequence[BaseDataElement],
        columns: int | None = None,
        pred_score_thr: float = 0.3,
        out_file: str | None = None,
        step: int = 0,
    ) -> None:
        """Draw many samples on one sheet, ``columns`` of them in a row.

        Args:
            name: see :meth:`add_datasample`, as are ``out_file`` and ``step``.
            images: one per sample, see :meth:`draw_sample`.
            data_samples: as many samples.
            columns: samples per row; default: ``sheet_columns``.
            pred_score_thr: draw predictions with a higher score only.
        """
        columns = self.sheet_columns if columns is None else columns
        samples = zip(images, data_samples, strict=True)
        drawn = [self.draw_sample(image, sample, pred_score_thr=pred_score_thr) for image, sample in samples]
        groups = [drawn[start : start + columns] for start in range(0, len(drawn), columns)]
        rows = [[picture for pictures in group for picture in pictures] for group in groups]
        has_all = all(len(pictures) == len(self.captions) for pictures in drawn)
        captions = self.captions * min(columns, len(drawn)) if has_all else None
        self._publish(name, contact_sheet(rows, captions), out_file=out_file, step=step)

    def _publish(
        self,
        name: str,
        drawn: np.ndarray,
        show: bool = False,
        wait_time: float = 0,
        out_file: str | None = None,
        step: int = 0,
    ) -> None:
        self.set_image(drawn)
        if show:
            self.show(drawn, win_name=name, wait_time=wait_time)
        if out_file is not None:
            path = Path(out_file)
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(drawn).save(path)
        else:
            # LocalVisBackend loses a picture whose name has a slash: it makes no folders.
            self.add_image(name.replace("/", "_"), drawn, step)
