"""Data sets, their transforms and their samplers."""

from typing import TYPE_CHECKING

from visdet.lazy_names import lazy_names
from visdet.train_extra import require_train_extra

require_train_extra(__name__)

if TYPE_CHECKING:
    from . import samplers, transforms
    from .coco import CocoDataset
    from .info_files import load_infos, save_infos
    from .nuscenes import NuScenes3DDetTrackDataset
    from .synthetic import DrivingScenesDataset, ShapesDataset, make_driving_scenes, make_shapes
else:
    __all__, __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "CocoDataset": "coco",
            "DrivingScenesDataset": "synthetic",
            "load_infos": "info_files",
            "make_driving_scenes": "synthetic",
            "make_shapes": "synthetic",
            "NuScenes3DDetTrackDataset": "nuscenes",
            "samplers": "samplers",
            "save_infos": "info_files",
            "ShapesDataset": "synthetic",
            "transforms": "transforms",
        },
    )
