"""Graphs of other programs against their models: what is right passes, and each fault is found at its node."""

import copy
import re
import warnings
from collections import defaultdict

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from json_files import write_json
from PIL import Image
from torch import nn
from torch.testing import assert_close

from visdet import init_detector
from visdet.commands import main
from visdet.errors import UserError
from visdet.export import ExportError, Reference, exposed_graph
from visdet.export.check_graph import check_graph
from visdet.export.reference import reference

onnx = pytest.importorskip("onnx", reason="the package onnx is not installed")
pytest.importorskip("onnxruntime", reason="the package onnxruntime is not installed")
pytest.importorskip("onnxscript", reason="the package onnxscript is not installed")

SIZE = (64, 96)


class Small(nn.Module):
    """A detector with the parts that exports break: normalisation, attention, the best of all, samples, and sizes."""

    def __init__(self):
        super().__init__()
        self.features = nn.Conv2d(3, 16, 16, 16)
        self.query, self.key, self.value, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.classes, self.boxes, self.refined = nn.Linear(16, 5), nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, images, sizes):
        maps = self.features((images - 0.45) / 0.2).relu()
        tokens = maps.flatten(2).transpose(1, 2)
        weights = (self.query(tokens) @ self.key(tokens).transpose(1, 2) / 4).softmax(-1)
        tokens = tokens + self.out(weights @ self.value(tokens))
        best = self.classes(tokens).amax(-1).topk(6, dim=1).indices
        tokens = tokens.gather(1, best.unsqueeze(-1).repeat(1, 1, 16))
        points = self.boxes(tokens).sigmoid()[..., :2]
        samples = F.grid_sample(maps, 2 * points.unsqueeze(1) - 1, align_corners=False)
        tokens = tokens + samples.squeeze(2).transpose(1, 2)
        return self.classes(tokens), self.refined(tokens).sigmoid() * in_pixels(sizes)


class Transformers(nn.Module):
    """RT-DETR of transformers, with its boxes in pixels if sizes are given."""

    def __init__(self):
        super().__init__()
        transformers = pytest.importorskip("transformers", reason="the package transformers is not installed")
        backbone = transformers.RTDetrResNetConfig(
            embedding_size=8,
            hidden_sizes=[8, 8, 16, 16],
            depths=[1, 1, 1, 1],
            layer_type="basic",
            out_features=["stage3", "stage4"],
        )
        maps = {"encoder_in_channels": [16, 16], "decoder_in_channels": [16, 16], "feat_strides": [16, 32]}
        layers = {
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encode_proj_layers": [1],
            "num_feature_levels": 2,
        }
        widths = {"encoder_hidden_dim": 16, "d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
        heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_n_points": 2}
        config = transformers.RTDetrConfig(
            backbone_config=backbone, num_queries=12, num_labels=5, **maps, **layers, **widths, **heads
        )
        self.model = transformers.RTDetrForObjectDetection(config)

    def forward(self, images, sizes=None):
        found = self.model(images)
        return found.logits, found.pred_boxes * (1 if sizes is None else in_pixels(sizes))


def in_pixels(sizes):
    return sizes.flip(1).repeat(1, 2).unsqueeze(1)


def prepared(pictures, _):
    arrays = [np.asarray(picture.resize(SIZE[::-1]), np.float32).transpose(2, 0, 1) for picture in pictures]
    sizes = [[float(picture.height), float(picture.width)] for picture in pictures]
    return {"images": torch.from_numpy(np.stack(arrays)) / 255, "sizes": torch.tensor(sizes)}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder, draws = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for number in range(3):
        coarse = Image.fromarray(draws.integers(0, 256, (4, 6, 3), dtype=np.uint8))
        coarse.resize((100 + 10 * number, 80)).save(folder / f"{number}.png")
    return {path.stem: path for path in sorted(folder.iterdir())}


def seeded(kind):
    """Return a model whose random weights make boxes differ, and saturate no sigmoid."""
    torch.manual_seed(0)
    model = kind().eval()
    for parameter in model.parameters():
        parameter.data.add_({Small: 0.15, Transformers: 0.45}[kind] * torch.randn_like(parameter))
    return model


def write(model, path, **inputs):
    """Write a model for batches of any size, that of transformers by the older exporter, which is quicker."""
    is_new = isinstance(model, Small)
    axes = {name: {0: torch.export.Dim.DYNAMIC if is_new else "batch"} for name in inputs}
    sizes = {"dynamic_shapes": axes, "verbose": False} if is_new else {"dynamic_axes": axes}
    names = {"input_names": list(inputs), "output_names": ["logits", "pred_boxes"]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, (*inputs.values(),), path, dynamo=is_new, opset_version=18, **names, **sizes)


@pytest.fixture(scope="module", params=[Small, Transformers])
def exported(request, tmp_path_factory):
    """Return a model, the graph that torch has made of it, and the file of the graph."""
    model, path = seeded(request.param), tmp_path_factory.mktemp("exported") / "model.onnx"
    write(model, path, images=torch.rand(2, 3, *SIZE), sizes=torch.full((2, 2), 80.0))
    return Reference(lambda given: model(*given.values()), prepared), onnx.load(path), path


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino-f32"])
def test_a_right_graph_passes(exported, pictures, runtime):
    pytest.importorskip(runtime.partition("-")[0], reason="extra export")
    model, _, path = exported
    found = check_graph(path, model, pictures, runtime=runtime)["differences"]
    assert found["inputs"] == 2 and all(one["largest"] < 1e-4 for one in found["outputs"].values())


def nodes_of(graph, kind):
    return [node for node in graph.node if node.op_type == kind]


def attribute(node, name):
    return next(entry for entry in node.attribute if entry.name == name)


def constant(graph, name, values):
    graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(values), name))
    return name


def insert(graph, tensor, *nodes):
    """Let those who read a tensor read what nodes, lists of an operator and its attributes, make of it.

    The first node is called "fault".
    """
    readers = [
        (node, place) for node in graph.node for place, name in enumerate(node.input) if name == tensor
    ]
    first = min(number for number, node in enumerate(graph.node) if tensor in node.input)
    made = tensor
    for number, (kind, others, attributes) in enumerate(nodes):
        name = f"fault{number or ''}"
        node = onnx.helper.make_node(kind, [made, *others], [f"{name} of {tensor}"], name, **attributes)
        graph.node.insert(first + number, node)
        made = node.output[0]
    for node, place in readers:
        node.input[place] = made
    return "fault"


def frozen_batch(graph):
    first = ("Gather", [constant(graph, "first", [0])], {"axis": 0})
    repeated = ("Concat", ["fault of images"], {"axis": 0})
    return insert(graph, "images", first, repeated)


def swapped_channels(graph):
    return insert(graph, "images", ("Gather", [constant(graph, "bgr", [2, 1, 0])], {"axis": 1}))


def wrong_align_corners(graph):
    node = nodes_of(graph, "GridSample")[0]
    attribute(node, "align_corners").i = 1
    return node.name


def wrong_normalisation(graph):
    return insert(graph, "images", ("Sub", [constant(graph, "mean", np.float32(0.1))], {}))


def half_precision_coordinates(graph):
    coordinates = nodes_of(graph, "GridSample")[0].input[1]
    kinds = (onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT)
    return insert(graph, coordinates, *(("Cast", [], {"to": kind}) for kind in kinds))


def missing_sigmoid(graph):
    node = nodes_of(graph, "Sigmoid")[-1]
    node.op_type = "Identity"
    return node.name


def sorted_by_another_key(graph):
    (node,) = nodes_of(graph, "ReduceMax")
    node.op_type = "ReduceMin"
    return node.name


def int8_weights_of_attention(graph):
    weights = {value.name: value for value in graph.initializer}
    projections = [node for node in nodes_of(graph, "MatMul") if node.input[1] in weights][:4]
    for number, node in enumerate(projections):
        names_of_inputs = node.input
        values = onnx.numpy_helper.to_array(weights[names_of_inputs[1]])
        scale = np.abs(values).max() / 127
        names = [constant(graph, f"int8 {number}", np.round(values / scale).astype(np.int8))]
        names.append(constant(graph, f"scale {number}", np.float32(scale)))
        dequantised = f"weights {number}"
        names_of_inputs[1] = dequantised
        graph.node.insert(0, onnx.helper.make_node("DequantizeLinear", names, [dequantised], dequantised))
    return projections[0].name


def transposed_size(graph):
    return insert(graph, "sizes", ("Gather", [constant(graph, "swap", [1, 0])], {"axis": 1}))


def top_k_over_the_wrong_axis(graph):
    (node,) = nodes_of(graph, "TopK")
    attribute(node, "axis").i = 0
    return node.name


def steps_between(graph, name, other):
    """Return the number of tensors on the shortest way between two nodes."""
    readers = defaultdict(set)
    for node in graph.node:
        for tensor in (*node.input, *node.output):
            readers[tensor].add(node.name)
    reached, steps = {name}, 0
    while other not in reached:
        reached |= {near for nodes in readers.values() if nodes & reached for near in nodes}
        steps += 1
    return steps


@pytest.mark.parametrize(
    "fault",
    [
        frozen_batch,
        swapped_channels,
        wrong_align_corners,
        wrong_normalisation,
        half_precision_coordinates,
        missing_sigmoid,
        sorted_by_another_key,
        int8_weights_of_attention,
        transposed_size,
        top_k_over_the_wrong_axis,
    ],
)
def test_a_fault_is_found_at_its_node(exported, pictures, fault, tmp_path):
    model, right, _ = exported
    wrong = copy.deepcopy(right)
    name = fault(wrong.graph)
    onnx.save(wrong, tmp_path / "wrong.onnx")
    with pytest.raises(ExportError) as error:
        check_graph(tmp_path / "wrong.onnx", model, pictures)
    named = re.findall(r"(?:of node|those of|and) (\S+) \(|Name:'(\S+)'", str(error.value))
    steps = [steps_between(wrong.graph, name, "".join(other)) for other in named]
    assert steps and min(steps) <= 2, str(error.value)


def test_the_command_reads_a_model_of_transformers_and_annotations(pictures, tmp_path, stdout):
    transformers = pytest.importorskip("transformers", reason="the package transformers is not installed")
    model = seeded(Transformers)
    model.model.save_pretrained(tmp_path / "model")
    height, width = SIZE
    processor = transformers.RTDetrImageProcessor(size={"height": height, "width": width})
    processor.save_pretrained(tmp_path / "model")
    write(model, tmp_path / "model.onnx", pixel_values=torch.rand(2, 3, *SIZE))
    images = [{"id": name, "file_name": path.name} for name, path in pictures.items()]
    box = {"id": 1, "image_id": "0", "category_id": 3, "bbox": [1, 2, 30, 40], "area": 1200, "iscrowd": 0}
    categories = [{"id": number, "name": f"kind {number}"} for number in range(5)]
    content = {"images": images, "annotations": [box], "categories": categories}
    annotations = next(iter(pictures.values())).with_name("boxes.json")
    write_json(annotations, content)
    command = ["check-export", str(tmp_path / "model.onnx"), "--model", f"hf:{tmp_path / 'model'}"]
    main([*command, "--images", str(annotations.parent)])
    assert "gives what the model gives" in stdout()
    main([*command, "--images", str(annotations)])
    assert "mAP of the graph: 0." in stdout()


@pytest.mark.parametrize("takes_picture", [False, True])
def test_a_config_is_a_reference(trained, pictures, tmp_path, takes_picture):
    """The model of a config and a checkpoint finds what its detector finds."""
    cfg, path = copy.deepcopy(trained)
    cfg.test_dataloader.dataset.pipeline[1].update(scale=(128, 128))
    cfg.dump(tmp_path / "small.py")
    model = reference([str(tmp_path / "small.py"), str(path)], None, takes_picture)
    file = pictures["0"]
    with Image.open(file) as picture:
        outputs = model.outputs(model.inputs([picture], None))
    (found,) = model.detections(outputs, [(80, 100)])
    expected = init_detector(cfg, path)(file, score_threshold=0.0)
    assert_close(found["scores"], torch.as_tensor(expected.scores))
    assert_close(found["bboxes"], torch.as_tensor(expected.boxes))


def write_text(text, path):
    """Write a graph that is given in ONNX's own language, and return its file."""
    onnx.save(onnx.parser.parse_model('<ir_version: 10, opset_import: ["": 18]>' + text), path)
    return path


def one_box(graph_box, tmp_path):
    """Write a graph that finds a box in each picture, and return its file and a model that finds (10, 10, 50, 60)."""
    text = """
    graph (float[1, 3, 64, 96] images) => (float[1, 1, 4] boxes, float[1, 1] scores)
    <float zero = {0.0}, float[1, 1, 4] box = {BOX}, float[1, 1] score = {0.9}> {
        least = ReduceMin <keepdims = 0> (images)
        nothing = Mul (least, zero)
        boxes = Add (box, nothing)
        scores = Add (score, nothing)
    }"""
    path = write_text(text.replace("BOX", graph_box), tmp_path / "box.onnx")

    def run(_):
        return {"boxes": torch.tensor([[[10.0, 10, 50, 60]]]), "scores": torch.tensor([[0.9]])}

    def detections(outputs, _):
        label = torch.tensor([0])
        return [{"bboxes": outputs["boxes"][0], "scores": outputs["scores"][0], "labels": label}]

    return path, Reference(run, detections=detections)


def test_a_fall_of_the_metric_is_an_error(pictures, tmp_path):
    """It is one even where no output differs by more than the limit."""
    box = {"id": 1, "image_id": "0", "category_id": 1, "bbox": [10, 10, 40, 50], "area": 2000, "iscrowd": 0}
    images = [{"id": "0", "file_name": "0.png", "height": 80, "width": 100}]
    content = {"images": images, "annotations": [box], "categories": [{"id": 1, "name": "one"}]}
    write_json(tmp_path / "boxes.json", content)
    given = {"0": pictures["0"]}, tmp_path / "boxes.json"
    report = check_graph(*one_box("10, 10, 50, 60", tmp_path), *given, limit=1.0)
    assert report["metrics"]["graph"]["coco/bbox_mAP"] == pytest.approx(1)
    with pytest.raises(ExportError, match=r"mAP of the graph is 0\.0000, that of the model 1\.0000"):
        check_graph(*one_box("10, 10, 20, 30", tmp_path), *given, limit=1.0)


def test_a_graph_of_a_picture_as_it_is_decoded(pictures, tmp_path):
    text = """
    graph (uint8[height, width, 3] picture) => (float mean) {
        numbers = Cast <to = 1> (picture)
        mean = ReduceMean <keepdims = 0> (numbers)
    }"""
    path = write_text(text, tmp_path / "mean.onnx")

    def decoded(pictures, size):
        assert size is None
        return {"picture": torch.from_numpy(np.array(pictures[0]))}

    model = Reference(lambda inputs: {"mean": inputs["picture"].float().mean()}, decoded)
    assert check_graph(path, model, pictures)["differences"]["inputs"] == 3


def test_a_python_function_is_a_reference(tmp_path):
    (tmp_path / "mine.py").write_text("import torch\ndef model():\n    return torch.nn.Conv2d(3, 4, 1)\n")
    model = reference([f"{tmp_path}/mine.py:model"])
    inputs = model.inputs([Image.new("RGB", (30, 20), "white")], (10, 12))
    assert inputs["images"].shape == (1, 3, 10, 12) and inputs["images"].min() == 1
    assert [value.shape for value in model.outputs(inputs).values()] == [(1, 4, 10, 12)]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model", "--model must be hf:FOLDER, CONFIG CHECKPOINT, .* got 'model'"),
        ("hf:nowhere", "hf:nowhere: there is no such folder"),
        ("math:model", "math has no function model"),
    ],
)
def test_a_model_that_is_not_there(name, message):
    with pytest.raises(UserError, match=message):
        reference([name])


def test_a_file_that_is_no_graph(tmp_path):
    (tmp_path / "no.onnx").write_text("no")
    with pytest.raises(ExportError, match=r"no\.onnx is no ONNX graph"):
        check_graph(tmp_path / "no.onnx", Reference(dict), {})
    with pytest.raises(UserError, match=r"missing\.onnx does not exist"):
        check_graph(tmp_path / "missing.onnx", Reference(dict), {})


def test_a_runtime_that_computes_otherwise_is_named(exported, pictures, monkeypatch):
    model, _, path = exported

    def with_other_samples(content, is_exposed):
        graph = onnx.load_from_string(content)
        wrong_align_corners(graph.graph)
        return exposed_graph._onnxruntime(graph.SerializeToString(), is_exposed)

    monkeypatch.setitem(exposed_graph.RUNTIMES, "openvino", with_other_samples)
    with pytest.raises(ExportError, match=r"within the limit. In openvino, .* \(GridSample\)"):
        check_graph(path, model, pictures, runtime="openvino")
