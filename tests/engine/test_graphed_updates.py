"""Gradients in one block of memory, and updates of the parameters that a graph replays."""

import copy
import itertools
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from visdet.engine import AmpOptimWrapper, OptimWrapper
from visdet.engine.graphs import calls, updates
from visdet.engine.graphs.updates import GraphedUpdate, why_not_a_graph
from visdet.engine.optim.gradients import GradientBlock, Gradients
from visdet.engine.optim.muon import MuonWithAuxAdam
from visdet.execution.tensor_tree import NotOnDevice, layout_of, map_tensors
from visdet.models.matching.padded_targets import PaddedTargets

OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    "AdamW": (torch.optim.AdamW, {"fused": True}),
    "Adam": (torch.optim.Adam, {"amsgrad": True, "fused": True}),
}


class RecordedUpdate(GraphedUpdate):
    """Updates whose graph is a Python function."""

    def __init__(self):
        self.said = []
        super().__init__(self.said.append)

    def _record(self, work):
        def replay():
            work()
            self._norm = torch.full((), 7.0)

        self._graph = SimpleNamespace(replay=replay)


@pytest.fixture
def recorded(monkeypatch):
    monkeypatch.setattr(updates, "why_not_a_graph", lambda wrapper: "")
    monkeypatch.setattr(calls, "why_not_captured", lambda capture: capture())
    monkeypatch.setattr(calls, "host_waits", lambda mode: nullcontext())
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    return RecordedUpdate()


def layers(device="cpu"):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 4, 5)).to(device)


def wrapped(model, kind, options, wrapper=OptimWrapper, **others):
    groups = [{"params": model[0].parameters(), "lr": 0.01}, {"params": model[2].parameters()}]
    return wrapper(kind(groups, lr=0.02, **options), clip_grad={"max_norm": 1.0}, **others)


def train(model, wrapper, steps=6, change=None):
    device = next(model.parameters()).device
    for step in range(steps):
        if change is not None and step == 3:
            change(wrapper)
        wrapper.optimizer.param_groups[1]["lr"] = 0.02 / (1 + step // 2)
        images = torch.linspace(-1, 1, 2 * 3 * 16, device=device).reshape(2, 3, 4, 4) + step
        learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
        wrapper.gradients.attach(wrapper.gradients.block_of(learning))
        with wrapper.optim_context(model):
            loss = model(images).float().square().mean()
        wrapper.update_params(loss)
    return [parameter.detach().clone() for parameter in model.parameters()]


def trained(replay, kind, options, *steps, device="cpu", tolerances=None, **others):
    """Train without graphs and with ``replay``, compare the parameters, and return both wrappers."""
    models = [layers(device), layers(device)]
    plain, graphed = (wrapped(model, kind, options, **others) for model in models)
    graphed.replay = replay
    expected, found = train(models[0], plain, *steps), train(models[1], graphed, *steps)
    assert_close(found, expected, **(tolerances or {}))
    return plain, graphed


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_replayed_updates_are_those_without_graphs(name, recorded):
    plain, graphed = trained(recorded, *OPTIMIZERS[name])
    first = 1 if name == "SGD" else 2  # The first update makes the state, whose place the second one sees.
    assert recorded.counts["replayed"] >= 6 - first and not recorded.said, recorded.report()
    saved, other = graphed.state_dict(), plain.state_dict()
    assert saved["param_groups"] == other["param_groups"], "rates and options are numbers"
    assert graphed.take_grad_norm() == {"grad_norm": torch.full((), 7.0)}


def forget_state(wrapper):
    wrapper.optimizer.load_state_dict(copy.deepcopy(wrapper.optimizer.state_dict()))


def decay(wrapper):
    wrapper.optimizer.param_groups[0]["weight_decay"] = 0.5


def freeze(wrapper):
    wrapper.optimizer.param_groups[0]["params"][0].requires_grad_(False)


@pytest.mark.parametrize("change", [forget_state, decay, freeze])
def test_an_update_of_another_kind_has_a_graph_of_its_own(change, recorded):
    trained(recorded, *OPTIMIZERS["AdamW"], 8, change)
    assert recorded.counts["eager"] >= 2 and recorded.counts["replayed"] >= 3, recorded.report()


class OwnWrapper(OptimWrapper):
    pass


class OwnAdamW(torch.optim.AdamW):
    pass


def with_hook(optimizer):
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda p: OwnWrapper(torch.optim.AdamW(p)), "OwnWrapper may do more"),
        (lambda p: OptimWrapper(OwnAdamW(p)), "OwnAdamW may compute on the host"),
        (lambda p: OptimWrapper(torch.optim.LBFGS(p)), "LBFGS may compute on the host"),
        (lambda p: OptimWrapper(with_hook(torch.optim.SGD(p))), "hooks of SGD.step may change it"),
        (
            lambda p: OptimWrapper(torch.optim.AdamW(p, lr=torch.tensor(1e-3))),
            "a learning rate is not a number",
        ),
        (lambda p: OptimWrapper(MuonWithAuxAdam(p)), "a parameter is not on a GPU"),
    ],
)
def test_what_cannot_be_a_graph_runs_as_without_graphs_and_is_said(build, reason):
    model, said = layers(), []
    wrapper = build(model.parameters())
    assert reason in why_not_a_graph(wrapper)
    bias = model[2].bias
    before = bias.detach().clone()
    graphed = GraphedUpdate(said.append)
    wrapper.optimizer.step = lambda *_: bias.data.add_(1.0)
    for _ in range(3):
        graphed(wrapper)
    assert_close(bias.detach(), before + 3.0)
    assert graphed.counts == {"eager": 3}
    assert said == [f"graph: the update of the parameters runs eagerly, because {why_not_a_graph(wrapper)}"]


def test_a_block_holds_gradients_in_the_layout_of_their_parameters():
    model = layers().to(memory_format=torch.channels_last)
    model[2].half()
    block = GradientBlock(list(model.parameters()))
    assert {flat.dtype for flat in block.flat} == {torch.float32, torch.float16}
    for parameter, view in zip(block.parameters, block.views, strict=True):
        assert view.stride() == parameter.stride() and view.dtype == parameter.dtype
        assert view.data_ptr() % 64 == block.flat[0].data_ptr() % 64
    places = sorted((view.data_ptr(), view.nbytes) for view in block.views)
    assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(places))


def test_gradients_keep_their_values_when_they_move_into_a_block():
    model = layers()
    first, *others = model.parameters()
    other = others[0]
    gradients = Gradients(model.parameters())
    first.grad = torch.ones_like(first)
    block = gradients.block_of([*others, first])
    assert block is gradients.block_of([first, *others]) and block.parameters[0] is first
    gradients.attach(block)
    assert first.grad is block.views[0] and first.grad.eq(1).all() and not other.grad.any()
    smaller = gradients.block_of(others)
    other.grad += 3
    gradients.attach(smaller)
    assert first.grad is None and other.grad is smaller.views[0] and other.grad.eq(3).all()
    assert gradients.zero() and not other.grad.any()
    other.requires_grad_(False)
    assert not gradients.zero(), "a frozen parameter must lose its gradient"


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"fused": True}),
        (MuonWithAuxAdam, {"min_size": 2}),
    ],
)
@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16"])
def test_updates_by_cuda_graphs(kind, options, dtype):
    amp = {} if dtype is None else {"wrapper": AmpOptimWrapper, "dtype": dtype}
    said = []
    close = {"rtol": 1e-3, "atol": 1e-3}
    plain, graphed = trained(
        GraphedUpdate(said.append), kind, options, device="cuda", tolerances=close, **amp
    )
    if dtype != "float16" or "fused" in options:  # Otherwise, the scaler waits for what the gradients are.
        assert not said and graphed.replay.counts["replayed"] >= 4, (said, graphed.replay.report())
    assert_close(graphed.take_grad_norm(), plain.take_grad_norm(), rtol=1e-3, atol=1e-4)


def test_a_field_of_the_host_refuses_to_be_read_where_only_the_device_computes():
    sizes = torch.ones(2, 1, 4)
    targets = PaddedTargets(
        boxes_px=torch.zeros(2, 3, 4), labels=torch.zeros(2, 3).long(), image_whwh=sizes, counts=[1, 3]
    )
    assert targets.lengths.tolist() == [1, 3]
    alone = map_tensors(torch.clone, {"targets": [targets]}, NotOnDevice)["targets"][0]
    assert torch.equal(alone.lengths, targets.lengths) and layout_of(alone) == layout_of(targets)
    for read in (max, list, len, bool, lambda counts: counts[0], lambda counts: counts.index(3)):
        with pytest.raises(RuntimeError, match="only the device computes"):
            read(alone.counts)
