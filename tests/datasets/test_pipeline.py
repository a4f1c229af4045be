"""Colours, packing, and the DETR training pipeline from files to batches."""

import pytest
import torch
from coco_files import NAMES, annotation, build, turned, write_coco
from mmengine.config import Config
from PIL import Image
from torchvision import tv_tensors

from tests.fuzz.problem import generator_of
from visdet.datasets.transforms import PackDetInputs
from visdet.registry import DATASETS, TRANSFORMS

DETR_PIPELINE = Config.fromfile(
    "configs/deformable_detr/deformable-detr_r50_16xb2-50e_coco.py"
).train_pipeline


def colour_image(seed=0, shape=(3, 11, 13)):
    generator = generator_of(seed)
    return tv_tensors.Image(torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8))


def test_photometric_distortion_keeps_dtype_shape_and_range():
    distort = TRANSFORMS.build(dict(type="PhotoMetricDistortion"))
    image = colour_image()
    outputs = [distort(dict(img=image.clone()))["img"] for _ in range(40)]
    assert all(output.dtype == torch.uint8 and output.shape == image.shape for output in outputs)
    assert sum(torch.equal(output, image) for output in outputs) < 8
    assert len({output.sum().item() for output in outputs}) > 20
    as_float = distort(dict(img=tv_tensors.Image(image.float())))["img"]
    assert as_float.dtype == torch.float32 and as_float.min() >= 0 and as_float.max() <= 255


def test_packing():
    boxes = torch.tensor([[1.0, 2, 3, 4], [0, 0, 9, 9], [5, 5, 6, 6]])
    packed = PackDetInputs(meta_keys=("img_id", "img_shape", "scale_factor"))(
        dict(
            img=colour_image(),
            img_id=4,
            img_shape=(11, 13),
            gt_bboxes=tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=(11, 13)),
            gt_bboxes_labels=torch.tensor([7, 8, 9]),
            gt_ignore_flags=torch.tensor([False, True, False]),
        )
    )
    assert type(packed["inputs"]) is torch.Tensor and packed["inputs"].is_contiguous()
    sample = packed["data_samples"]
    assert sorted(sample.metainfo) == ["img_id", "img_shape"]
    assert type(sample.gt_instances.bboxes) is torch.Tensor
    assert sample.gt_instances.bboxes.tolist() == [[1, 2, 3, 4], [5, 5, 6, 6]]
    assert sample.gt_instances.labels.tolist() == [7, 9]
    assert sample.ignored_instances.bboxes.tolist() == [[0, 0, 9, 9]]
    assert sample.ignored_instances.labels.tolist() == [8]


@pytest.fixture
def detr_data(tmp_path):
    annotations = [
        annotation(1, 1, [50, 40, 200, 150]),
        annotation(2, 1, [300, 200, 20, 30], 30),
        annotation(3, 2, [10, 10, 100, 300], 20),
        annotation(4, 2, [0, 0, 240, 360], 20, iscrowd=1),
    ]
    write_coco(tmp_path, annotations, sizes=((400, 300), (240, 360), (120, 90)))
    return dict(
        type="CocoDataset",
        data_root=str(tmp_path),
        ann_file="ann.json",
        data_prefix=dict(img="images/"),
        metainfo=dict(classes=NAMES),
        filter_cfg=dict(filter_empty_gt=False),
        pipeline=DETR_PIPELINE,
    )


def test_the_detr_recipe(detr_data):
    dataset = DATASETS.build(detr_data)
    cropped = 0
    for index in [0, 1, 2] * 8:
        item = dataset[index]
        sample, image = item["data_samples"], item["inputs"]
        height, width = image.shape[1:]
        assert image.dtype == torch.uint8 and sample.img_shape == (height, width)
        assert min(height, width) in range(480, 801, 32) or max(height, width) == 1333
        assert max(height, width) <= 1333
        boxes = sample.gt_instances.bboxes
        assert (boxes[:, :2] >= 0).all() and (boxes[:, 2:] <= torch.tensor([width, height])).all()
        assert (boxes[:, 2:] > boxes[:, :2]).all()
        assert len(boxes) == len(sample.gt_instances.labels) <= (2, 1, 0)[index]
        ratio = sample.ori_shape[1] / sample.ori_shape[0]
        cropped += abs(width / height / ratio - 1) > 0.02
    assert 4 <= cropped <= 20  # about half of the draws


READ = dict(type="LoadImageFromFile")
BOXES = dict(type="LoadAnnotations")
MOSAIC = dict(type="Mosaic", size=(60, 80), prob=1.0)
MIX_UP = dict(type="MixUp", prob=1.0, share=(0.5, 0.5))


def red_pictures(folder):
    """Write three red pictures of 80 x 60 pixels, whose EXIF data turn them, with a box each and a third without."""
    boxes = [annotation(number, number, [10, 10, 40, 30]) for number in (1, 2)]
    write_coco(folder, boxes, sizes=[(60, 80)] * 3, write_images=False)
    for number in (1, 2, 3):
        Image.new("RGB", (80, 60), (255, 0, 0)).save(folder / f"images/{number}.png", exif=turned())


@pytest.mark.parametrize("test_mode", [False, True])
@pytest.mark.parametrize(
    "steps",
    [
        [READ, BOXES, MOSAIC],
        [READ, BOXES, MIX_UP],
        [READ, BOXES, MOSAIC, MIX_UP],
        [
            READ,
            BOXES,
            dict(type="RandomFlip", prob=1.0),
            dict(type="RandomChoice", transforms=[[MOSAIC], [MIX_UP]]),
        ],
        [READ | dict(to_float32=True), BOXES, MOSAIC],
        [READ, BOXES, MOSAIC | dict(pipeline=[READ | dict(channel_order="rgb"), BOXES])],
    ],
    ids=["mosaic", "mixup", "both", "nested", "float", "own"],
)
@pytest.mark.parametrize("order", ["bgr", "rgb"])
def test_other_images_are_read_by_the_steps_of_the_data_set(tmp_path, order, steps, test_mode):
    red_pictures(tmp_path)
    first = {**steps[0], "channel_order": order}
    dataset = build(tmp_path, pipeline=[first, *steps[1:], dict(type="PackDetInputs")], test_mode=test_mode)
    if "pipeline" in steps[-1] and order == "bgr":
        with pytest.raises(ValueError, match=r"Mosaic: the channels of the images .* bgr and rgb"):
            dataset[0]
        return
    for index in range(3):
        packed = dataset[index]
        red = [255.0, 0, 0] if order == "rgb" else [0, 0, 255.0]
        assert packed["inputs"].is_floating_point() == ("to_float32" in first)
        colours = packed["inputs"].float().round().flatten(1).unique(dim=1).T.tolist()
        assert colours == [red]
        truth = packed["data_samples"].gt_instances
        assert len(truth.get("areas", truth.bboxes)) == len(truth.bboxes) == len(truth.labels)


def test_joining_without_other_images_is_one_message(tmp_path):
    red_pictures(tmp_path)
    with pytest.raises(ValueError, match="Mosaic: the data set gives no other images"):
        TRANSFORMS.build(MOSAIC)({"img": colour_image()})
    with pytest.raises(ValueError, match="MixUp: the pipeline of the data set has no step before the one"):
        build(tmp_path, pipeline=[MIX_UP])[0]
