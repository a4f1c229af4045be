"""Turned boxes in data sets: how they are read, and that every transform keeps them on the pixels of their shapes."""

import math

import cv2
import numpy as np
import pytest
import torch
from coco_files import annotation, build, write_coco
from json_files import read_json
from numpy.testing import assert_allclose
from torch.testing import assert_close

from visdet.datasets.synthetic.shapes import ROTATED_SHAPE_CLASSES, draw_shapes
from visdet.datasets.transforms.tv_results import Corners, set_boxes, set_image
from visdet.registry import DATASETS, TRANSFORMS
from visdet.structures.coco_json import load_coco_json
from visdet.structures.rotated_boxes import boxes_to_polygons

FINE = 16  # subpixels
PIPELINE = [dict(type=name) for name in ("LoadImageFromFile", "LoadAnnotations", "PackDetInputs")]


def coverage(polygons, height, width):
    """Return the part of each pixel that polygons [N, 4, 2] cover; pixel i reaches from i to i + 1."""
    fine = np.zeros((height * FINE, width * FINE), np.uint8)
    for polygon in np.asarray(polygons):
        cv2.fillPoly(fine, [np.round(polygon * FINE - 0.5).astype(np.int32)], 1)
    return fine.reshape(height, FINE, width, FINE).mean((1, 3))


def drawn(seed, height=100, width=120):
    """Return the results of a pipeline for a picture with one white turned box."""
    rng = np.random.default_rng(seed)
    center, turn = rng.uniform(40, 60, 2), rng.uniform(-math.pi, math.pi)
    corners = boxes_to_polygons(torch.tensor([[*center, 50, 20, turn]], dtype=torch.float32))
    white = torch.from_numpy(coverage(corners, height, width) * 255).round().to(torch.uint8)
    results = dict(gt_bboxes_labels=torch.tensor([seed]), gt_ignore_flags=torch.tensor([False]))
    set_image(results, white.expand(3, -1, -1).contiguous())
    set_boxes(results, corners)
    return results


def shared(said, seen):
    """Return the overlap of two pictures, from 0 to 1."""
    return np.minimum(said, seen).sum() / np.maximum(said, seen).sum()


def overlap(results):
    """Return the overlap of what is white with what the boxes say is white, from 0 to 1."""
    said = coverage(results["gt_bboxes"], *results["img_shape"])
    return shared(said, results["img"].float().numpy()[0] / 255)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("RandomFlip", dict(prob=1.0, direction="horizontal")),
        ("RandomFlip", dict(prob=1.0, direction="diagonal")),
        ("Resize", dict(scale=(300, 150))),
        ("Resize", dict(scale=(90, 200), keep_ratio=True)),
        ("RandomCrop", dict(crop_size=(90, 90))),
        ("Pad", dict(size_divisor=64)),
        ("RandomHorizontalFlip", dict(p=1.0)),
        ("RandomVerticalFlip", dict(p=1.0)),
        ("RandomRotation", dict(degrees=90, interpolation=2)),
        ("RandomAffine", dict(degrees=40, shear=30, scale=(0.7, 1.5), interpolation=2)),
        ("RandomPerspective", dict(p=1.0)),
    ],
    ids=str,
)
def test_corners_stay_on_the_shape(name, arguments):
    is_ours = name in TRANSFORMS
    step = dict(type=name) if is_ours else dict(type="TorchvisionTransform", transform=name)
    transform = TRANSFORMS.build(step | arguments)
    for seed in range(5):
        results = transform(drawn(seed))
        assert isinstance(results["gt_bboxes"], Corners)
        assert results["gt_bboxes"].canvas_size == results["img_shape"]
        assert overlap(results) > 0.94


def test_images_that_are_joined_keep_their_boxes():
    others = iter(range(1, 100))
    mosaic = TRANSFORMS.build(
        dict(type="Mosaic", size=(240, 200), prob=1.0, pipeline=[lambda record: record])
    )
    whole = total = 0
    for seed in range(100, 110):
        results = mosaic({**drawn(seed), "draw_record": lambda: drawn(next(others))})
        assert len(results["gt_bboxes"]) == len(results["gt_bboxes_labels"]) <= 4
        for corners in results["gt_bboxes"]:
            x, y = corners.mean(0).tolist()
            assert results["img"][0, int(y), int(x)] == 255
            said = coverage(corners[None], 200, 240)
            is_near = cv2.dilate(said, np.ones((5, 5))) > 0
            seen = results["img"][0].numpy() / 255 * is_near
            whole += shared(said, seen) > 0.9
            total += 1
    assert total >= 30 and whole >= 0.5 * total
    mixed = TRANSFORMS.build(dict(type="MixUp", share=(0.5, 0.5), prob=1.0, pipeline=[lambda record: record]))
    results = mixed({**drawn(0), "draw_record": lambda: drawn(1, 80, 100)})
    assert results["gt_bboxes_labels"].tolist() == [0, 1]
    results["img"] = (results["img"] > 64) * 255
    assert overlap(results) > 0.9


def test_boxes_whose_centre_is_outside_are_dropped():
    results = TRANSFORMS.build(dict(type="RandomCrop", crop_size=(20, 20)))
    for seed in range(20):
        cropped = results(drawn(seed))
        if cropped is not None:
            x, y = cropped["gt_bboxes"][0].mean(0).tolist()
            assert 0 <= x <= 20 and 0 <= y <= 20


def test_files_with_corners_or_five_numbers(tmp_path):
    corners = [10, 5, 30, 5, 30, 15, 10, 15]
    rows = [
        annotation(1, 1, [0, 0, 40, 30], segmentation=[corners]),
        annotation(2, 1, [0, 0, 40, 30], segmentation=[[*corners, *corners[:2]]], ignore=1),
        annotation(3, 1, [20, 15, 20, 8, 30]),
    ]
    write_coco(tmp_path, rows)
    sample = build(tmp_path, box_type="rbox", pipeline=PIPELINE)[0]["data_samples"]
    expected = torch.tensor([[20, 10, 20, 10, 0], [20, 15, 20, 8, -math.pi / 6]])
    assert_close(sample.gt_instances.bboxes, expected, atol=1e-4, rtol=1e-5)
    oc = build(tmp_path, box_type="rbox", angle_version="oc", pipeline=PIPELINE)[0]["data_samples"]
    expected = torch.tensor([[20, 10, 10, 20, math.pi / 2], [20, 15, 8, 20, math.pi / 3]])
    assert_close(oc.gt_instances.bboxes, expected, atol=1e-4, rtol=1e-5)
    dataset = build(tmp_path, box_type="rbox", test_mode=True, pipeline=PIPELINE)
    assert len(dataset[0]["data_samples"].ignored_instances) == 1
    assert dataset[0]["data_samples"].gt_instances.polygons[0].flatten().tolist() == corners
    assert dataset[1]["data_samples"].gt_instances.bboxes.shape == (0, 5)
    # The same file has upright boxes around the turned ones, too.
    upright = build(tmp_path, pipeline=PIPELINE)[0]["data_samples"].gt_instances.bboxes
    around = boxes_to_polygons(expected[1]).numpy()
    assert_allclose(upright[1], [*around.min(0), *around.max(0)], rtol=1e-4)


def test_what_is_ambiguous_is_refused(tmp_path):
    write_coco(tmp_path, [annotation(1, 1, [20, 15, 20, 8, 0.5]), annotation(2, 1, [20, 15, 20, 8, 0])])
    with pytest.raises(ValueError, match=r"degrees.*none is above 0\.5.*radians"):
        load_coco_json(str(tmp_path / "ann.json"))
    write_coco(tmp_path, [annotation(1, 1, [5, 5, 20, 8])])
    with pytest.raises(ValueError, match=r"box_type='rbox'.*segmentation of four points.*'id': 1"):
        build(tmp_path, box_type="rbox")


def test_rotated_shapes(tmp_path):
    fullest = np.zeros(6)
    for index in range(60):
        for label, (x1, y1, x2, y2), number, corners in draw_shapes(np.random.default_rng(index), 128, True)[
            1
        ]:
            sides = np.linalg.norm(np.diff(corners, axis=0), axis=1)[:2]
            assert sides.max() > 1.4 * sides.min()
            xs, ys = zip(*corners, strict=True)
            assert (x1, y1, x2, y2) == (min(xs), min(ys), max(xs), max(ys))
            fullest[label] = max(fullest[label], number / sides.prod())
    # The whole shape fills its turned box as far as an ellipse or a rectangle does.
    assert abs(fullest[0] - math.pi / 4) < 0.07 and abs(fullest[1] - 1) < 0.07
    dataset = DATASETS.build(
        dict(
            type="ShapesDataset",
            rotated=True,
            data_root=f"{tmp_path}/shapes/",
            ann_file="annotations/instances_train.json",
            data_prefix=dict(img="train/"),
            generator=dict(num_train=3, num_val=1, image_size=64, num_workers=1),
            pipeline=PIPELINE,
        )
    )
    assert dataset.metainfo["classes"] == ROTATED_SHAPE_CLASSES
    content = read_json(tmp_path / "shapes/annotations/instances_train.json")
    assert all(len(row["segmentation"][0]) == 8 for row in content["annotations"])
    boxes = torch.cat([dataset[index]["data_samples"].gt_instances.bboxes for index in range(3)])
    assert boxes.shape[1] == 5 and (boxes[:, 2] > 1.4 * boxes[:, 3]).all()
