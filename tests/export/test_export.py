"""Models exported to each format and run in its runtime."""

import importlib.util

import numpy as np
import pytest
import torch
from gaussian_field import LearnableGaussianField
from json_files import read_json
from programs import run_python

import visdet
from tests.export import small_models
from tests.export.small_models import DEFORMABLE_DETR, FIXED, IN_ONNX, IN_OPENVINO, SMALL, built
from tests.fuzz.problem import generator_of
from visdet.errors import MissingPackageError
from visdet.export import ExportError
from visdet.export.check import Differences, compare
from visdet.export.families import family_of
from visdet.export.families.family import Family
from visdet.export.formats import FORMATS
from visdet.export.precision import LIMITS
from visdet.export.program import Program

VARIANTS = {
    "two stages": (DEFORMABLE_DETR, {}),
    "refined": (DEFORMABLE_DETR, {"model.as_two_stage": False}),
    "one stage": (DEFORMABLE_DETR, {"model.as_two_stage": False, "model.with_box_refine": False}),
    "dino": ("dino/dino_shapes", {}),
    "rotated": ("rotated_dino/rotated-dino_shapes", {}),
}


PROGRAM = """
import sys, pathlib, numpy as np, torch, visdet.ops
folder = pathlib.Path(sys.argv[1])
sample = np.load(folder / "sample.npz")
model = torch.export.load(folder / "model.pt2").module()
given = [torch.from_numpy(sample[name]) for name in sample.files if name.startswith("input.")]
scores = dict(zip(("bboxes", "scores", "labels"), model(*given)))["scores"]
torch.testing.assert_close(scores, torch.from_numpy(sample["output.scores"]))
assert not any(name.startswith(("visdet.models", "visdet.engine", "mmengine")) for name in sys.modules)
"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Return the folder of a detector that was exported for any number and size of images, and the report."""
    folder = tmp_path_factory.mktemp("exported")
    report = visdet.export(built(DEFORMABLE_DETR, **SMALL), folder, "pt2", classes=list("abcdef"))
    return folder, report


def test_images_of_any_number_and_size_as_pt2(exported):
    folder, report = exported
    assert max(one["largest"] for one in report["differences"]["outputs"].values()) < 1e-5
    assert report["differences"]["inputs"] == 3
    described = read_json(folder / "model.json")
    assert described["inputs"]["images"]["shape"] == ["batch", 3, "height", "width"]
    assert described["classes"] == list("abcdef") and described["checked"]
    sample = np.load(folder / "sample.npz")
    assert {"input.images", "input.image_sizes", "output.bboxes"} <= set(sample.files)


@pytest.mark.parametrize("variant", VARIANTS)
def test_padding_to_a_fixed_size_changes_no_detection(variant):
    name, changes = VARIANTS[variant]
    image = torch.randn(1, 3, 96, 120, generator=generator_of(0))
    alone, padded = (
        family_of(built(name, **SMALL, **changes), (96 + bottom, 120 + right), 1).run(
            {
                "images": torch.nn.functional.pad(image, (0, right, 0, bottom)),
                "image_sizes": torch.tensor([[96, 120]]),
            }
        )
        for bottom, right in ((0, 0), (64, 72))
    )
    torch.testing.assert_close(padded, alone)


def test_a_program_needs_the_operators_alone(exported):
    """What was exported runs in a process without visdet's models."""
    run_python("-c", PROGRAM, exported[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "format", "options"),
    [
        pytest.param("two stages", "openvino", {}, marks=IN_OPENVINO),
        pytest.param("one stage", "onnx", {"precision": "float16", **FIXED}, marks=IN_ONNX),
        pytest.param("rotated", "openvino", FIXED, marks=IN_OPENVINO),
    ],
)
def test_standard_operators_alone(tmp_path, variant, format, options):
    """The graph has no custom operator, and the runtime of the format computes what the model does."""
    import onnx

    name, changes = VARIANTS[variant]
    report = visdet.export(built(name, **SMALL, **changes), tmp_path, format, **options)
    differences = report["differences"]["outputs"].values()
    assert max(one["largest"] for one in differences) < (1e-3 if "precision" in options else 1e-4)
    graph = onnx.load(tmp_path / "model.onnx").graph
    nodes = graph.node
    assert not {node.domain for node in nodes} - {""}
    assert "GridSample" in {node.op_type for node in nodes}
    sums = {node.output[0] for node in nodes if node.op_type == "Add"}
    norms = [node for node in nodes if node.op_type == "LayerNormalization"]
    assert norms and not any(node.input[0] in sums for node in norms)  # onnxruntime is slow in both at once
    sizes = [axis.dim_value for axis in graph.input[0].type.tensor_type.shape.dim]  # 0 for any size
    assert sizes == ([2, 3, 96, 128] if "shape" in options else [0, 3, 0, 0])


@pytest.mark.slow
@IN_ONNX
def test_convolutions_of_features_alone_are_in_int8(tmp_path):
    import onnx

    report = visdet.export(
        built(DEFORMABLE_DETR, **SMALL),
        tmp_path,
        "onnx",
        "int8",
        **FIXED,
        calibration=lambda family: (given for case in family.cases() for given in case),
    )
    assert 0 < report["differences"]["outputs"]["scores"]["mean"] < 0.05
    graph = onnx.load(tmp_path / "model.onnx").graph
    made_by = {name: node.op_type for node in graph.node for name in node.output}
    given = {
        (node.op_type, made_by.get(node.input[1]))
        for node in graph.node
        if node.op_type in ("Conv", "MatMul")
    }
    assert ("Conv", "DequantizeLinear") in given and not given & {
        ("Conv", None),
        ("MatMul", "DequantizeLinear"),
    }


def test_weights_of_features_alone_are_in_16_bit(tmp_path):
    model = built(DEFORMABLE_DETR, **SMALL)
    visdet.export(model, tmp_path, precision="bfloat16", **FIXED)
    exported = torch.export.load(tmp_path / "model.pt2")
    weights = {name: value.dtype for name, value in exported.state_dict.items() if value.is_floating_point()}
    of_features = {name for name, dtype in weights.items() if dtype == torch.bfloat16}
    assert of_features and of_features == {
        n for n in weights if n.startswith(("model.backbone", "model.neck"))
    }
    assert next(model.parameters()).dtype == torch.float32
    graphs = [
        part.graph for part in exported.graph_module.modules() if isinstance(part, torch.fx.GraphModule)
    ]
    nodes = [node for graph in graphs for node in graph.nodes]
    linear = [node for node in nodes if node.target == torch.ops.aten.linear.default]
    assert linear and {node.meta["val"].dtype for node in linear} == {torch.bfloat16}


class _Sampled(torch.nn.Module):
    """Points of a map that a convolution in bfloat16 has made."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3).bfloat16()

    def forward(self, *tensors):
        images, points = tensors
        maps = self.conv(images.bfloat16()).relu().float()
        return (torch.nn.functional.grid_sample(maps, points, align_corners=False).softmax(-1),)


@IN_OPENVINO
def test_an_openvino_file_says_what_is_in_bfloat16(tmp_path):
    import openvino

    from visdet.export.formats.openvino import write

    draw = generator_of(0)
    inputs = {
        "images": torch.randn(1, 3, 9, 12, generator=draw),
        "points": torch.rand(1, 1, 20, 2, generator=draw) * 2 - 1,
    }
    module = _Sampled().requires_grad_(False)
    write(Program(module, inputs, ("found",)), tmp_path)
    core = openvino.Core()
    types = {}
    for node in core.read_model(tmp_path / "model.xml").get_ordered_ops():
        types.setdefault(node.get_type_name(), set()).add(node.get_output_element_type(0).get_type_name())
    assert types["Convolution"] == types["Relu"] == {"bf16"}
    assert types["GridSample"] == types["Softmax"] == types["Result"] == {"f32"}
    options = FORMATS["openvino"].options
    found = core.compile_model(tmp_path / "model.xml", "CPU", options)([x.numpy() for x in inputs.values()])
    torch.testing.assert_close(torch.from_numpy(found[0]), module(*inputs.values())[0], rtol=1e-2, atol=0)


@pytest.mark.parametrize("format", ["aoti", *small_models.FORMATS])
def test_the_field(tmp_path, format):
    report = visdet.export(LearnableGaussianField(50, tolerance=1e-6), tmp_path, format)
    assert report["differences"]["outputs"]["field"]["largest"] < 1e-5
    assert read_json(tmp_path / "model.json")["inputs"]["points"]["shape"] == ["batch", 3]


def test_differences_are_those_of_sets_of_detections():
    """Detections of equal score may change places, one beside the lowest score may be missing, another box is wrong."""
    scores = np.array([[0.9, 0.5, 0.5, 0.1]], np.float32)
    boxes = np.array([[[0, 0, 1, 1], [2, 2, 3, 3], [5, 5, 6, 6], [7, 7, 8, 8]]], np.float32)
    ours = {"bboxes": boxes, "scores": scores, "labels": np.array([[1, 2, 3, 1]])}
    rows = {"scores": ("bboxes", "scores", "labels")}
    theirs = {name: value[:, [0, 2, 1, 3]].copy() for name, value in ours.items()}
    theirs["bboxes"][0, 3] = 1  # another one of the lowest score
    found = Differences()
    limit = LIMITS["float32"]
    found.add(ours, theirs, rows, limit)
    found.check(limit)
    theirs["bboxes"][0, 1] += 0.5
    found.add(ours, theirs, rows, limit)
    with pytest.raises(ExportError, match="bboxes"):
        found.check(limit)


class Best(Family):
    """The output is the index of the greatest of several numbers, each multiplied by a weight."""

    input_names, output_names = ("numbers",), ("best",)
    inputs_of = samples_of = None

    def __init__(self, cases):
        super().__init__(torch.nn.Linear(2, 1, bias=False), None, 1)
        self.model.weight.fill_(1)
        self.numbers = cases

    def forward(self, numbers):
        return ((numbers * self.model.weight[0]).argmax(),)

    def cases(self):
        yield from ([{"numbers": torch.tensor(numbers)}] for numbers in self.numbers)


def test_a_case_where_rounding_decides_is_left_out():
    tie, steady = (4.0, 4.0), (1.0, 4.0)
    limit = LIMITS["float32"]

    def last(given):
        return {"best": torch.tensor(1)}

    found, inputs, _ = compare(Best([tie, steady]), last, limit)
    found.check(limit)
    assert (found.count, found.left_out, inputs["numbers"].tolist()) == (1, 1, list(steady))
    found, _, _ = compare(Best([tie, steady[::-1]]), last, limit)
    with pytest.raises(ExportError, match="best by 1"):
        found.check(limit)
    with pytest.raises(ExportError, match="for all 1 inputs"):
        compare(Best([tie]), last, limit)


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match="onnxruntime"):
        visdet.export(LearnableGaussianField(5), tmp_path, "onnx")


def test_without_a_check_the_report_says_so(tmp_path):
    report = visdet.export(LearnableGaussianField(5), tmp_path, check=False)
    assert not report["checked"] and "not compared" in (tmp_path / "report.md").read_text()
    assert not read_json(tmp_path / "model.json")["checked"]


def test_a_model_without_a_family_is_refused(tmp_path):
    with pytest.raises(ExportError, match="Linear"):
        visdet.export(torch.nn.Linear(1, 1), tmp_path)


@pytest.mark.parametrize(
    ("format", "precision", "message"),
    [
        ("pt2", "bfloat16", "image features"),
        ("onnx", "int8", "'int8' needs"),
        ("onnx", "bfloat16", "no convolution"),
    ],
)
def test_precisions_that_a_format_or_a_model_lacks_are_refused(tmp_path, format, precision, message):
    with pytest.raises(ExportError, match=message):
        visdet.export(LearnableGaussianField(5), tmp_path, format, precision)


def test_16_bit_is_judged_by_the_mean():
    found = Differences(largest={"scores": 0.08}, mean={"scores": 0.001}, count=3)  # One query was replaced.
    found.check(LIMITS["float16"])
    with pytest.raises(ExportError, match=r"scores by 0\.08"):
        found.check(LIMITS["float32"])
    with pytest.raises(ExportError, match=r"scores by 0\.02"):
        Differences(largest={"scores": 0.08}, mean={"scores": 0.02}, count=3).check(LIMITS["float16"])


def test_what_torch_cannot_compile_is_said(tmp_path):
    no_compiler = torch._inductor.config.patch({"cpp.cxx": ("/no/compiler",)})
    with no_compiler, pytest.raises(ExportError, match=r"aoti .*No working C.* compiler"):
        visdet.export(LearnableGaussianField(5), tmp_path, "aoti")
