"""Transforms of data pipelines, which work on torchvision's tv_tensors."""

from .base import BaseTransform
from .driving import (
    BBoxRotation,
    CircleObjectRangeFilter,
    InstanceNameFilter,
    NuScenesSparse4DAdaptor,
    PackDrivingInputs,
    VectorizeMap,
)
from .formatting import PackDetInputs
from .geometric import Pad, RandomChoiceResize, RandomCrop, RandomFlip, RandomResize, Resize
from .loading import FilterAnnotations, LoadAnnotations, LoadImageFromFile
from .multi_view import (
    LoadMultiViewImageFromFiles,
    LoadPointsFromFile,
    MultiScaleDepthMapGenerator,
    NormalizeMultiviewImage,
    PhotoMetricDistortionMultiViewImage,
    ResizeCropFlipImage,
)
from .photometric import PhotoMetricDistortion
from .wrappers import RandomChoice, TorchvisionTransform

__all__ = [
    "BBoxRotation",
    "BaseTransform",
    "CircleObjectRangeFilter",
    "FilterAnnotations",
    "InstanceNameFilter",
    "LoadAnnotations",
    "LoadImageFromFile",
    "LoadMultiViewImageFromFiles",
    "LoadPointsFromFile",
    "MultiScaleDepthMapGenerator",
    "NormalizeMultiviewImage",
    "NuScenesSparse4DAdaptor",
    "PackDetInputs",
    "PackDrivingInputs",
    "Pad",
    "PhotoMetricDistortion",
    "PhotoMetricDistortionMultiViewImage",
    "RandomChoice",
    "RandomChoiceResize",
    "RandomCrop",
    "RandomFlip",
    "RandomResize",
    "Resize",
    "ResizeCropFlipImage",
    "TorchvisionTransform",
    "VectorizeMap",
]
