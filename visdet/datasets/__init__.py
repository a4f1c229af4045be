"""Data sets, their transforms and their samplers."""

from visdet.train_extra import require_train_extra

require_train_extra(__name__)

from . import samplers, transforms
from .coco import CocoDataset
from .info_files import load_infos, save_infos
from .nuscenes import NuScenes3DDetTrackDataset
from .synthetic import DrivingScenesDataset, ShapesDataset, TwoViewPairs, make_driving_scenes, make_shapes
from .volume import FieldDataset, PointSampleDataset, VolumeDataset, make_volume

__all__ = [
    "CocoDataset",
    "DrivingScenesDataset",
    "FieldDataset",
    "NuScenes3DDetTrackDataset",
    "PointSampleDataset",
    "ShapesDataset",
    "TwoViewPairs",
    "VolumeDataset",
    "load_infos",
    "make_driving_scenes",
    "make_shapes",
    "make_volume",
    "samplers",
    "save_infos",
    "transforms",
]
