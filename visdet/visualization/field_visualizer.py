"""The visualizer of scalar fields in space, which draws the true field, the fitted field and the error of the fit."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from mmengine.structures import InstanceData

from visdet.registry import VISUALIZERS
from visdet.structures import FieldDataSample

from .sample_visualizer import SampleVisualizer

# Points are drawn up to this fraction of the extent to either side of the middle, as squares that fill a panel.
_SLAB = 0.05
_PANEL_PT2 = 6e4


@VISUALIZERS.register_module()
class FieldVisualizer(SampleVisualizer):
    """Draws the truth, the fit and its error in three cuts through the middle of a field, one across each axis.

    The points near the cut are drawn. The picture of the fit also shows the ellipses in which the plane cuts the
    Gaussians' ellipsoids of one standard deviation.

    Args:
        name: the name of the instance.
        num_ellipses: the number of Gaussians drawn in a cut, which are the heaviest ones that meet its plane.
        arguments: as in mmengine's Visualizer.
    """

    def __init__(self, name: str = "visualizer", num_ellipses: int = 200, **arguments: Any) -> None:
        super().__init__(name=name, **arguments)
        self.num_ellipses = num_ellipses

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
            data_sample: a sample with ``gt_field``, ``pred_field`` or both. The ellipses are those of
                ``pred_gaussians``.
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
                if title == "fit" and "pred_gaussians" in sample:
                    self._draw_ellipses(panel, sample.pred_gaussians, axis, middle[axis])
        canvas.draw()
        return [np.asarray(canvas.buffer_rgba())[..., :3].copy()]

    def _draw_ellipses(self, panel: Any, gaussians: InstanceData, axis: int, position: float) -> None:
        """Draw the first Gaussians that meet the plane at a position of an axis."""
        from matplotlib.collections import EllipseCollection

        means, covariances = gaussians.means.double().numpy(), gaussians.covariances.double().numpy()
        cut = slice_ellipses(means, covariances, axis, position)
        centres, sizes, angles = (part[: self.num_ellipses] for part in cut)
        drawn = EllipseCollection(
            *(sizes[:, 0], sizes[:, 1], angles),
            units="xy",
            offsets=centres,
            offset_transform=panel.transData,
            facecolors="none",
            edgecolors="white",
            linewidths=0.5,
        )
        panel.add_collection(drawn, autolim=False)


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


def slice_ellipses(
    means: np.ndarray,  # [N, 3]
    covariances: np.ndarray,  # [N, 3, 3]
    axis: int,
    position: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return centres [K, 2], full axes [K, 2] (shorter first) and angles [K] of the ellipses that a plane cuts.

    In the plane, coordinate ``axis`` equals ``position``. Each ellipse is the cut through the ellipsoid of Mahalanobis
    distance 1. Ellipsoids that do not meet the plane are left out, and the order stays. The angle, in degrees, is that
    between the first axis and the first remaining coordinate.
    """
    rest = [k for k in range(3) if k != axis]
    variance = covariances[:, axis, axis]
    offset = position - means[:, axis]
    meets = offset**2 < variance
    variance, offset, covariances = variance[meets], offset[meets], covariances[meets]
    along = covariances[:, rest, axis]
    centres = means[meets][:, rest] + along * (offset / variance)[:, None]
    shapes = covariances[:, rest][:, :, rest] - along[:, :, None] * along[:, None] / variance[:, None, None]
    shapes = shapes * (1 - offset**2 / variance)[:, None, None]
    sizes, axes = np.linalg.eigh(shapes)
    angles = np.degrees(np.arctan2(axes[:, 1, 0], axes[:, 0, 0]))
    return centres, 2 * np.sqrt(np.maximum(sizes, 0)), angles
