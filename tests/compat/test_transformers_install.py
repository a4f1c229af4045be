"""visdet.compat.transformers: what it reaches, how it is undone, and where it leaves the plain path."""

import copy
import functools
import io
import sys

import pytest
import tiny_transformers
import torch
from plain_layers import tensors
from programs import run_python
from torch.testing import assert_close
from transformers_checks import (
    FAMILIES,
    FORMS,
    Recorder,
    attention_calls,
    modeling,
)

from visdet.compat import transformers as bridge


@pytest.fixture(autouse=True)
def uninstalled():
    yield
    bridge.uninstall()


@pytest.mark.parametrize("name", FAMILIES)
def test_uninstall_restores_everything(name):
    module = modeling(name)

    def state():
        classes = [value for value in vars(module).values() if isinstance(value, type)]
        # A config that is copied leaves __slotnames__ in its class.
        parts = [{**vars(owner), "__slotnames__": None} for owner in classes]
        return dict(vars(module)), parts, list(sys.meta_path)

    before = state()
    bridge.install()
    assert f"{module.__name__}" in bridge.patched() and state() != before
    bridge.uninstall()
    assert state() == before and bridge.patched() == {}


def test_families_are_found_in_a_fresh_process_at_their_import():
    code = (
        "import importlib, sys, visdet.compat.transformers as bridge\n"
        "bridge.install()\n"
        "assert not any('modeling_' in name for name in bridge.patched())\n"
        f"for name in {FAMILIES!r}:\n"
        "    importlib.import_module(f'transformers.models.{name}.modeling_{name}')\n"
        "    assert len(bridge.patched()[f'transformers.models.{name}.modeling_{name}']) == 1\n"
        "importlib.import_module('transformers.models.detr.modeling_detr')\n"
        f"assert len(bridge.patched()) == {len(FAMILIES)}\n"
    )
    run_python("-W", "error::UserWarning:visdet", "-c", code)


for_each_form = pytest.mark.parametrize("name", FORMS)


@for_each_form
def test_models_built_before_and_after(name):
    before, inputs, _ = tiny_transformers.build(name)
    bridge.install()
    after = tiny_transformers.build(name)[0]
    with torch.no_grad(), Recorder() as first:
        one = tensors(before.eval()(**inputs))
    with torch.no_grad(), Recorder() as second:
        other = tensors(after.eval()(**inputs))
    assert first.calls == second.calls != []
    assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    bridge.uninstall()
    with torch.no_grad(), Recorder() as third:
        before(**inputs), after(**inputs)
    assert third.calls == []


def test_a_model_that_binds_the_function_is_saved_and_copied_as_ever():
    before = tiny_transformers.build("d_fine")[0]
    bridge.install()
    for model in (before, tiny_transformers.build("d_fine")[0]):
        layer = next(m for m in model.modules() if "ms_deformable_attn_core" in vars(m))
        stock = vars(layer)["ms_deformable_attn_core"]
        assert stock is not layer.ms_deformable_attn_core  # what is read is visdet's, what is stored is stock
        assert vars(copy.deepcopy(layer))["ms_deformable_attn_core"] is stock
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        loaded = dict(torch.load(buffer, weights_only=False).named_modules())
        name = next(name for name, each in model.named_modules() if each is layer)
        assert vars(loaded[name])["ms_deformable_attn_core"] is stock
        layer.ms_deformable_attn_core = print
        assert layer.ms_deformable_attn_core is print
        layer.ms_deformable_attn_core = stock
    bridge.uninstall()
    assert layer.ms_deformable_attn_core is stock
    buffer = io.BytesIO()
    torch.save(before, buffer)


def layer_call(name, **changes):
    layer, arguments = attention_calls(name)[0]
    for key, value in changes.items():
        assert hasattr(layer, key)
        setattr(layer, key, value)
    return layer, arguments


@pytest.mark.parametrize("name, method", [("rt_detr_v2", "method"), ("d_fine", "decoder_method")])
def test_another_method_is_not_the_operators(name, method):
    layer, arguments = layer_call(name, **{method: "discrete"})
    with torch.no_grad():
        expected = layer(**arguments)
        with bridge.installed(), Recorder() as recorder:
            found = layer(**arguments)
    assert recorder.calls == []
    assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("change", ["no queries", "no images", "shapes in a tensor"])
@for_each_form
def test_unusual_arguments(name, change):
    layer, arguments = layer_call(name)
    of_queries = {"hidden_states", "position_embeddings", "reference_points"}
    of_images = {*of_queries, "encoder_hidden_states", "attention_mask"}
    for key, value in arguments.items():
        if change == "no queries" and key in of_queries and value is not None:
            arguments[key] = value[:, :0]
        if change == "no images" and key in of_images and value is not None:
            arguments[key] = value[:0]
    if change == "shapes in a tensor":
        arguments["spatial_shapes_list"] = torch.tensor(arguments["spatial_shapes_list"])
    expected = layer(**arguments)
    with bridge.installed():
        found = layer(**arguments)
    assert_close(found, expected, rtol=1e-4, atol=1e-4)


@for_each_form
def test_traces_and_exports_keep_the_plain_path(name):
    layer, arguments = layer_call(name)
    tensors = {key: value for key, value in arguments.items() if isinstance(value, torch.Tensor)}

    class Wrapped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, tensors):
            return self.layer(**{**arguments, **tensors})[0]

    bridge.install()
    traced = torch.jit.trace(Wrapped(), (tensors,), strict=False, check_trace=False)
    assert "visdet::" not in str(traced.inlined_graph) and "grid_sampler" in str(traced.inlined_graph)
    for strict in (False, True):
        program = torch.export.export(Wrapped(), (tensors,), strict=strict)
        assert "visdet" not in str(program.graph) and "grid_sampler" in str(program.graph), f"strict={strict}"


@for_each_form
def test_compiled_models_have_visdets_operator_without_a_graph_break(name):
    layer, arguments = layer_call(name)
    bridge.install()
    graphs = []

    def backend(graph, inputs):
        graphs.append(str(graph.graph))
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    with torch.no_grad():
        found, expected = compiled(**arguments), layer(**arguments)
    assert len(graphs) == 1 and "visdet" in graphs[0]
    assert_close(found[0], expected[0], rtol=1e-4, atol=1e-4)


def test_another_computation_is_reported_and_left_alone(monkeypatch):
    monkeypatch.setattr(bridge, "_is_foreign", lambda function: False)  # as if transformers had changed it
    module = modeling("mask2former")
    stock = module.multi_scale_deformable_attention

    def doubled(value, value_spatial_shapes, sampling_locations, attention_weights):
        return 2 * stock(value, value_spatial_shapes, sampling_locations, attention_weights)

    doubled.__module__ = module.__name__
    monkeypatch.setattr(module, "multi_scale_deformable_attention", doubled)
    with pytest.warns(bridge.CompatWarning, match="multi_scale_deformable_attention computes something else"):
        bridge.install()
    assert module.multi_scale_deformable_attention is doubled


@pytest.mark.parametrize("wraps", [True, False])
@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize(
    "name, owner, attribute",
    [
        ("deformable_detr", "MultiScaleDeformableAttention", "forward"),
        ("mask2former", None, "multi_scale_deformable_attention"),
        ("rt_detr_v2", None, "multi_scale_deformable_attention_v2"),
    ],
)
def test_a_patch_of_the_operator_is_kept(name, owner, attribute, is_before, wraps, monkeypatch):
    module = modeling(name)
    layer, arguments = attention_calls(name)[0]
    calls = []
    if not is_before:
        bridge.install()
    owner = getattr(module, owner) if owner else module
    original = getattr(owner, attribute)

    def recorder(*args, **kwargs):
        calls.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, attribute, functools.wraps(original)(recorder) if wraps else recorder)
    if is_before:
        with pytest.warns(bridge.CompatWarning, match="was wrapped or replaced by another package"):
            bridge.install()
    calls.clear()  # Small examples have been compared.
    with torch.no_grad():
        layer(**arguments)
    assert len(calls) == 1
    monkeypatch.undo()


def test_families_are_found_while_tensors_have_no_data():
    code = (
        "import warnings, visdet.compat.transformers as bridge\n"
        "from torch._subclasses.fake_tensor import FakeTensorMode\n"
        "warnings.simplefilter('error', bridge.CompatWarning)\n"
        "bridge.install()\n"
        "with FakeTensorMode():\n"
        "    from transformers.models.deformable_detr import modeling_deformable_detr\n"
        "    from transformers.models.d_fine import modeling_d_fine\n"
        "assert len(bridge.patched()) == 2\n"
    )
    run_python("-c", code)
