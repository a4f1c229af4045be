"""The base class of all visualizers, which draws samples one by one or on sheets."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar

import numpy as np
from mmengine.dist import master_only
from mmengine.structures import BaseDataElement
from mmengine.visualization import MLflowVisBackend, Visualizer
from PIL import Image

from visdet.errors import MissingPackageError

from .drawing import contact_sheet, side_by_side, write_picture

_LONGEST_SIDE_ON_A_SHEET = 1200  # pixels; eight photos of 3 megapixels in full size took 1.4 GB


class _FigureToCome:
    """Stands for the matplotlib figure of a visualizer that has no picture yet."""

    def get_dpi(self) -> float:
        return 0.0  # ``set_image`` gives the visualizer the resolution of the real figure.


class SampleVisualizer(Visualizer):
    """Draws the samples of a family. A subclass draws one sample, and this class shows, writes and arranges pictures.

    Attributes:
        captions: the texts above the pictures of a sample. They are used if a sample has as many pictures.
        sheet_columns: the number of samples in a row of a sheet.
    """

    captions: ClassVar[tuple[str, ...]] = ()
    sheet_columns: ClassVar[int] = 1
    fig_save: Any  # the figure that mmengine's drawing functions draw on

    @classmethod
    def get_instance(cls, name: str = "visualizer", **arguments: Any) -> "SampleVisualizer":
        """Return the instance ``name``, which is made with ``arguments`` if it is new. mmengine requires the name."""
        return super().get_instance(name, **arguments)

    def _initialize_fig(self, fig_cfg: dict[str, Any]) -> tuple[None, _FigureToCome, None]:
        # mmengine makes a figure here, in __init__. A run would import matplotlib for it before its first iteration.
        return None, _FigureToCome(), None

    @master_only
    def set_image(self, image: np.ndarray) -> None:
        """Make ``image``, RGB uint8 [H, W, 3], the picture that mmengine's drawing functions draw on."""
        if isinstance(self.fig_save, _FigureToCome):
            self.fig_save_canvas, self.fig_save, self.ax_save = super()._initialize_fig(self.fig_save_cfg)
            self.dpi = self.fig_save.get_dpi()
        super().set_image(image)

    @master_only
    def add_config(self, config: Any, **arguments: Any) -> None:
        """Give the config to all backends, which is the first that a run does with them.

        Raises:
            MissingPackageError: the package of a backend, such as wandb, is not installed.
        """
        try:
            super().add_config(config, **arguments)
        except ImportError as error:
            raise MissingPackageError(
                f"visualizer.vis_backends has a backend whose package is missing: {error}"
            ) from error

    @master_only
    def add_image(self, name: str, image: np.ndarray, step: int = 0) -> None:
        """Give a picture to all backends. MLflow reads its format from the name; others add a suffix of their own."""
        for backend in self._vis_backends.values():
            suffix = ".png" if isinstance(backend, MLflowVisBackend) else ""
            backend.add_image(name + suffix, image, step)

    @abstractmethod
    def draw_sample(
        self,
        image: np.ndarray,
        data_sample: Any,
        draw_gt: bool = True,
        draw_pred: bool = True,
        pred_score_thr: float | Mapping[str, float] = 0.3,
    ) -> list[np.ndarray]:
        """Return the pictures of one sample, RGB uint8 [H, W, 3], in the order from left to right.

        Args:
            image: RGB [H, W, 3], or [V, H, W, 3] for several views.
            data_sample: the sample to draw.
            draw_gt, draw_pred: whether the ground truth and the predictions are drawn.
            pred_score_thr: predictions with a lower score are not drawn. It may be a number for each class by its name;
                other classes then have 0.3.
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
        pred_score_thr: float | Mapping[str, float] = 0.3,
        step: int = 0,
    ) -> None:
        """Draw a sample, and show the picture, write it to ``out_file`` or pass it to the backends.

        Args:
            name: the name of the picture in the backends, and the title of the window.
            image, data_sample, draw_gt, draw_pred, pred_score_thr: see :meth:`draw_sample`.
            show: open a window.
            wait_time: the seconds for which the window stays open. With 0, it waits for a key.
            out_file: the file to write instead of passing the picture to the backends.
            step: the step under which the backends store the picture.
        """
        pictures = self.draw_sample(image, data_sample, draw_gt, draw_pred, pred_score_thr)
        number = len(pictures)
        captions = self.captions
        shown = captions if number == len(captions) else None
        drawn = side_by_side(pictures, shown) if number > 1 else pictures[0]
        self._publish(name, drawn, show, wait_time, out_file, step)

    @master_only
    def add_contact_sheet(
        self,
        name: str,
        images: Sequence[np.ndarray],
        data_samples: Sequence[BaseDataElement],
        columns: int | None = None,
        pred_score_thr: float | Mapping[str, float] = 0.3,
        out_file: str | None = None,
        step: int = 0,
    ) -> None:
        """Draw several samples on one sheet, on which a picture has at most 1200 pixels a side.

        Args:
            name, out_file, step: see :meth:`add_datasample`.
            images: one image per sample; see :meth:`draw_sample`.
            data_samples: the samples.
            columns: the number of samples per row. The default is ``sheet_columns``.
            pred_score_thr: predictions with a lower score are not drawn.
        """
        columns = columns or self.sheet_columns
        drawn = []
        for image, sample in zip(images, data_samples, strict=True):
            pictures = self.draw_sample(image, sample, pred_score_thr=pred_score_thr)
            drawn.append([_shrunk(picture) for picture in pictures])
        number = len(drawn)
        starts = range(0, number, columns)
        rows = [list(chain.from_iterable(drawn[start : start + columns])) for start in starts]
        captions = self.captions
        has_all = all(len(pictures) == len(captions) for pictures in drawn)
        shown = captions * min(columns, number) if has_all else None
        self._publish(name, contact_sheet(rows, shown), out_file=out_file, step=step)

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
            write_picture(out_file, drawn)
        else:
            # LocalVisBackend loses a picture whose name has a slash, because it makes no folders.
            self.add_image(name.replace("/", "_"), drawn, step)


def threshold_of_each(
    thresholds: float | Mapping[str, float], classes: Sequence[str], default: float = 0.3
) -> np.ndarray:
    """Return the threshold of each class [C] from a number, or from numbers by the names of classes."""
    if isinstance(thresholds, Mapping):
        return np.array([thresholds.get(name, default) for name in classes], dtype=np.float32)
    return np.full(len(classes), thresholds, dtype=np.float32)


def _shrunk(picture: np.ndarray) -> np.ndarray:
    """Return a picture as it is drawn on a sheet, with its longer side shortened if it is too long."""
    image = Image.fromarray(picture)
    image.thumbnail((_LONGEST_SIDE_ON_A_SHEET, _LONGEST_SIDE_ON_A_SHEET))
    return np.asarray(image)
