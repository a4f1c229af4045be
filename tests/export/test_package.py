"""A folder of an exported model: what its loaders compare, and what an export leaves behind if it does not end well."""

import importlib
import shutil

import pytest
import torch
from disk import full_disk, names_in
from gaussian_field import LearnableGaussianField
from json_files import read_json, write_json

import visdet
from tests.export.small_models import FORMATS, needs
from visdet.errors import UserError
from visdet.export import ExportError
from visdet.export.formats import aoti, pt2


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Return a function that exports a small field once for each format, and returns the folder."""
    folders = {}

    def exported(format):
        if format not in folders:
            folders[format] = tmp_path_factory.mktemp(format)
            torch.manual_seed(0)
            visdet.export(LearnableGaussianField(5), folders[format], format)
        return folders[format]

    return exported


def load(folder, format):
    return importlib.import_module(f"visdet.export.formats.{format}").load(str(folder))


def edited(folder, **changes):
    path = folder / "model.json"
    write_json(path, {**read_json(path), **changes})


POINTS = torch.rand(7, 3)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("points", "message"),
    [
        (POINTS.double(), "points must be a tensor of float32, got float64"),
        (POINTS.half(), "points must be a tensor of float32, got float16"),
        (POINTS.bfloat16(), "points must be a tensor of float32, got bfloat16"),
        (POINTS.byte(), "points must be a tensor of float32, got uint8"),
        (POINTS.int(), "points must be a tensor of float32, got int32"),
        (POINTS.numpy(), "points must be a tensor of float32, got float32 of numpy"),
        (POINTS.tolist(), "points must be a tensor of float32, got list of builtins"),
        (POINTS[:, :2], r"sizes of points must be within .*, got \[7, 2\]"),
        (POINTS[:0], r"sizes of points must be within .*, got \[0, 3\]"),
        (None, "the input points is missing"),
    ],
)
def test_inputs_are_those_of_the_description(folder_of, format, points, message):
    run = load(folder_of(format), format)
    assert run({"points": POINTS, "other": POINTS.int()})["field"].shape == (7,)
    with pytest.raises(ExportError, match=message):
        run({} if points is None else {"points": points})


def test_inputs_have_one_batch_and_any_order(folder_of):
    folder = folder_of("pt2")
    fact = {"type": "float32", "shape": ["batch", 2]}
    package = visdet.export.Package(folder, {"inputs": {"a": fact, "b": fact}, "ranges": {"batch": [1, 4]}})
    a, b = torch.zeros(2, 2), torch.ones(3, 2)
    assert list(package.accepted({"b": b[:2], "a": a})) == ["a", "b"]
    with pytest.raises(ExportError, match="the batch of b is 3, but that of another input is 2"):
        package.accepted({"a": a, "b": b})


@pytest.mark.parametrize("format", FORMATS)
def test_files_and_outputs_are_those_of_the_description(folder_of, format, tmp_path):
    shutil.copytree(folder_of(format), tmp_path, dirs_exist_ok=True)
    described = read_json(tmp_path / "model.json")
    edited(tmp_path, outputs={"other": ""})
    with pytest.raises(ExportError, match=r"has the outputs \['other'\], but the model has \['field'\]"):
        load(tmp_path, format)
    edited(tmp_path, outputs=described["outputs"])
    name = next(iter(described["sha256"]))
    content = bytearray((tmp_path / name).read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ExportError, match=f"{name} is not the file that model.json describes"):
        load(tmp_path, format)
    (tmp_path / name).unlink()
    with pytest.raises(ExportError, match=f"lacks {name}"):
        load(tmp_path, format)


def test_a_folder_of_an_older_version_loads(folder_of, tmp_path):
    shutil.copytree(folder_of("pt2"), tmp_path, dirs_exist_ok=True)
    described = read_json(tmp_path / "model.json")
    for name in ("sha256", "options", "inputs"):
        del described[name]
    write_json(tmp_path / "model.json", described)
    assert load(tmp_path, "pt2")({"points": POINTS})["field"].shape == (7,)


def test_an_export_that_does_not_end_leaves_no_evidence(tmp_path, monkeypatch):
    (tmp_path / "model.py").write_text("the user's own")

    def is_checked(name):
        return read_json(tmp_path / name)["checked"]

    visdet.export(LearnableGaussianField(5), tmp_path, "pt2")
    assert is_checked("model.json") and is_checked("report.json")
    monkeypatch.setattr(pt2, "write", lambda program, folder: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        visdet.export(LearnableGaussianField(5), tmp_path, "pt2")
    assert names_in(tmp_path) == ["model.json", "model.py"]
    assert not is_checked("model.json")


def test_other_results_are_not_called_checked(tmp_path, monkeypatch):
    load = pt2.load
    monkeypatch.setattr(
        pt2, "load", lambda folder: lambda given: {n: v + 1 for n, v in load(folder)(given).items()}
    )
    with pytest.raises(ExportError, match="field by"):
        visdet.export(LearnableGaussianField(5), tmp_path, "pt2")
    for name in ("model.json", "report.json"):
        assert not read_json(tmp_path / name)["checked"]


@pytest.mark.parametrize("format", FORMATS[:2])
def test_a_full_disk_is_a_message(tmp_path, format):
    with pytest.raises(UserError, match=rf"model\.{format} .*cannot be written"), full_disk():
        visdet.export(LearnableGaussianField(5), tmp_path, format)
    assert names_in(tmp_path) == ["model.json"]


@needs("openvino")
def test_a_disk_that_is_full_after_the_graph_is_a_message(tmp_path, monkeypatch):
    import openvino

    save = openvino.save_model
    monkeypatch.setattr(openvino, "save_model", full_disk()(save))
    with pytest.raises(UserError, match=r"model\.xml cannot be written: OpenVINO .*is the disk full"):
        visdet.export(LearnableGaussianField(5), tmp_path, "openvino")
    assert names_in(tmp_path) == ["model.json", "model.onnx"]


def test_a_disk_that_is_full_after_the_compilation_is_a_message(tmp_path, monkeypatch):
    @full_disk()
    def compiled(_program, package_path, **_options):
        package_path.write(bytes(4001))

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", compiled)
    monkeypatch.setattr(aoti, "write_atomically", full_disk()(aoti.write_atomically))
    with pytest.raises(UserError, match=r"model\.pt2 \(4001 bytes\) cannot be written"):
        visdet.export(LearnableGaussianField(5), tmp_path, "aoti")
    assert names_in(tmp_path) == ["model.json"]
