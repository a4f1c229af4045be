"""The visualizer of pairs of views with depth."""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from PIL import Image

from visdet.registry import VISUALIZERS
from visdet.structures import TwoViewDataSample

from .sample_visualizer import SampleVisualizer

_FULL_ERROR = 0.2
_CELL_WIDTH = 256  # of a picture, in pixels


@VISUALIZERS.register_module()
class TwoViewDepthVisualizer(SampleVisualizer):
    """Draws each pair of views in a row, with the true depth, the predicted depth and the relative error.

    The colours of the depths are those of the map 'turbo' over the inverse depth, from the farthest to the nearest.
    """

    captions: ClassVar[tuple[str, ...]] = (
        "reference view",
        "source view",
        "true depth",
        "predicted depth",
        "error, white: 20 %",
    )

    def draw_sample(
        self,
        image: np.ndarray,
        data_sample: TwoViewDataSample,
        draw_gt: bool = True,
        draw_pred: bool = True,
        pred_score_thr: float | Mapping[str, float] = 0.3,
    ) -> list[np.ndarray]:
        """Return the pictures of a pair, which are both views, the true depth, the predicted depth and its error.

        Args:
            image: RGB [2, H, W, 3].
            data_sample: a sample with ``gt_depth``.
            draw_gt: not used, because the true depth is always drawn.
            draw_pred: whether ``pred_depth`` and its error are drawn, if the sample has a prediction.
            pred_score_thr: not used.
        """
        sample = data_sample.detach().cpu()
        truth = sample.gt_depth.float().numpy()
        views = image.clip(0, 255).astype(np.uint8)
        height, width = views.shape[1:3]
        size = (_CELL_WIDTH, round(_CELL_WIDTH * height / width))
        inverse = 1 / truth
        low, high = inverse.min(), inverse.max()
        import matplotlib  # slow to import, and not needed before the first picture

        colour = matplotlib.colormaps["turbo"]

        def in_colour(depth: np.ndarray) -> np.ndarray:
            share = ((1 / depth - low) / max(high - low, 1e-9)).clip(0, 1)
            return (255 * colour(share)[..., :3]).round().astype(np.uint8)

        pictures = [*views, in_colour(truth)]
        if draw_pred and "pred_depth" in sample:
            predicted = sample.pred_depth.float().numpy()
            error = (np.abs(predicted - truth) / truth / _FULL_ERROR).clip(0, 1)
            grey = np.repeat((255 * error).round().astype(np.uint8)[..., None], 3, axis=-1)
            pictures += [in_colour(predicted), grey]
        return [
            np.asarray(Image.fromarray(picture).resize(size, Image.Resampling.NEAREST))
            for picture in pictures
        ]
