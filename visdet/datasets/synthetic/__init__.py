"""Data sets that are drawn instead of downloaded, for demos and tests."""

from typing import TYPE_CHECKING

from visdet.lazy_names import lazy_names

if TYPE_CHECKING:
    from .driving_scenes import DrivingScenesDataset, make_driving_scenes
    from .shapes import make_shapes
    from .shapes_dataset import ShapesDataset
else:
    __all__, __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "DrivingScenesDataset": "driving_scenes",
            "make_driving_scenes": "driving_scenes",
            "make_shapes": "shapes",
            "ShapesDataset": "shapes_dataset",
        },
    )
