"""The visualizer of scalar fields in space, which draws the true field, the fitted field and the error of the fit."""

from collections.abc import Mapping

import numpy as np

from visdet.registry import VISUALIZERS
from visdet.structures import FieldDataSample

from .sample_visualizer import SampleVisualizer

# Points are drawn up to this fraction of the extent to either side of the middle, as squares that fill a panel.
_SLAB = 0.05
_PANEL_PT2 = 6e4


@VISUALIZERS.register_module()
class FieldVisualizer(SampleVisualizer):
    """Draws the truth, the fit and its error in three cuts through the middle of a field, one across each axis.

    The points near the cut are drawn.

    Args:
        arguments: as in mmengine's Visualizer.
    """

    def draw_sample(
        self,
        image: np.ndarray,
        data_sample: FieldDataSample,
        draw_gt: bool = True,
        draw_pred: bool = True,
        pred_score_thr: float | Mapping[str, float] = 0.3,
    ) -> list[np.ndarray]:
        """Return a picture, uint8 [900, W, 3]. It has a row per cut, and columns for the truth, the fit and its error.

        Args:
            image: the points [n, 3] of the sample.
            data_sample: a sample with ``gt_field``, ``pred_field`` or both.
            draw_gt: whether the truth and the error are drawn. If no fit is drawn, the truth is drawn in any case.
            draw_pred: whether the fit is drawn, if the sample has a prediction.
            pred_score_thr: not used.

        Raises:
            ValueError: the sample has neither ``gt_field`` nor a prediction to draw.
        """
        # matplotlib is slow to import, and it is not needed before the first picture.
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        sample = data_sample.detach().cpu()
        columns = _columns(sample, draw_gt, draw_pred)
        figure = Figure(figsize=(10 * len(columns) / 3, 10), layout="constrained", dpi=90)
        canvas = FigureCanvasAgg(figure)
        grid = figure.subplots(3, len(columns), squeeze=False)
        points = image.astype(np.float64)
        middle, extent = (points.min(0) + points.max(0)) / 2, np.ptp(points, axis=0)
        for axis, row in enumerate(grid):
            distance = np.abs(points[:, axis] - middle[axis])
            chosen = distance <= max(_SLAB * extent[axis], distance.min())
            across, up = np.delete(points[chosen], axis, axis=1).T
            size = _PANEL_PT2 / len(across)
            for panel, (title, values, style) in zip(row, columns, strict=True):
                panel.set_title(f"{title}, axis {axis} at {middle[axis]:.3g}", fontsize=9)
                panel.set_aspect("equal")
                drawn = panel.scatter(across, up, c=values[chosen], s=size, marker="s", **style)
                figure.colorbar(drawn, ax=panel, shrink=0.7)
        canvas.draw()
        return [np.asarray(canvas.buffer_rgba())[..., :3].copy()]


def _columns(sample: FieldDataSample, draw_gt: bool, draw_pred: bool) -> list[tuple[str, np.ndarray, dict]]:
    """Return the title, the values [n], their range and the colour map of each column of a picture.

    Truth and fit have the range of the truth, or of the fit without a truth.
    """
    shown: dict[str, np.ndarray] = {}
    if draw_pred and "pred_field" in sample:
        shown["fit"] = sample.pred_field.double().numpy()
    if "gt_field" in sample and (draw_gt or not shown):
        shown = {"truth": sample.gt_field.double().numpy(), **shown}
    if not shown:
        raise ValueError("FieldVisualizer: data_sample has neither gt_field nor pred_field to draw")
    first, *others = shown.values()
    style = {"vmin": first.min(), "vmax": first.max(), "cmap": "viridis"}
    columns = [(title, values, style) for title, values in shown.items()]
    for fit in others:
        error = fit - first
        worst = max(float(np.abs(error).max()), 1e-12)
        columns.append(("error", error, {"vmin": -worst, "vmax": worst, "cmap": "RdBu_r"}))
    return columns
