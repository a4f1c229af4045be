"""The visualizer of driving samples."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from visdet.registry import VISUALIZERS
from visdet.structures import DrivingDataSample

from .drawing import as_bytes
from .driving_views import draw_frame, scene_of_prediction, scene_of_truth
from .sample_visualizer import SampleVisualizer, threshold_of_each


@VISUALIZERS.register_module()
class DrivingVisualizer(SampleVisualizer):
    """Draws frames of several cameras. A picture shows the camera views with the boxes, and a top view of the scene.

    ``dataset_meta['classes']`` names the labels.

    Args:
        name: the name of the instance.
        map_score_thr: predicted lines with a lower score are not drawn.
        reach_m: the distance in metres that the top view shows in every direction.
        arguments: as in mmengine's Visualizer.
    """

    def __init__(
        self, name: str = "visualizer", map_score_thr: float = 0.4, reach_m: float = 32.0, **arguments: Any
    ) -> None:
        super().__init__(name=name, **arguments)
        self.map_score_thr = map_score_thr
        self.reach_m = reach_m

    def draw_sample(
        self,
        image: np.ndarray,
        data_sample: DrivingDataSample,
        draw_gt: bool = True,
        draw_pred: bool = True,
        pred_score_thr: float | Mapping[str, float] = 0.3,
    ) -> list[np.ndarray]:
        """Return one picture of a frame; see :func:`draw_frame`.

        Args:
            image: RGB [V, H, W, 3], the views as the model saw them.
            data_sample: a sample with ``projection_mat``. If it has no predictions, the ground truth is drawn.
            draw_gt, draw_pred: whether the ground truth and the predictions are drawn.
            pred_score_thr: predicted boxes with a lower score are not drawn. It may be a number for each class by its
                name, of boxes and of lines.
        """
        sample = data_sample.numpy()
        get = sample.get
        views = as_bytes(image)
        has_predictions = any(name.startswith("pred_") for name, _ in sample.items())
        prediction = None
        meta: Any = self.dataset_meta
        classes = meta["classes"]
        if draw_pred and has_predictions:
            least = self.map_score_thr
            of_lines: float | np.ndarray = least
            if isinstance(pred_score_thr, Mapping) and "map_classes" in meta:
                of_lines = threshold_of_each(pred_score_thr, meta["map_classes"], least)
            prediction = scene_of_prediction(sample, threshold_of_each(pred_score_thr, classes), of_lines)
        picture = draw_frame(
            views,
            sample.projection_mat,
            get("cam_names", list(map(str, range(len(views))))),
            classes,
            prediction,
            scene_of_truth(sample) if draw_gt or prediction is None else None,
            self.reach_m,
            title=str(get("token", "")),
        )
        return [picture]
