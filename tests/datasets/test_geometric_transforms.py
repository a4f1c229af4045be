"""Boxes follow the pixels: a painted rectangle is found again after every transform."""

from random import Random

import cv2
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torchvision import tv_tensors

from visdet.datasets.transforms import (
    MixUp,
    Mosaic,
    Pad,
    PhotoMetricDistortion,
    RandomChoice,
    RandomChoiceResize,
    RandomCrop,
    RandomFlip,
    RandomResize,
    Resize,
    TorchvisionTransform,
)

QUICK = settings(max_examples=40, deadline=None)


def painted(height, width, box):
    """Return results with a white rectangle on black, and its box."""
    x1, y1, x2, y2 = box
    image = torch.zeros(3, height, width, dtype=torch.uint8)
    image[:, y1:y2, x1:x2] = 255
    boxes = torch.tensor([box], dtype=torch.float32)
    return dict(
        img=tv_tensors.Image(image),
        img_shape=(height, width),
        ori_shape=(height, width),
        gt_bboxes=tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=(height, width)),
        gt_bboxes_labels=torch.tensor([3]),
        gt_ignore_flags=torch.tensor([False]),
    )


def white_box(results, threshold=128):
    """Return xyxy around the pixels above ``threshold``, or None."""
    rows, columns = torch.nonzero(results["img"][0] >= threshold, as_tuple=True)
    if not len(rows):
        return None
    return [columns.min().item(), rows.min().item(), columns.max().item() + 1, rows.max().item() + 1]


def check_consistent(results):
    height, width = results["img_shape"]
    image, boxes = results["img"], results["gt_bboxes"]
    assert image.shape == (3, height, width)
    assert isinstance(image, tv_tensors.Image)
    assert isinstance(boxes, tv_tensors.BoundingBoxes)
    assert boxes.canvas_size == (height, width)
    assert len(boxes) == len(results["gt_bboxes_labels"]) == len(results["gt_ignore_flags"])


@st.composite
def scenes(draw, min_box=4):
    height, width = draw(st.integers(12, 60)), draw(st.integers(12, 60))
    x1, y1 = draw(st.integers(0, width - min_box)), draw(st.integers(0, height - min_box))
    x2, y2 = draw(st.integers(x1 + min_box, width)), draw(st.integers(y1 + min_box, height))
    return height, width, (x1, y1, x2, y2)


@QUICK
@given(scenes(), st.sampled_from(["horizontal", "vertical", "diagonal"]))
def test_flip(scene, direction):
    results = RandomFlip(prob=1.0, direction=direction)(painted(*scene))
    check_consistent(results)
    assert results["gt_bboxes"].tolist() == [white_box(results)]
    assert (results["flip"], results["flip_direction"]) == (True, direction)
    kept = RandomFlip(prob=0.0)(painted(*scene))
    assert kept["gt_bboxes"].tolist() == [list(scene[2])] and kept["flip_direction"] is None


@pytest.mark.parametrize(
    "prob, expected",
    [(0.5, (0.25, 0.25, 0.5)), ([0.3, 0.6], (0.3, 0.6, 0.1)), (1.0, (0.5, 0.5, 0.0))],
)
def test_flip_frequencies(prob, expected):
    flip = RandomFlip(prob=prob, direction=["horizontal", "vertical"])
    drawn = [flip(dict(img=torch.zeros(3, 2, 2)))["flip_direction"] for _ in range(2000)]
    for direction, probability in zip(("horizontal", "vertical", None), expected, strict=True):
        assert abs(drawn.count(direction) / 2000 - probability) < 0.04


@QUICK
@given(scenes(), st.integers(12, 90), st.integers(12, 90), st.booleans(), st.sampled_from(["cv2", "pillow"]))
@example((22, 57, (8, 0, 12, 4)), 12, 12, False, "pillow")
def test_resize(scene, target_w, target_h, keep_ratio, backend):
    results = Resize(scale=(target_w, target_h), keep_ratio=keep_ratio, backend=backend)(painted(*scene))
    check_consistent(results)
    height, width = results["img_shape"]
    if not keep_ratio:
        assert (height, width) == (target_h, target_w)
    assert results["scale_factor"] == (width / scene[1], height / scene[0])
    brightest = results["img"].max().item()  # a box of under a pixel is grey, or gone
    if brightest > 0:
        found = white_box(results, brightest / 2)
        assert np.abs(np.array(found) - results["gt_bboxes"][0].numpy()).max() <= 1.0


@pytest.mark.parametrize(
    "size, scale, expected",
    [
        ((640, 480), (1333, 800), (1067, 800)),
        ((480, 640), (1333, 800), (800, 1067)),
        ((640, 427), (1333, 800), (1199, 800)),
        ((500, 100), (1333, 800), (1333, 267)),
        ((640, 480), (400, 4200), (533, 400)),
        (
            (640, 480),
            (4200, 400),
            (533, 400),
        ),  # (width, height) or (height, width): the order does not matter
        ((1333, 800), (1333, 800), (1333, 800)),
        ((333, 500), (480, 1333), (480, 721)),
    ],
)
def test_sizes_of_the_detr_recipe(size, scale, expected):
    """Sizes (width, height) by hand: int(side * factor + 0.5)."""
    assert Resize(scale=scale, keep_ratio=True).new_size(size[1], size[0]) == expected[::-1]


def test_resize_by_factor_and_twice():
    assert Resize(scale_factor=(0.5, 2.0)).new_size(10, 21) == (20, 11)
    assert Resize(scale=8).new_size(3, 5) == (8, 8)
    results = painted(20, 40, (4, 2, 12, 10))
    Resize(scale=(80, 60))(results)
    assert results["scale_factor"] == (2.0, 3.0)
    Resize(scale=(40, 30))(results)
    assert results["scale_factor"] == (1.0, 1.5)
    assert results["gt_bboxes"].tolist() == [[4, 3, 12, 15]]


@pytest.mark.parametrize("size", [(50, 37), (13, 90), (7, 5)])
def test_resize_samples_as_opencv(size):
    pixels = np.random.default_rng(0).integers(0, 256, (29, 31, 3), dtype=np.uint8)
    results = dict(img=tv_tensors.Image(torch.from_numpy(pixels).permute(2, 0, 1)), img_shape=(29, 31))
    resized = Resize(scale=size)(results)["img"].permute(1, 2, 0).numpy()
    expected = cv2.resize(pixels, size, interpolation=cv2.INTER_LINEAR)
    assert np.abs(resized.astype(int) - expected).max() <= 1


def test_clipping_of_boxes_is_optional():
    for clips, expected in ((True, [0, 0, 40, 20]), (False, [-10, 0, 60, 20])):
        results = painted(10, 20, (0, 0, 20, 10))
        results["gt_bboxes"][:] = torch.tensor([-5.0, 0, 30, 10])
        resized = Resize(scale=(40, 20), clip_object_border=clips)(results)
        assert resized["gt_bboxes"].tolist() == [expected]


def test_random_sizes():
    choice = RandomChoiceResize(scales=[(30, 20), (40, 50), (12, 12)])
    shapes = {choice(painted(20, 20, (0, 0, 9, 9)))["img_shape"] for _ in range(60)}
    assert shapes == {(20, 30), (50, 40), (12, 12)}
    ranged = RandomResize(scale=[(20, 30), (24, 40)], keep_ratio=False)
    shapes = {ranged(painted(20, 20, (0, 0, 9, 9)))["img_shape"] for _ in range(300)}
    assert {h for h, _ in shapes} == set(range(30, 41)) and {w for _, w in shapes} == set(range(20, 25))
    by_ratio = RandomResize(scale=(100, 60), ratio_range=(0.5, 1.0))
    for _ in range(50):
        h, w = by_ratio(painted(20, 20, (0, 0, 9, 9)))["img_shape"]
        assert 50 <= w <= 100 and 30 <= h <= 60 and abs(w * 0.6 - h) <= 1


@QUICK
@given(
    scenes(),
    st.integers(0, 2**31),
    st.sampled_from(["absolute", "absolute_range", "relative", "relative_range"]),
)
def test_crop(scene, seed, crop_type):
    torch.manual_seed(seed)
    crop_size = (0.4, 0.7) if crop_type.startswith("relative") else (17, 23)
    results = RandomCrop(crop_size, crop_type, allow_negative_crop=True)(painted(*scene))
    check_consistent(results)
    found = white_box(results)
    assert results["gt_bboxes"].tolist() == ([] if found is None else [found])
    height, width = results["img_shape"]
    full_height, full_width, _ = scene
    if crop_type == "absolute":
        assert (width, height) == (min(17, full_width), min(23, full_height))
    if crop_type == "absolute_range":
        assert min(17, full_width) <= width <= min(23, full_width)
        assert min(17, full_height) <= height <= min(23, full_height)
    if crop_type == "relative":
        assert (width, height) == (int(full_width * 0.4 + 0.5), int(full_height * 0.7 + 0.5))
    if crop_type == "relative_range":  # The first number is that of the height.
        assert full_height * 0.4 - 0.5 <= height <= full_height
        assert full_width * 0.7 - 0.5 <= width <= full_width


def test_crops_without_a_box():
    outcomes = [RandomCrop((10, 10))(painted(60, 60, (0, 0, 4, 4))) for _ in range(300)]
    assert None in outcomes and any(outcome is not None for outcome in outcomes)
    for outcome in outcomes:
        assert outcome is None or outcome["gt_bboxes"].tolist() == [white_box(outcome)]
    unclipped = RandomCrop((10, 10), bbox_clip_border=False)(painted(30, 30, (0, 0, 30, 30)))
    x1, y1, x2, y2 = unclipped["gt_bboxes"][0].tolist()
    assert (x2 - x1, y2 - y1) == (30, 30) and x1 <= 0 and y2 >= 10


@QUICK
@given(scenes(), st.integers(1, 33), st.booleans())
def test_pad(scene, divisor, to_square):
    results = Pad(size_divisor=divisor, pad_to_square=to_square, pad_val=9)(painted(*scene))
    check_consistent(results)
    assert results["gt_bboxes"].tolist() == [white_box(results)] == [list(scene[2])]
    height, width = results["img_shape"]
    assert height % divisor == width % divisor == 0 and height >= scene[0] and width >= scene[1]
    if to_square:
        assert height == width
    assert (results["img"][:, scene[0] :] == 9).all() and (results["img"][:, :, scene[1] :] == 9).all()


def test_pad_to_a_size():
    results = Pad(size=(50, 40), pad_val=dict(img=7))(painted(20, 30, (0, 0, 5, 5)))
    assert results["img_shape"] == results["pad_shape"] == (40, 50)
    with pytest.raises(ValueError, match=r"Pad: size .*\(50, 40\) is smaller than the image, 60x20"):
        Pad(size=(50, 40))(painted(20, 60, (0, 0, 5, 5)))


@QUICK
@given(scenes(min_box=8), st.integers(0, 2**31))
def test_torchvision_transforms_by_name(scene, seed):
    torch.manual_seed(seed)
    transform = TorchvisionTransform("RandomAffine", degrees=0, translate=(0.3, 0.3))
    results = transform(painted(*scene))
    check_consistent(results)
    found = white_box(results)
    for box in results["gt_bboxes"].tolist():
        assert np.abs(np.array(box) - found).max() <= 1.0
    assert (len(results["gt_bboxes"]) == 1) == (found is not None)


@pytest.mark.parametrize("order", ["rgb", "bgr"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [("RandomGrayscale", {"p": 1}, [89, 89, 89]), ("RandomInvert", {"p": 1}, [55, 205, 255])],
)
def test_torchvision_sees_colours_as_its_own(order, dtype, name, options, expected):
    step = -1 if order == "bgr" else 1
    red = torch.tensor([200, 50, 0][::step], dtype=dtype).view(3, 1, 1)
    changed = TorchvisionTransform(name, **options)({"img": red, "channel_order": order})["img"]
    assert changed.dtype == dtype
    assert changed.flatten().round().tolist()[::step] == expected


def mixed(height=40, width=60, box=(10, 8, 50, 32)):
    """Return results whose other images are grey rectangles on black, of which each second one is ignored."""
    drawn = iter(range(100))

    def another():
        part = painted(30, 44, (4, 6, 30, 28))
        part["img"] = tv_tensors.Image(part["img"] // 2)
        part["gt_ignore_flags"] = torch.tensor([next(drawn) % 2 == 0])
        return part

    return painted(height, width, box) | {"draw_record": another}


@QUICK
@given(st.integers(0, 2**31), st.integers(40, 90), st.integers(40, 90))
@example(44, 42, 69)
def test_mosaic(seed, width, height):
    torch.manual_seed(seed)
    results = Mosaic(size=(width, height), pipeline=[], prob=1.0)(mixed())
    check_consistent(results)
    assert results["img_shape"] == (height, width)
    covered = torch.zeros(height, width, dtype=torch.bool)
    for x1, y1, x2, y2 in results["gt_bboxes"].round().int().tolist():
        inner = results["img"][0, y1 + 1 : y2 - 1, x1 + 1 : x2 - 1]
        assert (inner > 100).all()
        covered[max(y1 - 1, 0) : y2 + 1, max(x1 - 1, 0) : x2 + 1] = True
    # What is bright and in no box is a rest of less than a pixel, so that it fills no square of two pixels.
    rest = ((results["img"][0] >= 100) & ~covered).float()
    assert torch.nn.functional.avg_pool2d(rest[None], 2, 1).max() < 1
    assert (results["gt_bboxes_labels"] == 3).all()


def test_mixing_joins_labels_and_flags_and_says_its_size():
    results = MixUp(share=(0.5, 0.5), pipeline=[], prob=1.0)(mixed())
    check_consistent(results)
    assert results["gt_bboxes"].round().tolist() == [[10, 8, 50, 32], [5, 8, 41, 37]]
    assert results["gt_ignore_flags"].tolist() == [False, True] and results["img_shape"] == (40, 60)
    assert results["img"][0, 20, 45] == 127 and results["img"][0, 35, 20] == 63
    for transform in (MixUp(pipeline=[], prob=0.0), Mosaic(size=(9, 9), pipeline=[], prob=0.0)):
        assert transform(mixed())["gt_bboxes"].tolist() == [[10, 8, 50, 32]]
    rng = Random(5)
    sizes = [Mosaic(size=(30, 20), pipeline=[], prob=0.4).planned_size((7, 8), rng) for _ in range(200)]
    assert set(sizes) == {(20, 30), (7, 8)} and 50 < sizes.count((20, 30)) < 110


def test_torchvision_transforms_keep_labels_and_flags_with_their_boxes():
    assert TorchvisionTransform("ColorJitter", brightness=0.5).keeps_size
    assert not TorchvisionTransform("RandomIoUCrop").keeps_size
    counts = set()
    for _ in range(40):
        results = painted(60, 60, (2, 2, 12, 12))
        boxes = torch.tensor([[2.0, 2, 12, 12], [45, 45, 58, 58]])
        results["gt_bboxes"] = tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=(60, 60))
        results |= {"gt_bboxes_labels": torch.tensor([3, 4]), "gt_ignore_flags": torch.tensor([False, True])}
        results = TorchvisionTransform("RandomIoUCrop", sampler_options=[0.0, 0.5])(results)
        check_consistent(results)
        assert results["gt_ignore_flags"].tolist() == [label == 4 for label in results["gt_bboxes_labels"]]
        counts.add(len(results["gt_bboxes"]))
    assert counts == {1, 2}


def test_random_choice():
    pipelines = [
        [dict(type="Resize", scale=(10, 10))],
        dict(type="Resize", scale=(20, 20)),
        [lambda results: None],
    ]
    choice = RandomChoice(pipelines, prob=[0.5, 0.3, 0.2])
    outcomes = [choice(painted(15, 15, (0, 0, 9, 9))) for _ in range(600)]
    widths = [outcome and outcome["img_shape"][1] for outcome in outcomes]
    for width, probability in ((10, 0.5), (20, 0.3), (None, 0.2)):
        assert abs(widths.count(width) / 600 - probability) < 0.06
    assert len({RandomChoice(pipelines)(painted(15, 15, (0, 0, 9, 9))) is None for _ in range(40)}) == 2


@pytest.mark.parametrize(
    ("transform", "options", "message"),
    [
        (Resize, {}, "either scale or scale_factor"),
        (Resize, dict(scale=(1, 2, 3)), r"scale must be .* got \(1, 2, 3\)"),
        (RandomResize, dict(scale=(10, 20)), "RandomResize: scale must be"),
        (RandomResize, dict(scale=[(1, 2), (3, 4)], ratio_range=(1, 2)), "RandomResize: scale must be"),
        (RandomFlip, dict(prob=1.5), "prob must be"),
        (RandomFlip, dict(prob=[0.1], direction=["horizontal", "vertical"]), "one per direction"),
        (RandomCrop, dict(crop_size=(0.5, 0.5)), "crop_type='absolute', crop_size must be"),
        (
            RandomCrop,
            dict(crop_size=(0, 0.5), crop_type="relative"),
            "crop_type='relative', crop_size must be",
        ),
        (
            RandomCrop,
            dict(crop_size=(2, 3), crop_type="relative_range"),
            "crop_size must be .*above 0 and up to 1",
        ),
        (
            RandomCrop,
            dict(crop_size=(9, 5), crop_type="absolute_range"),
            "crop_size must be .* in ascending order",
        ),
        (Pad, {}, "give either size, or size_divisor"),
        (Pad, dict(size=(5, 5), size_divisor=2), "give either size, or size_divisor"),
        (RandomChoice, dict(transforms=[[]], prob=[0.4]), "1 numbers that sum to 1"),
        (TorchvisionTransform, dict(transform="RandomCorp"), "v2 has no transform 'RandomCorp'"),
        (TorchvisionTransform, dict(transform="GaussianBlur", kernel=3), "kernel"),
        (RandomChoiceResize, dict(scales=[(9, 9)], keep_aspect=True), "keep_aspect"),
        (RandomResize, dict(scale=[(9, 9), (10, 10)], keep_aspect=True), "keep_aspect"),
        (
            PhotoMetricDistortion,
            dict(contrast_range=(1.5, 0.5)),
            "contrast_range must be .* in ascending order",
        ),
    ],
)
def test_wrong_arguments(transform, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        transform(**options)
