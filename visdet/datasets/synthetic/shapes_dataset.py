"""The synthetic shapes data set."""

from typing import Any

from visdet.registry import DATASETS
from visdet.structures.class_names import class_palette

from ..coco import CocoDataset
from .drawn_folder import claim_folder
from .shapes import ROTATED_SHAPE_CLASSES, SHAPE_CLASSES, make_shapes


@DATASETS.register_module()
class ShapesDataset(CocoDataset):
    """A CocoDataset of the shapes images, which are drawn first if ``data_root`` does not hold them.

    The six classes (circle, square, triangle, star, cross, ring) differ in their outlines only. Colours, textures,
    sizes and occlusion are random, and the background is noise. :func:`make_shapes` describes the files.

    Args:
        generator: arguments of :func:`make_shapes` other than the folder, such as ``num_train``, ``num_val``,
            ``image_size`` and ``seed``. All data sets and metrics that share a ``data_root`` must have the same.
        rotated: draw the stretched shapes with turned boxes (ellipse, rectangle, triangle, star, cross, ring), and read
            them with ``box_type='rbox'`` by default.
        **coco_arguments: arguments of CocoDataset.
    """

    METAINFO: dict[str, Any] = {"classes": SHAPE_CLASSES, "palette": class_palette(len(SHAPE_CLASSES))}

    def __init__(self, generator: dict | None = None, rotated: bool = False, **coco_arguments: Any) -> None:
        self._generator = dict(generator or {})
        if rotated:
            self._generator["rotated"] = True
            metainfo = {"classes": ROTATED_SHAPE_CLASSES, **(coco_arguments.get("metainfo") or {})}
            coco_arguments = {"box_type": "rbox", **coco_arguments, "metainfo": metainfo}
        super().__init__(**coco_arguments)

    def full_init(self) -> None:
        if not self._fully_initialized:
            folder = self.data_root
            make_shapes(folder, **self._generator)
            claim_folder(self, folder)
        super().full_init()
