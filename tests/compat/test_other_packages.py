"""The attention modules of ultralytics, rfdetr, groundingdino and libreyolo: equal to stock under their bridges."""

import copy
import functools
import importlib
import importlib.util
import os
import sys

import pytest
import torch

from visdet import compat
from visdet.compat import _bridge

SHAPES = [(8, 6), (4, 3)]
CHANNELS, HEADS, POINTS, QUERIES = 32, 4, 3, 9
ROWS = sum(height * width for height, width in SHAPES)


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def inputs(coordinates, levels):
    references = random(2, QUERIES, 1, coordinates, seed=1).sigmoid().expand(-1, -1, levels, -1)
    return random(2, QUERIES, CHANNELS), references, random(2, ROWS, CHANNELS, seed=2)


def ultralytics(coordinates):
    module = importlib.import_module("ultralytics.nn.modules.transformer")
    query, references, memory = inputs(coordinates, 1)
    mask = random(2, ROWS, seed=3) > 1
    layer = module.MSDeformAttn(CHANNELS, len(SHAPES), HEADS, POINTS)
    return layer, lambda layer: layer(query, references, memory, SHAPES, mask if coordinates == 4 else None)


def rfdetr(coordinates):
    module = importlib.import_module("rfdetr.models.ops.modules.ms_deform_attn")
    query, references, memory = inputs(coordinates, len(SHAPES) if coordinates == 2 else 1)
    tables = torch.tensor(SHAPES), torch.tensor([0, 48])
    pairs = {"input_spatial_shapes_hw": SHAPES} if coordinates == 4 else {}
    layer = module.MSDeformAttn(CHANNELS, len(SHAPES), HEADS, POINTS)
    return layer, lambda layer: layer(query, references, memory, *tables, **pairs)


def groundingdino(coordinates):
    module = importlib.import_module("groundingdino.models.GroundingDINO.ms_deform_attn")
    query, references, memory = inputs(coordinates, len(SHAPES))
    layer = module.MultiScaleDeformableAttention(CHANNELS, HEADS, len(SHAPES), POINTS, batch_first=True)
    named = dict(spatial_shapes=torch.tensor(SHAPES), level_start_index=torch.tensor([0, 48]))
    return layer, lambda layer: layer(query=query, value=memory, reference_points=references, **named)


def libreyolo(coordinates):
    module = importlib.import_module("libreyolo.models.deformable_detr.ms_deform_attn")
    query, references, memory = inputs(coordinates, len(SHAPES))
    tables = torch.tensor(SHAPES), torch.tensor([0, 48])
    layer = module.MSDeformAttn(CHANNELS, len(SHAPES), HEADS, POINTS)
    return layer, lambda layer: layer(query, references, memory, *tables)


LAYERS = {
    "ultralytics": ultralytics,
    "rfdetr": rfdetr,
    "groundingdino": groundingdino,
    "libreyolo": libreyolo,
}


# Under `make check-packages` all of them must be there.
CHECKED = [
    name
    for name in LAYERS
    if os.environ.get("VISDET_CHECK") == "check-packages" or importlib.util.find_spec(name) is not None
]
if not CHECKED:
    pytest.skip(f"none of {', '.join(LAYERS)} is installed: make check-packages", allow_module_level=True)


@pytest.fixture(params=CHECKED)
def bridge(request):
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
    layer, call = LAYERS[bridge.name](coordinates)
    with torch.no_grad():
        for seed, parameter in enumerate(layer.parameters()):
            parameter.add_(0.2 * random(*parameter.shape, seed=seed + 10))
    output, grads = output_and_gradients(layer, call)
    bridge.install()
    assert bridge.reached
    found, found_grads = output_and_gradients(layer, call)
    torch.testing.assert_close(found, output, rtol=1e-4, atol=1e-4)
    assert not torch.equal(found, output)  # it is another computation
    largest = max(float(grad.abs().max()) for grad in grads.values())
    for key, grad in grads.items():
        torch.testing.assert_close(found_grads[key], grad, rtol=1e-4, atol=1e-4 * largest)
    bridge.uninstall()
    assert torch.equal(output_and_gradients(layer, call)[0], output)


@pytest.mark.filterwarnings("ignore")
def test_traces_keep_the_plain_path(bridge):
    layer, call = LAYERS[bridge.name](4)
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
    LAYERS[bridge.name](4)
    bridge.install()
    (name,) = bridge.reached
    bridge.uninstall()
    module = sys.modules[name]
    before = dict(vars(module)), list(sys.meta_path)
    bridge.install()
    bridge.uninstall()
    assert (dict(vars(module)), list(sys.meta_path)) == before


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_another_computation_is_reported_and_left_alone(bridge, monkeypatch):
    layer, call = LAYERS[bridge.name](4)
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
    if "rfdetr" not in CHECKED:
        pytest.skip("rfdetr is not installed: make check-packages")
    bridge = compat.find("rfdetr")
    layer, call = rfdetr(4)
    exported = copy.deepcopy(layer)
    exported.export()
    expected = call(exported)
    with bridge.installed():
        assert torch.equal(call(exported), expected)


def test_libreyolo_names_the_kernel():
    if "libreyolo" not in CHECKED:
        pytest.skip("libreyolo is not installed: make check-packages")
    kernels = importlib.import_module("libreyolo.kernels")
    kernels.resolve("ms_deform_attn")
    with compat.find("libreyolo").installed():
        assert kernels.active()["ms_deform_attn"] == "visdet"
    assert kernels.active().get("ms_deform_attn") != "visdet"
