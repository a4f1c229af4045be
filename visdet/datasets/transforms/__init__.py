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
            "BaseTransform": "base",
            "BBoxRotation": "driving",
            "CircleObjectRangeFilter": "driving",
            "FilterAnnotations": "loading",
            "InstanceNameFilter": "driving",
            "LoadAnnotations": "loading",
            "LoadImageFromFile": "loading",
            "LoadMultiViewImageFromFiles": "multi_view",
            "LoadPointsFromFile": "multi_view",
            "MixUp": "wrappers",
            "Mosaic": "wrappers",
            "MultiScaleDepthMapGenerator": "multi_view",
            "NormalizeMultiviewImage": "multi_view",
            "NuScenesSparse4DAdaptor": "driving",
            "PackDetInputs": "formatting",
            "PackDrivingInputs": "driving",
            "Pad": "geometric",
            "PhotoMetricDistortion": "photometric",
            "PhotoMetricDistortionMultiViewImage": "photometric",
            "RandomChoice": "wrappers",
            "RandomChoiceResize": "geometric",
            "RandomCrop": "geometric",
            "RandomFlip": "geometric",
            "RandomResize": "geometric",
            "Resize": "geometric",
            "ResizeCropFlipImage": "multi_view",
            "TorchvisionTransform": "wrappers",
            "VectorizeMap": "driving",
        },
    )
