"""Before the first step of a run, the largest batch is tried, and a step of each size is captured."""

import copy
import logging
from unittest.mock import Mock

import pytest
import torch
from mmengine.dataset import DefaultSampler, pseudo_collate
from mmengine.optim import OptimWrapper
from painted_images import data
from tiny_detr import build
from torch.nn.utils import parameters_to_vector
from torch.testing import assert_close
from torch.utils.data import DataLoader

from visdet.datasets.samplers import PlannedBatchSampler
from visdet.engine.data.data_workers import explain_collation
from visdet.engine.data.resumable_batches import ResumableBatches
from visdet.engine.graphs.methods import GraphedLoss
from visdet.engine.graphs.planned import ImaginedBatches, MemoryNotEnoughError, prepare_sizes, shapes_of
from visdet.engine.stages import StagedModel
from visdet.execution.tensor_tree import layout_of
from visdet.models import DetDataPreprocessor

MULTI_SCALE = dict(type="RandomChoiceResize", scales=[(60, 90), (70, 90), (80, 100)], keep_ratio=True)


def loader_of(sizes, *steps, batch_size=2, max_sizes=4, boxes=None):
    dataset = data(sizes, *steps, boxes=boxes)
    batches = PlannedBatchSampler(DefaultSampler(dataset, seed=1), batch_size, max_sizes=max_sizes)
    loader = DataLoader(dataset, batch_sampler=batches, collate_fn=pseudo_collate)
    explain_collation(loader)
    return ResumableBatches.install(loader, endless=False)


def model_of(variant="base"):
    model = build(variant)
    model.data_preprocessor = DetDataPreprocessor(mean=[1.0] * 3, std=[2.0] * 3)
    return model


def imagined_of(loader, model):
    wrapper = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    plan = loader.batch_sampler.batch_sampler.plan
    return ImaginedBatches(model, wrapper, loader.collate_fn, loader.dataset[0], plan)


@pytest.mark.parametrize("variant", ["base", "two_stage"])
@pytest.mark.parametrize(
    ("sizes", "steps", "boxes"),
    [
        ([(48, 64)] * 9, [], None),
        ([(48, 64)] * 5 + [(64, 48)] * 4, [], None),
        ([(48, 64), (64, 48), (50, 60)] * 7, [MULTI_SCALE], [3, 20, 0] * 7),
    ],
)
def test_the_batches_of_a_run_have_the_layouts_that_are_imagined(sizes, steps, boxes, variant):
    loader, model = loader_of(sizes, *steps, boxes=boxes), model_of(variant)
    imagined = imagined_of(loader, model)
    expected = set()
    for number, size, rooms in shapes_of(loader.batch_sampler.batch_sampler, imagined.plan):
        expected.add(layout_of(model.training_batch(**imagined.batch(number, size, rooms))))
    assert len(expected) <= 6
    for batch in loader:
        assert layout_of(model.training_batch(**model.data_preprocessor(batch, training=True))) in expected


def test_an_attempt_changes_neither_weights_nor_gradients():
    loader, model = loader_of([(48, 64)] * 4), model_of()
    before = copy.deepcopy(model.state_dict())
    assert imagined_of(loader, model).fits(2, (48, 64))
    assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_batch_that_does_not_fit_is_said_before_the_first_step(monkeypatch):
    loader, model = loader_of([(64, 90), (90, 90), (20, 20)] * 3), model_of()
    model.loss = Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: type("Device", (), {"total_memory": 2**33})
    )
    with pytest.raises(
        MemoryNotEnoughError, match=r"2 images of 90 x 90 .* 8 GiB .*train_dataloader\.batch_size"
    ):
        imagined_of(loader, model).try_largest(2)


def test_nothing_is_done_without_a_gpu_or_a_plan():
    loader, model = loader_of([(48, 64)] * 4), model_of()
    wrapper = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    model.loss = None
    prepare_sizes(model, wrapper, loader, None, logging.getLogger("planned"))
    prepare_sizes(model, wrapper, DataLoader([1]), None, logging.getLogger("planned"))


@pytest.mark.cuda
def test_all_steps_of_a_run_are_replayed_and_memory_does_not_grow():
    sizes = [(48, 64), (64, 48), (50, 60)] * 30
    loader, model = loader_of(sizes, MULTI_SCALE, boxes=[3, 20, 0] * 30, batch_size=4), model_of().cuda()
    wrapper = OptimWrapper(torch.optim.AdamW(model.parameters(), lr=1e-4))
    wrapper.initialize_count_status(model, 0, 100)
    graphs = GraphedLoss(model)
    state, before = torch.cuda.get_rng_state(), parameters_to_vector(model.parameters()).detach()
    prepare_sizes(model, wrapper, loader, graphs, logging.getLogger("planned"))
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert torch.equal(parameters_to_vector(model.parameters()), before)
    assert all(parameter.grad is None for parameter in model.parameters())
    reserved = 0
    staged = StagedModel(model, {"loss": graphs})
    for _ in range(3):
        for batch in loader:
            staged.train_step(batch, wrapper)
        reserved = reserved or torch.cuda.max_memory_reserved()
    assert set(graphs.counts) == {"replayed"}, graphs.report()
    assert torch.cuda.max_memory_reserved() == reserved
