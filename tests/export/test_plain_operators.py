"""Graphs that runtimes read alike: plainer operators, coordinates within the maps, norms within the weights."""

import pytest
import torch
import torch.nn.functional as F
from numpy.testing import assert_allclose, assert_array_equal
from torch import nn
from torch.testing import assert_close

from tests.fuzz.problem import generator_of
from visdet.export.folding import with_folded_norms
from visdet.export.package import write_description
from visdet.export.program import Program
from visdet.models.backbones.resnet import ResNet
from visdet.ops.ms_deform_attn_fused import ms_deform_attn_fused

onnx = pytest.importorskip("onnx", reason="the package onnx is not installed")
onnxruntime = pytest.importorskip("onnxruntime", reason="the package onnxruntime is not installed")
pytest.importorskip("onnxscript", reason="the package onnxscript is not installed")

NUMBERS = torch.tensor([[3.0, float("nan"), -float("inf")], [float("inf"), 0.0, 3.0]])
EQUAL = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0]]).repeat(2, 20)
FLAGS = torch.tensor([[True, False], [True, True]])
INTEGERS = torch.tensor([-7, -6, -1, 0, 5, 6, 2**40 + 1])
ROWS = torch.tensor([[2, 0, 1, 2], [1, 1, 0, 2]])
TABLE = torch.arange(30.0).view(2, 3, 5)


AXES = torch.tensor([0.0, 1.0, 0.0, -1.0, 0.0])
# The first query attends to nothing, which torch answers with zeros.
FIRST_ALONE = torch.tensor([[False, False, False], [True, False, True], [True, True, True]])
ADDED = torch.zeros(3, 3).masked_fill(~FIRST_ALONE, -float("inf")) + torch.eye(3)


def attention(x, mask):
    return F.scaled_dot_product_attention(x / 30, x / 20, x, mask)


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return (self.function(*inputs),)


def written(module, folder, **inputs):
    """Write a module as ONNX, and return its graph and its results in onnxruntime."""
    from visdet.export.formats import onnx as format

    program = Program(module, inputs, ("found",))
    write_description({"outputs": {"found": ""}}, folder)
    format.write(program, folder)
    return onnx.load(folder / "model.onnx"), format.load(folder)(inputs)["found"]


@pytest.mark.parametrize(
    ("lacks", "function", "inputs"),
    [
        pytest.param("IsInf", lambda x: x.isinf(), [NUMBERS], id="isinf"),
        pytest.param("IsNaN", lambda x: x.isnan(), [NUMBERS], id="isnan"),
        pytest.param("IsInf", lambda x: x.isfinite(), [NUMBERS], id="isfinite"),
        pytest.param("IsNaN", lambda x: x.nan_to_num(7.0, neginf=-2.0), [NUMBERS], id="nan_to_num"),
        pytest.param("IsNaN", torch.atan2, [TABLE.sin(), TABLE.cos()], id="atan2"),
        pytest.param("IsNaN", torch.atan2, [AXES, AXES.flip(0)], id="atan2 of axes"),
        pytest.param("IsNaN", attention, [TABLE, FIRST_ALONE], id="attention"),
        pytest.param("IsNaN", attention, [TABLE, ADDED], id="attention by added numbers"),
        pytest.param("Equal", lambda a: a == a.flip(0), [FLAGS], id="equal"),
        pytest.param("Equal", lambda a: a != a.flip(1), [FLAGS], id="different"),
        pytest.param("Equal", lambda a: a // 3, [INTEGERS], id="quotient"),
        pytest.param("Equal", lambda a: -(-a // 4), [INTEGERS], id="rounded up"),
        pytest.param(
            "Equal", lambda a: a // torch.tensor([2, 3, -4, 5, 6, 7, 3]), [INTEGERS], id="quotients"
        ),
        pytest.param("EyeLike", lambda x: x.diagonal(dim1=0, dim2=2), [TABLE[:, :, :2]], id="diagonal"),
        pytest.param(None, lambda a: a.flatten().cumsum(0), [FLAGS], id="count"),
        pytest.param(
            "GatherElements",
            lambda x, i: x.gather(1, i.unsqueeze(-1).expand(-1, -1, 5)),
            [TABLE, ROWS],
            id="rows",
        ),
        pytest.param("GatherElements", lambda x, i: x[..., 0].gather(1, i), [TABLE, ROWS], id="numbers"),
        pytest.param(
            "GatherElements", lambda x, i: x.gather(2, i[:, :3].unsqueeze(-1)), [TABLE, ROWS], id="last axis"
        ),
        pytest.param(
            "GatherElements", lambda x, i: x.gather(0, (i % 2).view(1, 2, 4)), [TABLE, ROWS], id="first axis"
        ),
        pytest.param(None, lambda x: x.argsort(dim=1, descending=True, stable=True), [EQUAL], id="argsort"),
        pytest.param(None, lambda x: x.sort(dim=1, stable=True).indices, [EQUAL], id="sort"),
        pytest.param(
            None,
            lambda x: torch.sort(x.T, dim=0, stable=True, descending=True).values,
            [EQUAL],
            id="sort of columns",
        ),
    ],
)
def test_results_are_those_of_torch(tmp_path, lacks, function, inputs):
    model, found = written(Function(function), tmp_path, **{f"x{k}": x for k, x in enumerate(inputs)})
    assert_close(found, function(*inputs), equal_nan=True)
    sums = {node.input[0] for node in model.graph.node if node.op_type == "CumSum"}
    types = {
        value.name: value.type.tensor_type.elem_type
        for value in onnx.shape_inference.infer_shapes(model).graph.value_info
    }
    assert lacks not in {node.op_type for node in model.graph.node}
    assert all(types[name] == onnx.TensorProto.FLOAT for name in sums)


@pytest.mark.parametrize(
    ("kind", "function", "inputs"),
    [
        ("Where", lambda a, x: torch.where(a.unsqueeze(-1), x[:, :2], x[0, 0]), [FLAGS, TABLE]),
        ("ScatterElements", lambda a: torch.zeros_like(a).scatter(1, ROWS[:, :2] % 2, ~a), [FLAGS]),
    ],
)
def test_operands_are_those_that_every_runtime_reads(tmp_path, kind, function, inputs):
    """Some repeat no third operand of Where, and write no booleans."""
    model, found = written(Function(function), tmp_path, **{f"x{k}": x for k, x in enumerate(inputs)})
    assert torch.equal(found, function(*inputs))
    inferred = onnx.shape_inference.infer_shapes(model).graph
    types = {value.name: value.type.tensor_type for value in (*inferred.value_info, *inferred.output)}
    for node in inferred.node:
        if node.op_type == kind:
            operand, result = (types[name] for name in (node.input[2], node.output[0]))
            assert operand.shape == result.shape and result.elem_type != onnx.TensorProto.BOOL
            break
    else:
        raise AssertionError(kind)


@pytest.mark.parametrize("descending", [True, False])
def test_openvino_keeps_the_first_of_equal_numbers(tmp_path, descending):
    openvino = pytest.importorskip("openvino", reason="the package openvino is not installed")
    module = Function(lambda x: x.argsort(dim=1, descending=descending, stable=True))
    written(module, tmp_path, x=EQUAL)
    compiled = openvino.Core().compile_model(
        tmp_path / "model.onnx", "CPU", {"INFERENCE_PRECISION_HINT": "f32"}
    )
    found = compiled({"x": EQUAL.numpy()})[0]
    assert_array_equal(found, module(EQUAL)[0])


class Neck(nn.Module):
    def forward(self, *maps):
        return maps


class Attention(nn.Module):
    """Two levels of 5 x 7 and 3 x 4 pixels, whose sizes the neck tells."""

    def __init__(self):
        super().__init__()
        self.neck = Neck()

    def forward(self, *inputs):
        first, second, offsets = inputs
        maps = self.neck(first, second)
        value = torch.cat([level.flatten(2) for level in maps], 2).transpose(1, 2).unsqueeze(2)
        shapes = torch.tensor([[5, 7], [3, 4]])
        references = torch.full((1, offsets.shape[1], 2, 2), 0.5)
        logits = torch.zeros(1, offsets.shape[1], 1, 4)
        return (
            ms_deform_attn_fused(value, shapes, torch.tensor([0, 35]), references, offsets, logits, [2, 2]),
        )


def test_no_pixel_beyond_a_map_is_read(tmp_path):
    """Far, infinite and NaN coordinates read zeros, whatever a runtime does beyond a map."""
    draw = generator_of(0)
    first, second = torch.randn(1, 4, 5, 7, generator=draw), torch.randn(1, 4, 3, 4, generator=draw)
    offsets = torch.randn(1, 60, 1, 4, 2, generator=draw) * 4
    far = torch.tensor([float("inf"), -float("inf"), float("nan"), 1e7, -1e30, 3.5, -4.5])
    offsets[0, :7, 0, :, 0] = far.unsqueeze(1)
    offsets[0, 7:14, 0, :, 1] = far.unsqueeze(1)
    module = Attention()
    model, found = written(module, tmp_path, first=first, second=second, offsets=offsets)
    expected = module(first, second, offsets)[0]
    assert_close(found, expected)
    assert expected.isfinite().all() and expected.abs().amax() > 0.1
    nodes = [node for node in model.graph.node if node.op_type == "GridSample"]
    assert len(nodes) == 2
    for node in nodes:
        (mode,) = [attribute for attribute in node.attribute if attribute.name == "padding_mode"]
        mode.s = b"reflection"
    given = {"first": first.numpy(), "second": second.numpy(), "offsets": offsets.numpy()}
    reflected = onnxruntime.InferenceSession(model.SerializeToString()).run(None, given)[0]
    assert_allclose(reflected, found, atol=1e-6)


@pytest.mark.parametrize("depth", [18, 50])
def test_frozen_norms_are_within_the_weights(tmp_path, depth):
    model = ResNet(depth, norm_cfg={"type": "BN", "requires_grad": False}, norm_eval=True, base_channels=8)
    for name, value in model.state_dict().items():
        if "bn" in name or "downsample.1" in name:
            value.copy_(torch.rand(value.shape) + 0.5)
    folded, x = with_folded_norms(model), torch.randn(1, 3, 64, 96)
    assert not [part for part in folded.modules() if isinstance(part, nn.BatchNorm2d)]
    with torch.no_grad():
        assert_close(folded(x), model.eval()(x), rtol=1e-4, atol=1e-5)
    assert [part for part in model.modules() if isinstance(part, nn.BatchNorm2d)]
    graph, _ = written(Function(lambda x: folded(x)[-1]), tmp_path, x=x)
    constants = {value.name for value in graph.graph.initializer}
    assert all(set(node.input[1:]) <= constants for node in graph.graph.node if node.op_type == "Conv")
