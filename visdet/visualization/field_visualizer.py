"""Pictures of a scalar field in space: what was to fit, the fit, and the difference."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from mmengine.visualization import Visualizer
from torch import Tensor

from visdet.registry import VISUALIZERS

__all__ = ["FieldVisualizer", "slice_ellipses"]

_SLAB = 0.05  # of the extent, to either side of the middle, for scattered points


@VISUALIZERS.register_module()
class FieldVisualizer(Visualizer):
    """mmengine's visualizer with pictures of a field of Gaussians."""

    def add_field(
        self,
        name: str,
        points: Tensor,  # [M, 3]
        values: Tensor,  # [M]
        fit: Tensor,  # [M]
        shape: Sequence[int] | None = None,
        means: Tensor | None = None,  # [N, 3]
        covariances: Tensor | None = None,  # [N, 3, 3]
        num_ellipses: int = 200,
        out_file: str | None = None,
        step: int = 0,
    ) -> np.ndarray:
        """Draw truth, fit and error of three cuts; write the picture, hand it to the backends, and return it.

        Args:
            name: for the backends.
            points: places of ``values`` and ``fit``; voxel centres in the order of a volume where ``shape`` is given.
            shape: [D0, D1, D2] of the volume; None for scattered points, drawn where they are near a cut.
            means: Gaussians, those to draw first in front.
            covariances: theirs.
            num_ellipses: at most so many on a cut.
            out_file: where to write a PNG.
            step: the training iteration.

        Returns:
            uint8 [H, W, 3].
        """
        from matplotlib.backends.backend_agg import (
            FigureCanvasAgg,
        )  # slow to import, and a first picture is soon enough
        from matplotlib.figure import Figure

        places, truth, fitted = (tensor.double().numpy() for tensor in (points, values, fit))
        low, high = places.min(0), places.max(0)
        # Half a voxel: the picture ends at the faces of the outer ones.
        half = 0.0 if shape is None else 0.5 * float((high - low).max() / max(max(shape) - 1, 1)) or 0.5
        figure = Figure(figsize=(10, 10), layout="constrained", dpi=90)
        canvas = FigureCanvasAgg(figure)
        grid = figure.subplots(3, 3, squeeze=False)
        value_range = {"vmin": truth.min(), "vmax": truth.max(), "cmap": "viridis"}
        worst = max(float(np.abs(fitted - truth).max()), 1e-12)
        error_range = {"vmin": -worst, "vmax": worst, "cmap": "RdBu_r"}
        for axis, row in enumerate(grid):
            across, up = (k for k in range(3) if k != axis)
            if shape is None:
                position = (low[axis] + high[axis]) / 2
                chosen = np.abs(places[:, axis] - position) <= _SLAB * (high[axis] - low[axis])
            else:
                index = np.arange(len(places)).reshape(shape).take(shape[axis] // 2, axis)
                position, chosen = places[index.flat[0], axis], index.T
            columns = (("truth", truth, value_range), ("fit", fitted, value_range))
            for panel, (title, drawn, style) in zip(
                row, (*columns, ("error", fitted - truth, error_range)), strict=True
            ):
                if shape is None:
                    image = panel.scatter(
                        places[chosen, across], places[chosen, up], c=drawn[chosen], s=4, **style
                    )
                else:
                    box = np.stack([low - half, high + half])[:, [across, up]].T.ravel()
                    image = panel.imshow(drawn[chosen], origin="lower", extent=tuple(box), **style)
                panel.set_title(f"{title}, axis {axis} at {position:.3g}", fontsize=9)
                panel.set_aspect("equal")
                figure.colorbar(image, ax=panel, shrink=0.7)
            if means is not None and covariances is not None and num_ellipses > 0:
                ellipses = slice_ellipses(
                    means.double().numpy(), covariances.double().numpy(), axis, position
                )
                _add_ellipses(row[1], [part[:num_ellipses] for part in ellipses])
        canvas.draw()
        picture = np.asarray(canvas.buffer_rgba())[..., :3].copy()
        if out_file is not None:
            Path(out_file).parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(out_file)
        self.add_image(name, picture, step)
        return picture


def slice_ellipses(
    means: np.ndarray,  # [N, 3]
    covariances: np.ndarray,  # [N, 3, 3]
    axis: int,
    position: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return centres [K, 2], full axes [K, 2] (shorter first) and angles [K] of the ellipses that a plane cuts.

    The plane holds coordinate ``axis`` at ``position``; each ellipse is where it meets the ellipsoid of Mahalanobis
    distance 1. Ellipsoids that it misses are left out; the order stays. The angle is that of the first axis from the
    first remaining coordinate, in degrees.
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


def _add_ellipses(panel, ellipses: Sequence[np.ndarray]) -> None:
    from matplotlib.collections import EllipseCollection

    centres, sizes, angles = ellipses
    panel.add_collection(
        EllipseCollection(
            sizes[:, 0],
            sizes[:, 1],
            angles,
            units="xy",
            offsets=centres,
            offset_transform=panel.transData,
            facecolors="none",
            edgecolors="white",
            linewidths=0.5,
        ),
        autolim=False,
    )
