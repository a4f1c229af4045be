"""Pictures of two views and their depth."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from mmengine.dist import master_only
from mmengine.visualization import Visualizer
from PIL import Image

from visdet.registry import VISUALIZERS

from .drawing import contact_sheet

__all__ = ["TwoViewDepthVisualizer"]

_CAPTIONS = ("reference view", "source view", "true depth", "predicted depth", "error, white: 20 %")
_FULL_ERROR = 0.2


@VISUALIZERS.register_module()
class TwoViewDepthVisualizer(Visualizer):
    """Draws pairs of views in rows: both views, true and predicted depth (bright is near), and the relative error."""

    def draw_pair(
        self, views: np.ndarray, gt_depth: np.ndarray, pred_depth: np.ndarray, cell_width: int = 256
    ) -> list[np.ndarray]:
        """Return the five pictures of a pair, RGB uint8, ``cell_width`` pixels wide.

        Args:
            views: uint8 [2, 3, H, W], RGB.
            gt_depth: [h, w], positive.
            pred_depth: [h, w], drawn in the colours of ``gt_depth``'s range.
        """
        height, width = views.shape[-2:]
        size = (cell_width, round(cell_width * height / width))
        inverse = 1 / gt_depth
        low, high = inverse.min(), inverse.max()
        import matplotlib  # slow to import, and a first picture is soon enough

        colour = matplotlib.colormaps["turbo"]

        def in_colour(depth: np.ndarray) -> np.ndarray:
            share = ((1 / depth - low) / max(high - low, 1e-9)).clip(0, 1)
            return (255 * colour(share)[..., :3]).round().astype(np.uint8)

        error = (np.abs(pred_depth - gt_depth) / gt_depth / _FULL_ERROR).clip(0, 1)
        grey = np.repeat((255 * error).round().astype(np.uint8)[..., None], 3, axis=-1)
        pictures = [*views.transpose(0, 2, 3, 1), in_colour(gt_depth), in_colour(pred_depth), grey]
        return [
            np.asarray(Image.fromarray(picture).resize(size, Image.Resampling.NEAREST))
            for picture in pictures
        ]

    @master_only
    def add_depth_sheet(
        self,
        name: str,
        pairs: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]],
        out_file: str | None = None,
        step: int = 0,
    ) -> None:
        """Write one sheet of pairs (:meth:`draw_pair`'s arrays) to a file, or else to the backends.

        Args:
            name: the sheet's name in the backends.
            pairs: (views, gt_depth, pred_depth) of each row.
            out_file: write it here instead.
            step: the step that backends file it under.
        """
        sheet = contact_sheet([self.draw_pair(*pair) for pair in pairs], _CAPTIONS)
        if out_file is None:
            self.add_image(name, sheet, step)
            return
        Path(out_file).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(sheet).save(out_file)
