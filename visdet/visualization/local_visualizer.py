"""The visualizer of detection samples."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
import torch
from mmengine.structures import InstanceData

from visdet.checks.arguments import also_takes
from visdet.registry import VISUALIZERS
from visdet.structures import DetDataSample
from visdet.structures.class_names import class_palette
from visdet.structures.rotated_boxes import boxes_to_polygons

from .drawing import as_bytes, draw_boxes, enlarge
from .sample_visualizer import SampleVisualizer, threshold_of_each

_IGNORED_COLOUR = (150, 150, 150)


@VISUALIZERS.register_module()
class DetLocalVisualizer(SampleVisualizer):
    """Draws detection samples, with the ground truth on the left and the predictions on the right.

    ``classes`` and ``palette`` of ``dataset_meta`` are the names and the colours of the labels. Without them, labels
    are numbers. Small images are enlarged.

    Args:
        name: the name of the instance.
        image: an RGB image to start from.
        vis_backends: configs of the backends that store pictures and numbers, such as
            ``[dict(type='LocalVisBackend'), dict(type='TensorboardVisBackend')]``.
        save_dir: the folder of the backends.
        line_width: the width of the boxes' lines in pixels. By default it grows with the picture.
        min_side: images whose longer side is shorter are enlarged by a whole factor, at most 8, to at least this many
            pixels.

    Source: the interface is that of mmdet's DetLocalVisualizer.
    """

    captions: ClassVar[tuple[str, ...]] = ("ground truth", "prediction")
    sheet_columns: ClassVar[int] = 2

    @also_takes(bbox_color=None, text_color=..., mask_color=..., alpha=...)
    def __init__(
        self,
        name: str = "visualizer",
        image: np.ndarray | None = None,
        vis_backends: Sequence[dict] | None = None,
        save_dir: str | None = None,
        line_width: int | None = None,
        min_side: int = 480,
    ) -> None:
        super().__init__(name=name, image=image, vis_backends=vis_backends, save_dir=save_dir)
        self.line_width = line_width
        self.min_side = min_side

    def draw_sample(
        self,
        image: np.ndarray,
        data_sample: DetDataSample | None = None,
        draw_gt: bool = True,
        draw_pred: bool = True,
        pred_score_thr: float | Mapping[str, float] = 0.3,
    ) -> list[np.ndarray]:
        """Return the pictures of the ground truth and of the predictions of one sample, as far as it has them.

        Args:
            image: RGB, uint8 [H, W, 3], either the original image or the one that the pipeline made of it. Ground truth
                is in pixels of ``img_shape``, and predictions are in pixels of ``ori_shape``. ``scale_factor`` converts
                them to pixels of the image.
            data_sample: the sample to draw. With ``None``, the image is returned without boxes.
            draw_gt: draw ``gt_instances``, and ``ignored_instances`` in grey.
            draw_pred: draw ``pred_instances``.
            pred_score_thr: draw predictions with a higher score only, which may be a number for each class by its name.
        """
        image = as_bytes(image)
        canvas, factor = enlarge(image, self.min_side)
        if data_sample is None:
            return [canvas]
        sample = data_sample.detach().cpu()
        to_truth, to_predictions = _box_scales(sample, image.shape[:2])
        draw = self._draw
        pictures = []
        if draw_gt and "gt_instances" in sample:
            picture = canvas
            scale = to_truth * factor
            if "ignored_instances" in sample:
                picture = draw(picture, sample.ignored_instances, scale, _IGNORED_COLOUR)
            pictures.append(draw(picture, sample.gt_instances, scale))
        if draw_pred and "pred_instances" in sample:
            predictions = sample.pred_instances
            if len(predictions):
                labels = predictions.labels
                least = threshold_of_each(pred_score_thr, self._names(labels))
                predictions = predictions[predictions.scores > torch.from_numpy(least)[labels]]
            pictures.append(draw(canvas, predictions, to_predictions * factor))
        return pictures or [canvas]

    def _names(self, labels: torch.Tensor) -> Sequence[str]:
        """Return the names of the classes, which are numbers if the data set has none."""
        return (self.dataset_meta or {}).get("classes") or list(map(str, range(int(labels.max()) + 1)))

    def _draw(
        self, canvas: np.ndarray, instances: InstanceData, scale: np.ndarray, colour: tuple | None = None
    ) -> np.ndarray:
        if not len(instances):
            return canvas
        of_boxes = instances.labels
        labels = of_boxes.tolist()
        classes = self._names(of_boxes)
        palette = (self.dataset_meta or {}).get("palette") or class_palette(len(classes))
        texts = [classes[label] for label in labels]
        if "scores" in instances:
            texts = [
                f"{text} {score:.2f}" for text, score in zip(texts, instances.scores.tolist(), strict=True)
            ]
        colours = [colour or palette[label] for label in labels]
        boxes = instances.bboxes.to(torch.float64)
        if boxes.shape[1] == 5:
            boxes = boxes_to_polygons(boxes)
            scale = scale[:2]
        return draw_boxes(canvas, boxes.numpy() * scale, texts, colours, self.line_width)


def _box_scales(sample: DetDataSample, image_shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the factors [4] that convert true and predicted boxes to pixels of an image of ``image_shape``."""
    get = sample.get
    scale_factor = np.tile(get("scale_factor", (1.0, 1.0)), 2)
    img_shape = tuple(get("img_shape", image_shape))
    ori_shape = tuple(get("ori_shape", img_shape))
    ones = np.ones(4)
    if image_shape == img_shape != ori_shape:
        return ones, scale_factor
    if image_shape == ori_shape != img_shape:
        return 1 / scale_factor, ones
    return ones, ones
