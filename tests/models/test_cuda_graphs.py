"""Training steps by CUDA graphs: the numbers of eager steps, whatever the batch, and what falls back."""

import copy
import re

import pytest
import torch
from mmengine.optim import OptimWrapper
from test_deformable_detr import BATCH, batch, build, config

from visdet.engine import AmpOptimWrapper
from visdet.engine.cuda_graphs import GraphedLoss

STEPS = 12


def model_with_dropout(variant):
    encoder, decoder = (copy.deepcopy(config()[name]) for name in ("encoder", "decoder"))
    for part in (encoder, decoder):
        part["layer_cfg"]["ffn_cfg"]["ffn_drop"] = 0.1
    return build(variant, encoder=encoder, decoder=decoder).cuda().train()


def batches():
    """Batches of two shapes in turns: without padding, and with, and numbers of boxes that change within a shape."""
    found = []
    for index in range(STEPS):
        sizes = (BATCH, BATCH) if index % 2 else ((64, 80 - index), (50 + index, 96))
        images, samples = batch(counts=(index % 4, 3), sizes=sizes)
        found.append({"inputs": images.cuda(), "data_samples": [sample.to("cuda") for sample in samples]})
    return found


def train(model, wrapper, graphs=None, steps=STEPS, **options):
    """Return the losses of training steps, as the runner makes them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    wrapper = wrapper(optimizer, clip_grad={"max_norm": 1.0}, **options)
    wrapper.initialize_count_status(model, 0, steps)
    torch.manual_seed(5)
    losses = []
    for data in batches()[:steps]:
        if graphs is None:
            losses.append(_step(model, wrapper, data))
            continue
        with graphs.installed():
            losses.append(_step(model, wrapper, data))
    return torch.stack(losses)


def _step(model, wrapper, data):
    with wrapper.optim_context(model):
        losses = model(**data, mode="loss")
    total, log = model.parse_losses(losses)
    wrapper.update_params(total)
    return torch.stack([value.detach() for value in log.values()])


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("variant", "wrapper", "options", "tolerance"),
    [
        ("base", OptimWrapper, {}, 1e-3),
        ("two_stage", OptimWrapper, {"accumulative_counts": 3}, 1e-3),
        ("refine", AmpOptimWrapper, {}, 3e-2),
        ("base", AmpOptimWrapper, {"dtype": "float16"}, 3e-2),
    ],
)
def test_replayed_steps_are_eager_steps(variant, wrapper, options, tolerance):
    eager, graphed = model_with_dropout(variant), model_with_dropout(variant)
    expected = train(eager, wrapper, **options)
    graphs = GraphedLoss(graphed)
    losses = train(graphed, wrapper, graphs, **options)
    assert graphs.counts == {"of a new shape": 2, "replayed": STEPS - 2}, graphs.report()
    torch.testing.assert_close(losses, expected, rtol=tolerance, atol=tolerance)
    for a, b in zip(graphed.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4 if wrapper is OptimWrapper else 3e-3)
    assert "loss" not in vars(graphed)


@pytest.mark.cuda
def test_shapes_in_turns_with_room_for_one():
    model = model_with_dropout("base")
    graphs = GraphedLoss(model, max_shapes=1)
    assert train(model, OptimWrapper, graphs).isfinite().all()
    assert len(graphs._graphs) == 1
    assert graphs.counts["replayed"] == STEPS - 2
    # A pool has segments of 2 MiB at least.
    assert int(re.search(r"1 shapes hold (\d+) MiB", graphs.report())[1]) >= 2, graphs.report()


@pytest.mark.cuda
def test_what_cannot_be_captured_runs_eagerly_and_is_counted(monkeypatch):
    eager, graphed = model_with_dropout("base"), model_with_dropout("base")
    expected = train(eager, OptimWrapper)
    own = type(graphed).losses
    monkeypatch.setattr(
        graphed, "losses", lambda *a: {k: v * (v.item() / v.item()) for k, v in own(graphed, *a).items()}
    )
    said = []
    graphs = GraphedLoss(graphed, say=said.append)
    losses = train(graphed, OptimWrapper, graphs)
    assert graphs.counts == {"of a new shape": 2, "after a failed capture": STEPS - 2}
    assert len(said) == 1 and "a batch of 2 x 3 x 64 x 96 cannot be captured" in said[0]
    torch.testing.assert_close(losses, expected, rtol=1e-3, atol=1e-3)


def test_without_a_gpu_steps_are_eager_and_counted():
    model = build("base").train()
    images, samples = batch()
    expected = model(images, samples, mode="loss")
    graphs = GraphedLoss(model)
    with graphs.installed():
        losses = model(images, samples, mode="loss")
    assert losses.keys() == expected.keys()
    assert all(torch.equal(losses[name], expected[name]) for name in losses)
    assert graphs.report() == "graphs: 1 batches, 1 without a GPU or stages; 0 shapes hold 0 MiB"
    assert "loss" not in vars(model)
