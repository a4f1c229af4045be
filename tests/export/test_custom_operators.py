"""Graphs with nodes of visdet's operators instead of standard ones."""

import pytest

import visdet
from tests.export.small_models import DEFORMABLE_DETR, FIXED, SMALL, built
from visdet.export import ExportError

onnx = pytest.importorskip("onnx", reason="the package onnx is not installed")
pytest.importorskip("onnxscript", reason="the package onnxscript is not installed")
pytest.importorskip("onnxruntime", reason="the package onnxruntime is not installed")
# Of NVIDIA's plugin: value, spatial shapes, level starts, sampling locations, attention weights; and the output.
RANKS = (4, 2, 1, 6, 5, 4)
TYPES = ("FLOAT", "INT32", "INT32", "FLOAT", "FLOAT", "FLOAT")


def test_nodes_of_the_tensorrt_plugin_have_its_inputs(tmp_path):
    model = built(DEFORMABLE_DETR, **SMALL)
    report = visdet.export(model, tmp_path, "onnx", custom_op="tensorrt", **FIXED)
    assert report["differences"]["outputs"]["bboxes"]["largest"] < 1e-5
    graph = onnx.shape_inference.infer_shapes(onnx.load(tmp_path / "model.onnx")).graph
    known = {value.name: value.type.tensor_type for value in graph.value_info}
    nodes = [node for node in graph.node if node.op_type == "MultiscaleDeformableAttnPlugin_TRT"]
    assert len(nodes) == 2 and not any(node.op_type == "GridSample" for node in graph.node)
    for node in nodes:
        assert {one.name: onnx.helper.get_attribute_value(one) for one in node.attribute} == {
            "plugin_version": b"2"
        }
        found = [known[name] for name in (*node.input, *node.output)]
        assert tuple(len(one.shape.dim) for one in found) == RANKS
        assert tuple(onnx.TensorProto.DataType.Name(one.elem_type) for one in found) == TYPES


@pytest.mark.slow
def test_openvino_runs_a_detector_with_nodes_of_visdet(tmp_path):
    pytest.importorskip("openvino", reason="the package openvino is not installed")
    model = built(DEFORMABLE_DETR, **SMALL)
    report = visdet.export(model, tmp_path, "openvino", custom_op="openvino", **FIXED)
    assert report["differences"]["outputs"]["bboxes"]["largest"] < 1e-5
    assert 'type="ms_deform_attn"' in (tmp_path / "model.xml").read_text()
    assert 'type="GridSample"' not in (tmp_path / "model.xml").read_text()


def test_a_custom_operator_of_another_format_is_an_error(tmp_path):
    with pytest.raises(ExportError, match="custom_op"):
        visdet.export(built(DEFORMABLE_DETR, **SMALL), tmp_path, "pt2", custom_op="tensorrt")
