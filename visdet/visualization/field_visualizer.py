"""The visualizer of scalar fields in space, which draws the true field, the fitted field and the error of the fit."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from mmengine.structures import InstanceData

from visdet.registry import VISUALIZERS
from visdet.structures import FieldDataSample

from .sample_visualizer import SampleVisualizer

# Scattered points are drawn up to this fraction of the extent to either side of the middle.
_SLAB = 0.05


@VISUALIZERS.register_module()
class FieldVisualizer(SampleVisualizer):
    """Draws the truth, the fit and its error in three cuts through the middle of a field, one across each axis.

    Of a volume, the voxels in the cut are drawn. Of scattered points, those near the cut are drawn. The picture of the
    fit also shows the ellipses in which the plane cuts the Gaussians' ellipsoids of one standard deviation.

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
        for axis, row in enumerate(grid):
            cut = _Cut(image.astype(np.float64), sample.get("volume_shape"), axis)
            for panel, (title, values, style) in zip(row, columns, strict=True):
                drawn = cut.draw(panel, title, values, style)
                figure.colorbar(drawn, ax=panel, shrink=0.7)
                if title == "fit" and "pred_gaussians" in sample:
                    cut.draw_ellipses(panel, sample.pred_gaussians, self.num_ellipses)
        canvas.draw()
        return [np.asarray(canvas.buffer_rgba())[..., :3].copy()]


def _columns(sample: FieldDataSample, draw_gt: bool, draw_pred: bool) -> list[tuple[str, np.ndarray, dict]]:
    """Return the title, the values [n], their range and the colour map of each column of a picture.

    Truth and fit have the range of the truth, or of the fit without a truth.
    """
    draws_fit = draw_pred and "pred_field" in sample
    draws_truth = "gt_field" in sample and (draw_gt or not draws_fit)
    if not draws_fit and not draws_truth:
        raise ValueError("FieldVisualizer: data_sample has neither gt_field nor pred_field to draw")
    values = [sample.gt_field.double().numpy()] if draws_truth else []
    values += [sample.pred_field.double().numpy()] if draws_fit else []
    style = {"vmin": values[0].min(), "vmax": values[0].max(), "cmap": "viridis"}
    titles = ["truth"] * draws_truth + ["fit"] * draws_fit
    columns = [(title, drawn, style) for title, drawn in zip(titles, values, strict=True)]
    if len(values) == 2:
        error = values[1] - values[0]
        worst = max(float(np.abs(error).max()), 1e-12)
        columns.append(("error", error, {"vmin": -worst, "vmax": worst, "cmap": "RdBu_r"}))
    return columns


class _Cut:
    """A plane through the middle of points, across an axis.

    Args:
        points: [n, 3]. If ``shape`` is given, they are the centres of voxels in the order of the volume.
        shape: the shape [D0, D1, D2] of the volume, or None for scattered points.
        axis: the axis across which the plane lies, 0, 1 or 2.
    """

    def __init__(self, points: np.ndarray, shape: Sequence[int] | None, axis: int) -> None:
        self.points, self.axis = points, axis
        self.rest = [k for k in range(3) if k != axis]
        self.is_volume = shape is not None
        low, high = points.min(0), points.max(0)
        if shape is None:
            self.position = (low[axis] + high[axis]) / 2
            self.chosen = np.abs(points[:, axis] - self.position) <= _SLAB * (high[axis] - low[axis])
            return
        index = np.arange(len(points)).reshape(shape).take(shape[axis] // 2, axis)
        self.position, self.chosen = points[index.flat[0], axis], index.T
        # The picture ends at the faces of the outer voxels, which are half a voxel from their centres.
        half = 0.5 * float((high - low).max() / max(max(shape) - 1, 1)) or 0.5
        self.extent = tuple(np.stack([low - half, high + half])[:, self.rest].T.ravel())

    def draw(self, panel: Any, title: str, values: np.ndarray, style: dict[str, Any]) -> Any:
        """Draw the values of a column into a panel, and return matplotlib's artist, from which a colour bar is made."""
        panel.set_title(f"{title}, axis {self.axis} at {self.position:.3g}", fontsize=9)
        panel.set_aspect("equal")
        drawn = values[self.chosen]
        if self.is_volume:
            return panel.imshow(drawn, origin="lower", extent=self.extent, **style)
        across, up = self.points[self.chosen][:, self.rest].T
        return panel.scatter(across, up, c=drawn, s=4, **style)

    def draw_ellipses(self, panel: Any, gaussians: InstanceData, at_most: int) -> None:
        """Draw the first ``at_most`` Gaussians that meet the plane."""
        from matplotlib.collections import EllipseCollection

        means, covariances = gaussians.means.double().numpy(), gaussians.covariances.double().numpy()
        cut = slice_ellipses(means, covariances, self.axis, self.position)
        centres, sizes, angles = (part[:at_most] for part in cut)
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
