"""Arguments of transforms as people write them give the right result, or a message that names the transform."""

from functools import partial

import pytest
import torch
from torchvision import tv_tensors

from visdet.datasets import NuScenes3DDetTrackDataset
from visdet.datasets.transforms import (
    InstanceNameFilter,
    PackDetInputs,
    PackDrivingInputs,
)
from visdet.engine.inference.detections import detections_of
from visdet.evaluation import CocoMetric, MotionMetric, NuScenesMetric, TrackingMetric, VectorMapMetric
from visdet.registry import TRANSFORMS
from visdet.structures import DetDataSample


@pytest.mark.parametrize(
    "config, shape",
    [
        (dict(type="Resize", scale=(320.0, 320.0)), (320, 320)),
        (dict(type="Resize", scale=(float("inf"), 80), keep_ratio=True), (80, 120)),
        (dict(type="RandomChoiceResize", scales=((48, 133), (48, 133)), keep_ratio=True), (48, 72)),
        (dict(type="RandomChoiceResize", scales=(48, 133)), (133, 48)),
        (dict(type="RandomResize", scale=(64.0, 32.0), ratio_range=(1, 1)), (32, 64)),
        (dict(type="RandomResize", scale=[(64.0, 32), [64, 32]]), (32, 64)),
        (dict(type="RandomCrop", crop_size=[20, 30]), (30, 20)),
        (dict(type="Pad", size=64), (64, 64)),
        (dict(type="Pad", size=[64, 48]), (48, 64)),
        (dict(type="Pad", size_divisor=32, pad_val=(114, 114, 114)), (64, 64)),
        (dict(type="Pad", size_divisor=32.0, pad_val=dict(masks=0)), (64, 64)),
        (dict(type="FilterAnnotations", min_gt_bbox_wh=1), (40, 60)),
    ],
    ids=str,
)
def test_arguments_as_people_write_them(config, shape):
    image = tv_tensors.Image(torch.zeros(3, 40, 60, dtype=torch.uint8))
    boxes = tv_tensors.BoundingBoxes(torch.tensor([[1.0, 2, 50, 39]]), format="XYXY", canvas_size=(40, 60))
    results = dict(img=image, img_shape=(40, 60), gt_bboxes=boxes, img_path="x")
    assert TRANSFORMS.build(config)(results)["img"].shape[1:] == shape


@pytest.mark.parametrize(
    "config, message",
    [
        (dict(type="RandomResize", scale=[(64,), (64, 64)]), "RandomResize: scale must be"),
        (dict(type="RandomResize", scale=(64, 64), ratio_range=[1]), "RandomResize: ratio_range must be"),
        (dict(type="Pad", size_divisor=0), "Pad: size_divisor must be .* got 0"),
        (dict(type="Pad", size=64, pad_val=(1, 2)), r"Pad: pad_val must be .* got \(1, 2\)"),
        (dict(type="Pad", size=64, pad_val=dict(img="0")), "Pad: pad_val must be"),
        (dict(type="VectorizeMap", roi_size=(30, 60, 5), normalize=True, sample_num=20), "roi_size must be"),
        (dict(type="MultiScaleDepthMapGenerator", downsample=[4, 0]), "downsample must be"),
        (dict(type="LoadPointsFromFile", coord_type="LIDAR", use_dim=[-1]), "use_dim must be"),
        (dict(type="LoadPointsFromFile", coord_type="LIDAR", load_dim=0, use_dim=0), "use_dim must be"),
        (dict(type="NormalizeMultiviewImage", mean=[0, 0, 0], std=[1, 1, 0]), "std"),
    ],
    ids=str,
)
def test_arguments_that_cannot_be_meant(config, message):
    with pytest.raises(ValueError, match=message):
        image = tv_tensors.Image(torch.zeros(3, 40, 60, dtype=torch.uint8))
        TRANSFORMS.build(config)(dict(img=image, img_shape=(40, 60), img_path="x"))


@pytest.mark.parametrize(
    "make, argument",
    [
        (PackDetInputs, "meta_keys"),
        (PackDrivingInputs, "keys"),
        (PackDrivingInputs, "meta_keys"),
        (InstanceNameFilter, "classes"),
        (CocoMetric, "metric_items"),
        (NuScenesMetric, "classes"),
        (TrackingMetric, "classes"),
        (MotionMetric, "classes"),
        (VectorMapMetric, "classes"),
        (partial(detections_of, DetDataSample()), "classes"),
        (partial(NuScenes3DDetTrackDataset, "none.npz"), "map_classes"),
    ],
    ids=lambda value: getattr(getattr(value, "func", value), "__name__", value),
)
def test_a_text_is_not_read_letter_by_letter(make, argument):
    with pytest.raises(ValueError, match=f"{argument} must be .*got 'mAP'"):
        make(**{argument: "mAP"})


@pytest.mark.parametrize("name", ["Resize", "PackDetInputs", "RandomFlip"])
def test_a_transform_before_the_one_that_reads_the_image_is_named(name):
    arguments = {"Resize": {"scale": (8, 8)}, "RandomFlip": {"prob": 1.0}}.get(name, {})
    with pytest.raises(ValueError, match=f"{name}: the pipeline has no 'img.*' yet"):
        TRANSFORMS.build({"type": name, **arguments})({"img_path": "x.png"})
