"""Steps of data pipelines, on torchvision's tv_tensors."""

from .base import BaseTransform
from .formatting import PackDetInputs
from .geometric import Pad, RandomChoiceResize, RandomCrop, RandomFlip, RandomResize, Resize
from .loading import FilterAnnotations, LoadAnnotations, LoadImageFromFile
from .photometric import PhotoMetricDistortion
from .wrappers import RandomChoice, TorchvisionTransform

__all__ = [
    "BaseTransform",
    "FilterAnnotations",
    "LoadAnnotations",
    "LoadImageFromFile",
    "PackDetInputs",
    "Pad",
    "PhotoMetricDistortion",
    "RandomChoice",
    "RandomChoiceResize",
    "RandomCrop",
    "RandomFlip",
    "RandomResize",
    "Resize",
    "TorchvisionTransform",
]
