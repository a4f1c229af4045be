"""DINO: denoising against mmdet's numbers, room for boxes, graphs, refusals."""

import dataclasses
import functools
import json

import pytest
import torch
from detr_golden import Case, assert_losses_and_gradients
from golden import close, drawn_noise, every, sampled
from mmengine.optim import OptimWrapper
from mmengine.structures import InstanceData
from tiny_detr import VARIANTS, batch, config, train, train_by_graphs
from tiny_detr import build as variant
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close
from training_steps import backward

from visdet.engine import AmpOptimWrapper
from visdet.execution.tensor_tree import map_tensors
from visdet.models import CdnQueryGenerator
from visdet.models.boxes import inverse_sigmoid
from visdet.registry import MODELS

build = functools.partial(variant, "dino")


def build_with_drawn_noise(device="cpu"):
    model = build().to(device)
    drawn = [numbers.to(device) for numbers in drawn_noise(2, 300, 3)]
    model.dn_query_generator.draw = lambda batch_size, room, device: tuple(
        numbers[:, :room] for numbers in drawn
    )
    return model


@pytest.fixture(scope="module")
def case():
    return Case("dino_small")


@pytest.mark.parametrize("name", ["some", "one_empty", "all_empty", "more_than_denoising_queries", "static"])
def test_denoising_step_of_mmdet(case, name):
    """Queries, mask, losses and gradients of mmdet, which has no room for more queries than it makes."""
    prefix = f"case/{name}/"
    stored = {key.removeprefix(prefix): value for key, value in case.arrays.items() if key.startswith(prefix)}
    model = case.model.train()
    generator = CdnQueryGenerator(5, 256, group_cfg=json.loads(str(stored["config"]))["group_cfg"])
    generator.label_embedding = model.dn_query_generator.label_embedding
    generator.draw = lambda batch_size, room, device: drawn_noise(batch_size, room, 5)
    model.dn_query_generator = generator
    samples = case.samples()
    for i, sample in enumerate(samples):
        sample.gt_instances = InstanceData(
            bboxes=torch.from_numpy(stored[f"input/gt_bboxes/{i}"]),
            labels=torch.from_numpy(stored[f"input/gt_labels/{i}"]),
        )
    training = model.training_batch(case.images, samples)
    queries = generator(training.targets)
    count = int(stored["num_queries"])
    room = len(queries.is_counted)
    assert queries.is_counted.tolist() == [True] * count + [False] * (room - count)
    if count:
        present = [*range(count), *range(room, room + 20)]
        made = {
            "query": queries.query[:, :count],
            "box_logits": inverse_sigmoid(queries.references[:, :count], 1e-9),
            "mask": queries.mask(20)[present][:, present],
        }
        for key, value in stored.items():
            kind, step = every(key)
            if kind in made:
                close(sampled(made[kind].float(), step), torch.from_numpy(value).float())
    assert queries.mask(20)[:count, count:room].all() and queries.mask(20)[room:, :room].all()
    assert_losses_and_gradients(model, case.images, samples, stored)


def test_room_changes_nothing():
    """The queries, the losses and the gradients are those of a step without room for more boxes."""
    images, samples = batch((3, 1))
    results = []
    for room in (3, 8, 64):
        model = build_with_drawn_noise()
        step = model.training_batch(images, samples)
        targets = step.targets
        if room < targets.labels.shape[1]:
            boxes, labels = targets.boxes_px[:, :room], targets.labels[:, :room]
            targets = dataclasses.replace(targets, boxes_px=boxes, labels=labels)
        step = dataclasses.replace(step, targets=targets.padded_to(room))
        predictions, costs = model.predictions_and_costs(step)
        losses = model.losses(predictions, step, model.assign(costs, step))
        backward(losses)
        results.append({**losses, **{name: p.grad for name, p in model.named_parameters()}})
    for other in results[1:]:
        assert_close(other, results[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("count", "room"), [(0, 8), (8, 8), (9, 16), (17, 24)])
def test_boxes_are_padded_to_few_numbers(count, room):
    images, samples = batch((count, 0))
    assert build().training_batch(images, samples).targets.labels.shape == (2, room)


def test_draws_are_uniform():
    """What denoising queries are made of; mmdet's numbers say how."""
    chances, labels, signs, sizes = CdnQueryGenerator(10, 8).draw(2, 5000, torch.device("cpu"))
    for numbers, last in ((chances, 1), (labels, 9), (signs.clamp(min=0), 1), (sizes, 1)):
        assert numbers.min() >= 0 and numbers.max() <= last
        assert 0.48 * last < numbers.double().mean() < 0.52 * last
    assert signs.unique().tolist() == [-1, 1] and labels.shape == (2, 5000) and sizes.shape == (2, 5000, 4)


def test_autocast(device):
    images, samples = batch()
    images, samples = images.to(device), [sample.to(device) for sample in samples]
    gradients = []
    for enabled in (False, True):
        model = build_with_drawn_noise(device)
        with torch.autocast(device, torch.bfloat16, enabled=enabled):
            losses = model(images, samples, mode="loss")
        assert all(loss.dtype == torch.float32 for loss in losses.values())
        backward(losses)
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    # What is computed without gradients first must leave no casts of weights that have none.
    for name in (
        "memory_trans_fc.weight",
        "memory_trans_norm.weight",
        "decoder.ref_point_head.layers.0.weight",
    ):
        exact, rounded = (each[name] for each in gradients)
        assert (rounded - exact).norm() < 0.5 * exact.norm(), name


def test_nothing_in_a_step_waits_for_the_device():
    """Numbers of fake tensors do not exist, so that whatever asks for one fails, as a capture would."""
    model = build()
    images, samples = batch((3, 0), sizes=((64, 96), (50, 80)))
    step = model.training_batch(images, samples)
    model.predictions_and_costs(step)  # It makes the tables that are kept.
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as fakes:
        predictions, costs = model.predictions_and_costs(map_tensors(fakes.from_tensor, step))
    assert predictions["dn_"].logits.shape == (2, 2, 20, 3)
    assert set(costs) == {"", "enc_"}


@pytest.mark.cuda
@pytest.mark.parametrize(
    "wrapper, tolerance, others", [(OptimWrapper, 1e-3, 0), (AmpOptimWrapper, 3e-2, 0.03)]
)
def test_replayed_steps_are_eager_steps(wrapper, tolerance, others):
    eager, graphed = build().cuda(), build().cuda()
    expected = train(eager, wrapper)
    losses = train_by_graphs(graphed, wrapper)
    # In 16 bits, a few losses may be of other proposals, whose scores are equal up to rounding.
    differs = ~torch.isclose(losses, expected, rtol=tolerance, atol=tolerance)
    assert differs.float().mean() <= others, (losses, expected)


def _changed(**changes):
    return config(**{**VARIANTS["dino"], **changes})


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (_changed(with_box_refine=False), ValueError, "DINO: with_box_refine and as_two_stage must be True"),
        (_changed(as_two_stage=False), ValueError, "must be True, got True and False"),
        (_changed(encoder=None), ValueError, "DINO: encoder"),
        (
            _changed(dn_cfg={"group_cfg": {"dynamic": False}}),
            ValueError,
            "num_groups >= 1, got .*None",
        ),
        (
            _changed(dn_cfg={"group_cfg": {"num_dn_queries": 0}}),
            ValueError,
            "num_dn_queries >= 1, .*: 0",
        ),
        (_changed(dn_cfg={"group_cfg": {"num_dn_query": 10}}), ValueError, "got .*'num_dn_query': 10"),
        (
            _changed(dn_cfg={"num_classes": 3}),
            TypeError,
            "multiple values for keyword argument .num_classes.",
        ),
        (_changed(dn_cfg={"box_noise_scale": -1.0}), ValueError, "box_noise_scale must be"),
        (_changed(dn_cfg={"noise": 1}), TypeError, "unexpected keyword argument 'noise'"),
        (_changed(num_query=3), TypeError, "unexpected keyword argument 'num_query'"),
    ],
)
def test_configs_that_cannot_work(given, error, message):
    with pytest.raises(error, match=message):
        MODELS.build(given)


@pytest.mark.cuda
def test_the_head_decodes_all_layers_side_by_side_in_training():
    head = build().bbox_head.cuda()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    depth = len(head.reg_branches) - 1
    width = head.embed_dims
    hidden = torch.randn(depth, 2, 7, width, device="cuda")
    references = [torch.rand(2, 7, 4, device="cuda") for _ in range(depth)]
    found = head(hidden, references)
    with torch.no_grad():
        expected = head(hidden, references)
    for one, other in zip(found, expected, strict=True):
        assert one.requires_grad
        assert_close(one, other, rtol=1e-4, atol=1e-5)
