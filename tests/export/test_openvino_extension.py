"""The operators of the extension of OpenVINO give what visdet's operators give."""

import pytest
import torch
from torch.testing import assert_close

import visdet.ops as ops
from tests.fuzz.problem import generator_of

ov = pytest.importorskip("openvino", reason="the package openvino is not installed")
onnx = pytest.importorskip("onnx", reason="the package onnx is not installed")

LEVELS = [[7, 5], [4, 3]]


def attention(batch, queries):
    S = sum(h * w for h, w in LEVELS)
    draw = generator_of(queries)
    return {
        "value": torch.randn(batch, S, 2, 20, generator=draw),
        "level_shapes": torch.tensor(LEVELS),
        "level_starts": torch.tensor([0, 35]),
        "locations": torch.rand(batch, queries, 2, 2, 3, 2, generator=draw) * 1.4 - 0.2,
        "weights": torch.rand(batch, queries, 2, 2, 3, generator=draw),
    }


def aggregation(batch, queries):
    S, draw = 2 * sum(h * w for h, w in LEVELS), generator_of(queries)
    return {
        "features": torch.randn(batch, S, 24, generator=draw),
        "level_shapes": torch.tensor([LEVELS, LEVELS]),
        "level_starts": torch.tensor([[0, 35], [47, 82]]),
        "locations": torch.rand(batch, queries, 3, 2, 2, generator=draw) * 1.4 - 0.2,
        "weights": torch.rand(batch, queries, 3, 2, 2, 4, generator=draw),
    }


OPERATORS = {"ms_deform_attn": attention, "deformable_aggregation": aggregation}


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    from visdet.export.openvino_extension import build_extension

    core = ov.Core()
    core.add_extension(build_extension(tmp_path_factory.mktemp("extension")))
    return core


def compiled(core, name):
    """Return a graph of one node, whose sizes are not known before it runs."""
    inputs, given = OPERATORS[name](1, 1), []
    for key, x in inputs.items():
        sizes = ", ".join(f"{key}{axis}" for axis in range(x.dim()))
        given.append(f"{'float' if x.is_floating_point() else 'int64'}[{sizes}] {key}")
    text = f"""<ir_version: 10, opset_import: ["": 20, "visdet": 1]>
    graph ({", ".join(given)}) => (float[B, Q, C] result) {{ result = visdet.{name} ({", ".join(inputs)}) }}"""
    model = onnx.parser.parse_model(text)
    return core.compile_model(
        core.read_model(model.SerializeToString()), "CPU", {"INFERENCE_PRECISION_HINT": "f32"}
    )


@pytest.mark.parametrize("name", OPERATORS)
def test_nodes_give_what_operators_give(core, name):
    run = compiled(core, name)
    for batch, queries in ((1, 47), (3, 6), (2, 0)):  # as many queries as pixels, fewer, none
        inputs = OPERATORS[name](batch, queries)
        found = run([x.numpy() for x in inputs.values()])["result"]
        assert_close(torch.from_numpy(found), getattr(ops, name)(*inputs.values()))


@pytest.mark.parametrize("name", OPERATORS)
def test_levels_beyond_the_values_are_an_error(core, name):
    inputs = OPERATORS[name](1, 4)
    inputs["level_starts"] = inputs["level_starts"] + 60
    with pytest.raises(RuntimeError, match="must lie within"):
        compiled(core, name)([x.numpy() for x in inputs.values()])
