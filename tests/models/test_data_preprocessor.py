"""DetDataPreprocessor: pixels, padding, sizes, and each of its options."""

import pytest
import torch
from mmengine.structures import InstanceData
from torch.testing import assert_close

from visdet.models import DetDataPreprocessor
from visdet.models.data_preprocessor import DrivingDataPreprocessor
from visdet.registry import MODELS
from visdet.structures import DetDataSample

MEAN, STD = [10.0, 20.0, 30.0], [1.0, 2.0, 4.0]


def images(*sizes):
    torch.manual_seed(0)
    return [torch.randint(0, 256, (3, *size), dtype=torch.uint8) for size in sizes]


def samples(count):
    out = [DetDataSample() for _ in range(count)]
    for sample in out:
        sample.gt_instances = InstanceData(bboxes=torch.zeros(1, 4), labels=torch.zeros(1, dtype=torch.int64))
    return out


def test_pixels_padding_and_sizes():
    given = images((4, 6), (5, 3))
    preprocess = DetDataPreprocessor(MEAN, STD, pad_size_divisor=4, pad_value=-7)
    out = preprocess({"inputs": given, "data_samples": samples(2)})
    batch = out["inputs"]
    assert batch.shape == (2, 3, 8, 8)
    assert batch.dtype == torch.float32
    for i, image in enumerate(given):
        height, width = image.shape[-2:]
        expected = (image.float() - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
        assert torch.equal(batch[i, :, :height, :width], expected)
        assert (batch[i, :, height:] == -7).all()
        assert (batch[i, :, :, width:] == -7).all()
    assert [s.batch_input_shape for s in out["data_samples"]] == [(8, 8), (8, 8)]
    assert [s.img_shape for s in out["data_samples"]] == [(4, 6), (5, 3)]
    assert [s.pad_shape for s in out["data_samples"]] == [(4, 8), (8, 4)]


@pytest.mark.parametrize("option", ["bgr_to_rgb", "rgb_to_bgr"])
def test_channels_are_reversed_before_the_mean(option):
    (image,) = images((2, 3))
    out = DetDataPreprocessor(MEAN, [1.0] * 3, **{option: True})({"inputs": [image]})["inputs"]
    assert_close(out[0, 0], image[2].float() - 10)
    assert_close(out[0, 2], image[0].float() - 30)


@pytest.mark.cuda
def test_nothing_waits_for_the_gpu():
    """Images are prepared while the GPU computes the step before."""
    preprocess = DetDataPreprocessor(MEAN, STD, bgr_to_rgb=True).cuda()
    given = [image.pin_memory() for image in images((4, 6), (5, 3))]
    torch.cuda.set_sync_debug_mode("error")
    try:
        preprocess({"inputs": given, "data_samples": samples(2)})
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("shape", [(1, 4, 4), (4, 4, 4)])
def test_images_have_the_channels_of_the_mean(shape):
    with pytest.raises(ValueError, match=rf"3 channels, as mean has, got \({shape[0]}, 4, 4\)"):
        DetDataPreprocessor(MEAN, STD)({"inputs": [torch.zeros(shape)]})


def test_stacked_inputs_and_no_samples():
    given = torch.stack(images((4, 5), (4, 5)))
    out = DetDataPreprocessor(pad_size_divisor=3)({"inputs": given})
    assert out["data_samples"] is None
    assert_close(out["inputs"][:, :, :4, :5], given.float())
    assert out["inputs"].shape == (2, 3, 6, 6)


def preprocessed(sample):
    batch = DetDataPreprocessor()({"inputs": images((4, 6)), "data_samples": [sample]})
    return batch["data_samples"][0]


def test_the_pipelines_image_size_stands():
    (sample,) = samples(1)
    sample.set_metainfo({"img_shape": (3, 5)})
    sample = preprocessed(sample)
    assert sample.img_shape == (3, 5)
    assert sample.batch_input_shape == (4, 6)


class Boxes(list):
    """A container of boxes, as other frameworks have them."""

    tensor = torch.ones(0, 4)


def test_box_containers():
    sample = DetDataSample(gt_instances=InstanceData(bboxes=Boxes()))
    sample = preprocessed(sample)
    assert sample.gt_instances.bboxes is Boxes.tensor


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"bgr_to_rgb": True, "rgb_to_bgr": True}, AssertionError, "cannot be set to True at the same time"),
        ({"mean": MEAN}, AssertionError, "mean and std should be both None or tuple"),
        ({"pad_size_divisor": 0}, ValueError, "pad_size_divisor must be"),
        ({"pad_divisor": 32}, TypeError, "pad_divisor"),
    ],
)
def test_bad_options(options, error, message):
    with pytest.raises(error, match=message):
        MODELS.build({"type": "DetDataPreprocessor", **options})


def test_samples_of_a_pipeline_without_its_last_step_are_one_message():
    with pytest.raises(ValueError, match=r"must end with a transform such as PackDetInputs.* got \['img'\]"):
        DetDataPreprocessor()({"img": [torch.zeros(3, 4, 4)]})


@pytest.mark.parametrize("std", [(1.0, 0.0, 1.0), (-1.0, 1.0, 1.0)])
def test_a_deviation_must_be_positive(std):
    for kind in (DetDataPreprocessor, DrivingDataPreprocessor):
        with pytest.raises(ValueError, match="std must be"):
            kind(mean=(0, 0, 0), std=std)


@pytest.mark.parametrize("kind", [DetDataPreprocessor, DrivingDataPreprocessor])
@pytest.mark.parametrize("cast", ["bfloat16", "half", "double", "float"])
def test_a_cast_model_gets_its_images_in_its_type(kind, cast):
    """The mean is not rounded, also if the type is widened again."""
    mean, std = [123.675, 116.28, 103.53], [58.395, 57.12, 57.375]
    model = torch.nn.Sequential(kind(mean, std), torch.nn.Linear(1, 1))
    image = torch.full((3, 4, 4), 125, dtype=torch.uint8)
    given = {"inputs": [image if kind is DetDataPreprocessor else image[None]]}
    exact = model[0](given)["inputs"]
    getattr(model, cast)()
    out = model[0](given)["inputs"]
    assert out.dtype == model[1].weight.dtype
    assert_close(out, exact.to(out.dtype))
    assert torch.equal(model.float()[0](given)["inputs"], exact)
