"""Transforms of data pipelines. Those of detection work on torchvision's tv_tensors."""

from typing import TYPE_CHECKING

from visdet.lazy_names import lazy_names

if TYPE_CHECKING:
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
        ResizeCropFlipImage,
    )
    from .photometric import PhotoMetricDistortion, PhotoMetricDistortionMultiViewImage
    from .wrappers import MixUp, Mosaic, RandomChoice, TorchvisionTransform
else:
    __all__, __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "base": ["BaseTransform"],
            "driving": [
                "BBoxRotation",
                "CircleObjectRangeFilter",
                "InstanceNameFilter",
                "NuScenesSparse4DAdaptor",
                "PackDrivingInputs",
                "VectorizeMap",
            ],
            "formatting": ["PackDetInputs"],
            "geometric": ["Pad", "RandomChoiceResize", "RandomCrop", "RandomFlip", "RandomResize", "Resize"],
            "loading": ["FilterAnnotations", "LoadAnnotations", "LoadImageFromFile"],
            "multi_view": [
                "LoadMultiViewImageFromFiles",
                "LoadPointsFromFile",
                "MultiScaleDepthMapGenerator",
                "NormalizeMultiviewImage",
                "ResizeCropFlipImage",
            ],
            "photometric": ["PhotoMetricDistortion", "PhotoMetricDistortionMultiViewImage"],
            "wrappers": ["MixUp", "Mosaic", "RandomChoice", "TorchvisionTransform"],
        },
    )
