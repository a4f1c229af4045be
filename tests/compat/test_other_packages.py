"""The attention modules of ultralytics, rfdetr, groundingdino and libreyolo: equal to stock under their bridges."""

import copy
import functools
import importlib
import sys

import pytest
import torch
from peers import peer
from torch.testing import assert_close
from training_steps import assert_gradients_close

from tests.fuzz.problem import generator_of
from visdet import compat
from visdet.compat import _bridge

SHAPES = [(8, 6), (4, 3)]
CHANNELS, HEADS, POINTS, QUERIES = 32, 4, 3, 9
ROWS = sum(height * width for height, width in SHAPES)


def random(*shape, seed=0):
    return torch.randn(shape, generator=generator_of(seed))


def inputs(coordinates, levels):
    references = random(2, QUERIES, 1, coordinates, seed=1).sigmoid().expand(-1, -1, levels, -1)
    return random(2, QUERIES, CHANNELS), references, random(2, ROWS, CHANNELS, seed=2)


SIZES = CHANNELS, len(SHAPES), HEADS, POINTS
TABLES = torch.tensor(SHAPES), torch.tensor([0, 48])
MASK = random(2, ROWS, seed=3) > 1
NAMED = dict(spatial_shapes=TABLES[0], level_start_index=TABLES[1])


def ms_deform_attn_of(module):
    return module.MSDeformAttn(*SIZES)


# For each package: the module, its layer, the levels of references of 2 and 4 coordinates, and a call of the layer.
PACKAGES = {
    "ultralytics": (
        "ultralytics.nn.modules.transformer",
        ms_deform_attn_of,
        {2: 1, 4: 1},
        lambda layer, q, r, m: layer(q, r, m, SHAPES, MASK if r.shape[-1] == 4 else None),
    ),
    "rfdetr": (
        "rfdetr.models.ops.modules.ms_deform_attn",
        ms_deform_attn_of,
        {2: len(SHAPES), 4: 1},
        lambda layer, q, r, m: layer(q, r, m, *TABLES, input_spatial_shapes_hw=SHAPES),
    ),
    "groundingdino": (
        "groundingdino.models.GroundingDINO.ms_deform_attn",
        lambda m: m.MultiScaleDeformableAttention(CHANNELS, HEADS, len(SHAPES), POINTS, batch_first=True),
        {2: len(SHAPES), 4: len(SHAPES)},
        lambda layer, q, r, m: layer(query=q, value=m, reference_points=r, **NAMED),
    ),
    "libreyolo": (
        "libreyolo.models.deformable_detr.ms_deform_attn",
        ms_deform_attn_of,
        {2: len(SHAPES), 4: len(SHAPES)},
        lambda layer, q, r, m: layer(q, r, m, *TABLES),
    ),
}


def layer_of(name, coordinates):
    """Return an attention module of a package, and a function that calls it."""
    module, make, levels, call = PACKAGES[name]
    given = inputs(coordinates, levels[coordinates])
    return make(importlib.import_module(module)), lambda layer: call(layer, *given)


@pytest.fixture(params=PACKAGES)
def bridge(request):
    peer(request.param, request.param, "check-packages")
    found = compat.find(request.param)
    yield found
    found.uninstall()


def output_and_gradients(layer, call):
    layer.zero_grad()
    output = call(layer)
    (output * random(*output.shape, seed=4)).sum().backward()
    return output.detach(), {key: parameter.grad.clone() for key, parameter in layer.named_parameters()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("coordinates", [2, 4], ids=["points", "boxes"])
def test_outputs_and_gradients_are_those_of_stock(bridge, coordinates):
    layer, call = layer_of(bridge.name, coordinates)
    with torch.no_grad():
        for seed, parameter in enumerate(layer.parameters()):
            parameter.add_(0.2 * random(*parameter.shape, seed=seed + 10))
    output, grads = output_and_gradients(layer, call)
    bridge.install()
    assert bridge.reached
    found, found_grads = output_and_gradients(layer, call)
    assert_close(found, output, rtol=1e-4, atol=1e-4)
    assert not torch.equal(found, output)  # it is another computation
    assert_gradients_close(found_grads, grads)
    bridge.uninstall()
    assert torch.equal(output_and_gradients(layer, call)[0], output)


@pytest.mark.filterwarnings("ignore")
def test_traces_keep_the_plain_path(bridge):
    layer, call = layer_of(bridge.name, 4)
    bridge.install()

    class Wrapped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, nothing):
            return call(self.layer) + nothing

    traced = torch.jit.trace(Wrapped(), (torch.zeros(1),), check_trace=False)
    assert "visdet::" not in str(traced.inlined_graph) and "grid_sampler" in str(traced.inlined_graph)


@pytest.mark.filterwarnings("ignore")
def test_uninstall_restores_the_module(bridge):
    layer_of(bridge.name, 4)
    bridge.install()
    (name,) = bridge.reached
    bridge.uninstall()
    module = sys.modules[name]

    def state():
        return dict(vars(module)), list(sys.meta_path)

    before = state()
    bridge.install()
    bridge.uninstall()
    assert state() == before


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_another_computation_is_reported_and_left_alone(bridge, monkeypatch):
    layer, call = layer_of(bridge.name, 4)
    bridge.install()
    ((module, (function, *_)),) = ((sys.modules[key], names) for key, names in bridge.reached.items())
    bridge.uninstall()
    stock = getattr(module, function, None)
    if stock is None:
        pytest.skip(f"{bridge.name} has a registry of kernels, and nothing is replaced")

    @functools.wraps(stock)
    def doubled(*args, **kwargs):
        return 2 * stock(*args, **kwargs)

    monkeypatch.setattr(module, function, doubled)
    expected = call(layer)
    with (
        pytest.warns(_bridge.CompatWarning, match=rf"{function} computes something else"),
        bridge.installed(),
    ):
        assert torch.equal(call(layer), expected)


def test_rfdetr_in_export_mode_keeps_its_path():
    peer("rfdetr", "rfdetr", "check-packages")
    bridge = compat.find("rfdetr")
    layer, call = layer_of("rfdetr", 4)
    exported = copy.deepcopy(layer)
    exported.export()
    expected = call(exported)
    with bridge.installed():
        assert torch.equal(call(exported), expected)


def test_libreyolo_names_the_kernel():
    peer("libreyolo", "libreyolo", "check-packages")
    kernels = importlib.import_module("libreyolo.kernels")
    kernels.resolve("ms_deform_attn")
    with compat.find("libreyolo").installed():
        assert kernels.active()["ms_deform_attn"] == "visdet"
    assert kernels.active().get("ms_deform_attn") != "visdet"
