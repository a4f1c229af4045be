"""Batches of few sizes: the size of an image is known before it is read, and each image comes once an epoch."""

import math
from itertools import islice
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mmengine.config import Config
from mmengine.dataset import (
    ConcatDataset,
    DefaultSampler,
    InfiniteSampler,
    RepeatDataset,
)
from mmengine.registry import DefaultScope
from painted_images import Paint, data
from torchvision import tv_tensors

from visdet.datasets.samplers import AspectRatioBatchSampler, PlannedBatchSampler
from visdet.datasets.samplers.batch_sizes import choose_sizes, last_batches
from visdet.datasets.samplers.planned_images import PlannedImages
from visdet.datasets.samplers.run_plan import plan_of
from visdet.datasets.transforms.base import planned_size
from visdet.engine.data.loaders import build_dataloader
from visdet.engine.data.resumable_batches import ResumableBatches
from visdet.models import DetDataPreprocessor
from visdet.structures import DetDataSample
from visdet.structures.planned_batch import (
    TORCH_DRAWS,
    BatchPlan,
    PlannedBatch,
    holds,
    sample_draws,
    say_size,
)

PUBLISHED = Config.fromfile("configs/deformable_detr/deformable-detr_r50_16xb2-50e_coco.py").train_pipeline
MULTI_SCALE = PUBLISHED[2:4]
# (width, height) of COCO's images and how many of a thousand have it
FREQUENT = {(640, 480): 360, (480, 640): 120, (640, 427): 230, (427, 640): 80, (500, 375): 40, (640, 640): 30}


def halved(results):
    """A user's function that says nothing of what it does to the size."""
    results["img"] = tv_tensors.Image(results["img"][:, ::2, ::2])
    results["img_shape"] = tuple(results["img"].shape[-2:])
    return results


def coco_like(count, seed=0):
    """Return (height, width) as they occur in COCO."""
    rng = np.random.default_rng(seed)
    shares = np.array([*FREQUENT.values(), 140]) / 1000
    sizes = [*FREQUENT, None]
    drawn = [sizes[k] for k in rng.choice(len(sizes), count, p=shares)]
    return [(s[1], s[0]) if s else (int(rng.integers(300, 640)), 640) for s in drawn]


def sampler_of(dataset, world_size=1, rank=0, shuffle=True, seed=0):
    """Return a DefaultSampler of one of several processes."""
    sampler = DefaultSampler(dataset, shuffle, seed=seed)
    sampler.rank, sampler.world_size = rank, world_size
    sampler.num_samples = -(-len(dataset) // world_size)
    sampler.total_size = sampler.num_samples * world_size
    return sampler


def read(dataset, batches):
    """Return the (height, width) of the images of each batch."""
    return [[tuple(dataset[index]["inputs"].shape[-2:]) for index in batch] for batch in batches]


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(20, 90), st.integers(20, 90)), min_size=1, max_size=60),
    batch_size=st.integers(1, 7),
    world_size=st.integers(1, 3),
    max_sizes=st.integers(1, 6),
    drop_last=st.booleans(),
    is_random=st.booleans(),
)
def test_an_epoch_has_every_image_once_and_all_processes_take_one_size(
    sizes, batch_size, world_size, max_sizes, drop_last, is_random
):
    step = dict(type="RandomCrop", crop_size=(20, 60), crop_type="absolute_range", allow_negative_crop=True)
    dataset = data(sizes, *([step] if is_random else []))
    epochs = []
    for rank in range(world_size):
        sampler = sampler_of(dataset, world_size, rank)
        batches = PlannedBatchSampler(sampler, batch_size, drop_last, max_sizes, rank, world_size)
        assert 1 <= len(batches.sizes) <= max_sizes
        epoch = list(batches)
        epochs.append(epoch)
        assert len(epoch) == len(batches)
        assert all(len(batch) == batch_size for batch in epoch[: None if drop_last else -1])
        for batch, images in zip(epoch, read(dataset, epoch), strict=True):
            assert all(holds(batch.plan.size, image) for image in images)
    steps = list(zip(*epochs, strict=True))
    assert all(len({batch.plan.size for batch in step}) == 1 for step in steps)
    if not drop_last:
        indices = sorted(index for step in steps for batch in step for index in batch)
        expected = sorted(
            index for rank in range(world_size) for index in sampler_of(dataset, world_size, rank)
        )
        assert indices == expected


STEPS = [
    dict(type="Resize", scale=(90, 50), keep_ratio=True),
    dict(type="Resize", scale=(31, 50)),
    dict(type="Resize", scale_factor=0.7),
    dict(type="RandomChoiceResize", scales=[(40, 70), (50, 70), 33], keep_ratio=True),
    dict(type="RandomResize", scale=[(20, 30), (70, 80)], keep_ratio=True),
    dict(type="RandomResize", scale=(60, 50), ratio_range=(0.5, 1.5)),
    dict(type="RandomFlip", prob=[0.3, 0.3], direction=["horizontal", "vertical"]),
    dict(type="RandomCrop", crop_size=(30, 20)),
    dict(type="RandomCrop", crop_size=(10, 40), crop_type="absolute_range", allow_negative_crop=True),
    dict(type="RandomCrop", crop_size=(0.5, 0.7), crop_type="relative_range", allow_negative_crop=True),
    dict(type="Pad", size_divisor=32),
    dict(type="Pad", size_divisor=8, pad_to_square=True),
    dict(type="PhotoMetricDistortion"),
    dict(type="FilterAnnotations", keep_empty=False),
    dict(type="TorchvisionTransform", transform="ColorJitter", brightness=0.2),
    dict(type="Mosaic", size=(50, 40), pipeline=[Paint(), dict(type="LoadAnnotations")]),
    dict(type="MixUp", pipeline=[Paint(), dict(type="LoadAnnotations"), MULTI_SCALE[1]]),
    dict(type="RandomChoice", transforms=[[dict(type="RandomFlip", prob=0.5)], MULTI_SCALE], prob=[0.7, 0.3]),
]


@settings(max_examples=150, deadline=None)
@given(
    size=st.tuples(st.integers(20, 120), st.integers(20, 120)),
    steps=st.one_of(st.lists(st.sampled_from(STEPS), max_size=5), st.just(MULTI_SCALE)),
    seed=st.integers(0, 2**100),
)
def test_the_planned_size_is_the_size_that_the_pipeline_makes(size, steps, seed):
    dataset = data([size], *steps)
    rng, planned = Random(seed), size
    for step in dataset.pipeline.transforms:
        planned = planned_size(step, planned, rng)
    for index in PlannedBatch([0], [seed], BatchPlan(planned, ())):
        record = dataset.get_data_info(index)
        packed = dataset.pipeline(record | {"draw_record": lambda record=record: dict(record)})
        left = sample_draws().random()
    if packed is not None:  # A crop without its box is rejected.
        assert packed["inputs"].shape[-2:] == planned and left == rng.random()
    assert sample_draws() is TORCH_DRAWS


def test_without_a_plan_transforms_draw_from_torch_as_they_always_did():
    dataset = data(coco_like(6), *MULTI_SCALE)
    assert read(dataset, [range(6)]) == [PAINTED_AT_SEED_0]


PAINTED_AT_SEED_0 = [(772, 736), (736, 981), (800, 1067), (512, 683), (768, 1024), (768, 1044)]


SETS = {
    "coco": coco_like(1200),
    "portrait": [(high, wide) for high in (640, 960, 1280) for wide in (360, 427, 480, 540)] * 100,
    "panorama": [(300 + k % 200, 1200 + 3 * k % 1800) for k in range(1200)],
    "aerial": [(2000 + 7 * k % 2000, 2000 + 11 * k % 2000) for k in range(1200)],
    "one size": [(1080, 1920)] * 1200,
    "two sizes": [(720, 1280), (1280, 720)] * 600,
}


@pytest.mark.parametrize("batch_size", [2, 8])
@pytest.mark.parametrize("sizes", SETS.values(), ids=SETS)
def test_no_set_of_sizes_pads_more_than_batches_of_one_orientation(sizes, batch_size):
    dataset = data(sizes, *MULTI_SCALE)

    def image_size(index, rng):
        size = dataset.sizes[index]
        for step in dataset.pipeline.transforms:
            size = planned_size(step, size, rng)
        return size

    rng, planned, grouped, images = Random(0), [], [], 0
    batches = PlannedBatchSampler(sampler_of(dataset), batch_size)
    assert len(batches.sizes) <= 16
    for batch in batches:
        planned.append(len(batch) * math.prod(batch.plan.size))
        images += sum(
            math.prod(image_size(*item)) for item in zip(batch, map(Random, batch.seeds), strict=True)
        )
    for batch in AspectRatioBatchSampler(sampler_of(dataset), batch_size):
        height, width = (max(sides) for sides in zip(*(image_size(k, rng) for k in batch), strict=True))
        grouped.append(len(batch) * height * width)
    assert sum(planned) < sum(grouped) and max(planned) <= 1.05 * max(grouped)
    assert images <= sum(planned) < 1.3 * images


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([(800, 1067)] * 9, ((800, 1067),)),
        ([(800, 1067)] * 9 + [(1067, 800)], ((800, 1067), (1067, 800))),
        ([(500, 4000)] * 5 + [(300, 2000)] * 5, ((300, 2000), (500, 4000))),
    ],
)
def test_images_of_one_size_are_not_padded(sizes, expected):
    assert choose_sizes(sizes, 16) == expected == choose_sizes(sizes, 16, are_all=True)


def test_what_is_left_over_goes_where_it_makes_full_batches():
    sizes = [(60, 60), (80, 100), (100, 80)]
    wide, high, small = [(80, 100)] * 5, [(100, 80)] * 5, [(60, 60), (60, 50)] * 7
    batches = last_batches([*wide, *high, *small], lambda size: size, sizes, 4, Random(0))
    assert all(size in sizes and all(holds(size, item) for item in items) for size, items in batches)
    # Small images make full batches of the widest and of the highest ones.
    sizes = [(80, 120), (120, 80), (75, 130), (130, 75)]
    items = [(70, 125), (125, 70), *[(60, 60)] * 8]
    assert {size for size, _ in last_batches(items, lambda size: size, sizes, 2, Random(0))} <= {*sizes}
    # Nothing fits into both, so that the images left over have a batch of their own.
    sizes = [(80, 100), (100, 80)]
    *_, (size, items) = last_batches([*wide, *high], lambda size: size, sizes, 4, Random(0))
    assert size == (100, 100) and sorted(items) == [(80, 100), (100, 80)]


def test_the_order_depends_on_the_seed_and_the_epoch_alone():
    dataset = data(coco_like(60), *MULTI_SCALE)

    def epoch(seed, number=0):
        sampler = sampler_of(dataset, seed=seed)
        sampler.set_epoch(number)
        return [(batch[:], batch.seeds, batch.plan) for batch in PlannedBatchSampler(sampler, 4)]

    assert epoch(1) == epoch(1)
    assert epoch(1) != epoch(2) and epoch(1) != epoch(1, number=1)
    batches = PlannedBatchSampler(sampler_of(dataset, seed=1), 4)
    next(iter(batches))  # an epoch given up halfway
    assert [(batch[:], batch.seeds, batch.plan) for batch in batches] == epoch(1)


@pytest.mark.parametrize("steps", [MULTI_SCALE, [halved]], ids=["said", "read"])
def test_the_plan_follows_from_the_data_set_and_its_pipeline_alone(steps):
    images = PlannedImages(data(coco_like(30), *steps), seed=4)
    plan = plan_of(images, 5)
    torch.manual_seed(1)
    assert plan_of(images, 5) == plan == plan_of(PlannedImages(data(coco_like(30), *steps), seed=4), 5)
    assert len(plan.groups) <= 5 and plan.is_known == (steps is MULTI_SCALE)
    assert (plan.groups == plan.batches.sizes) == plan.is_known


def test_an_endless_sampler():
    dataset = data(coco_like(30), *MULTI_SCALE)
    found = list(islice(PlannedBatchSampler(InfiniteSampler(dataset, seed=1), 4), 50))
    assert all(len(batch) == 4 for batch in found)
    flat = [(index, seed) for batch in found for index, seed in zip(batch, batch.seeds, strict=True)]
    assert len(flat) == len(set(flat)), "each time an image comes, it is augmented anew"


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_pads_to_the_planned_size_and_resumes_at_any_batch(workers):
    dataset = data(coco_like(21), *MULTI_SCALE)
    preprocess = DetDataPreprocessor(mean=[0.0] * 3, std=[1.0] * 3, pad_value=1)

    def images(skipped):
        config = dict(
            dataset=dataset,
            batch_size=4,
            num_workers=workers,
            sampler=dict(type="DefaultSampler", shuffle=True),
            batch_sampler=dict(type="PlannedBatchSampler"),
        )

        with DefaultScope.overwrite_default_scope("visdet"):
            loader = ResumableBatches.install(build_dataloader(config, seed=3), endless=False)
        loader.batch_sampler.start_at(3, 10 + skipped, skipped)
        plans = [batch.indices.plan for batch in loader.batch_sampler]
        batches = [preprocess(batch, training=True) for batch in loader]
        for plan, batch in zip(plans, batches, strict=True):
            size = plan.size
            assert batch["inputs"].shape[-2:] == size
            for image, sample in zip(batch["inputs"], batch["data_samples"], strict=True):
                height, width = sample.img_shape
                assert sample.batch_input_shape == size
                assert image.sum() == 3 * (math.prod(size) - height * width)
        return [[(s.img_id, s.img_shape, s.flip) for s in batch["data_samples"]] for batch in batches]

    whole = images(0)
    assert len(whole) == 6 and all(images(skipped) == whole[skipped:] for skipped in (1, 4, 6))


def test_a_pipeline_that_says_nothing_is_looked_at():
    sizes = coco_like(40)
    keeps = PlannedBatchSampler(sampler_of(data(sizes, lambda results: results)), 4)
    assert keeps.sizes == PlannedBatchSampler(sampler_of(data(sizes)), 4).sizes
    assert all(batch.plan.size in keeps.sizes for batch in keeps)
    say_size({})  # of the batches that were read above
    state = torch.get_rng_state()
    dataset = data(sizes, halved, *MULTI_SCALE[:1])
    halves = PlannedBatchSampler(sampler_of(dataset), 4)
    assert torch.equal(torch.get_rng_state(), state)
    later = {"inputs": [torch.zeros(3, 4, 4)], "data_samples": [DetDataSample()]}
    say_size(later)
    assert "batch_input_shape" not in later["data_samples"][0], (
        "the images that were read leave nothing behind"
    )
    assert max(halves.sizes) == (320, 320) or max(halves.sizes)[0] <= 320
    batches = list(halves)
    assert sorted(index for batch in batches for index in batch) == list(range(40))
    for batch, images in zip(batches, read(dataset, batches), strict=True):
        assert batch.plan.size is None and batch.plan.size_for(images) in halves.sizes


def test_batches_of_a_pipeline_that_says_nothing_have_the_sizes_of_the_run():
    def shrunk(results):
        """Keeps a random part of the height or of the width."""
        height, width = results["img_shape"]
        if torch.rand(()) < 0.5:
            height = int(torch.randint(20, 40, ()))
        else:
            width = int(torch.randint(20, 40, ()))
        results["img"] = tv_tensors.Image(results["img"][:, :height, :width])
        results["img_shape"] = height, width
        return results

    dataset = data([(100, 100)] * 200, shrunk)
    batches = PlannedBatchSampler(sampler_of(dataset), 4)
    found = {
        batch.plan.size_for(images) for batch, images in zip(batches, read(dataset, batches), strict=True)
    }
    assert len(batches.sizes) <= 16 and found <= {*batches.sizes}


def test_data_sets_in_wrappers():
    parts = data([(50, 40)] * 5, dict(type="Resize", scale=(30, 20))), data([(50, 40)] * 4)
    joined = PlannedBatchSampler(sampler_of(ConcatDataset(parts)), 3)
    assert joined.sizes == ((20, 30), (50, 40))
    sizes = [batch.plan.size for batch in joined if any(index < 5 for index in batch)]
    assert (20, 30) in sizes
    assert all(batch.plan.size == (50, 40) for batch in joined if any(index >= 5 for index in batch))
    assert PlannedBatchSampler(sampler_of(RepeatDataset(parts[0], 2)), 3).sizes == ((20, 30),)


@pytest.mark.parametrize(
    ("boxes", "rooms"),
    [([3] * 5, (16,)), ([0], (16,)), ([5] * 400 + [93], (96,)), ([40] * 400 + [700], (64, 704))],
)
def test_boxes_are_padded_to_one_number_or_two(boxes, rooms):
    dataset = data([(9, 9)] * len(boxes), boxes=boxes)
    assert PlannedBatchSampler(sampler_of(dataset), 1).plan.boxes == rooms


def test_rejections():
    dataset = data([(9, 9)])
    for sampler in (PlannedBatchSampler, AspectRatioBatchSampler):
        with pytest.raises(ValueError, match="sampler must be"):
            sampler([1, 2], 2)
        with pytest.raises((AttributeError, TypeError), match="get_data_info"):
            list(sampler(DefaultSampler([1, 2, 3]), 2))
    with pytest.raises(ValueError, match="max_sizes"):
        PlannedBatchSampler(sampler_of(dataset), 1, max_sizes=0)
    dataset.get_data_info = lambda index: {}
    with pytest.raises(ValueError, match="height and width"):
        PlannedBatchSampler(sampler_of(dataset), 1)
