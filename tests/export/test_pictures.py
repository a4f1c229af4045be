"""Graphs that take a picture as it is decoded, beside the detector that reads its file."""

import copy
from functools import partial
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from gaussian_field import LearnableGaussianField
from json_files import read_json, write_json
from numpy.testing import assert_allclose
from PIL import Image
from programs import run_python
from torchvision.transforms.v2 import functional as F

import visdet
from tests.export.small_models import FORMATS
from tests.fuzz.problem import generator_of
from visdet import init_detector
from visdet.export import ExportError, from_config, run
from visdet.export.families.pictures import Steps, resampled
from visdet.export.from_config import export_config
from visdet.export.usage import write_usage

LOAD, PACK = {"type": "LoadImageFromFile"}, {"type": "PackDetInputs"}
RESIZE = {"type": "Resize", "scale": (96, 64), "keep_ratio": True}
# (width, height), and the EXIF orientation
PICTURES = [((80, 64), 1), ((33, 170), 6), ((300, 200), 3), ((96, 40), 8), ((61, 61), 2)]


@pytest.mark.parametrize(
    "sides", [(64, 77), (80, 96), (1600, 96), (1200, 72), (97, 97), (3, 50), (999, 1), (10, 5)]
)
def test_pixels_are_those_of_the_pipeline(sides):
    side, size = sides
    picture = torch.randint(0, 256, (1, 3, side, 9), generator=generator_of(0), dtype=torch.uint8)
    expected = F.resize(picture, [size, 9], antialias=False)
    found = resampled(picture.float(), 2, torch.arange(size + 7), torch.tensor(side), torch.tensor(size))
    assert torch.equal(found[:, :, :size].byte(), expected)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    draw = np.random.default_rng(0)
    for index, (size, orientation) in enumerate(PICTURES):
        colours = draw.integers(0, 255, (9, 13, 3), dtype=np.uint8)
        exif = Image.Exif()
        exif[0x0112] = orientation
        Image.fromarray(colours).resize(size, Image.Resampling.BICUBIC).save(
            folder / f"{index}.jpg", exif=exif
        )
    return sorted(folder.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_a_program_finds_what_the_detector_finds(trained, pictures, format, tmp_path):
    report = export_config(*trained, tmp_path, format=format, shape=(160, 160), data=str(pictures[0].parent))
    assert report["checked"] and report["data"]["differences"]["inputs"] == len(PICTURES)
    described = read_json(tmp_path / "model.json")
    assert described["score_thresholds"] == [0.8, 0.3, 0.3, 0.3, 0.3, 0.3]
    assert described["preprocessing"]["place"] == "in the graph"
    assert described["origin_of_thresholds"] == "the checkpoint's validation"
    described["score_thresholds"] = [0.0] * len(described["classes"])
    write_json(tmp_path / "model.json", described)
    program = (tmp_path / "infer.py").read_text()
    assert len(program.splitlines()) <= 30
    out, _ = run_python(tmp_path / "infer.py", *pictures)
    lines = [line.split() for line in out.splitlines()]
    detector = with_images_within(init_detector(*trained), 160)
    for path in pictures:
        found = np.array([list(map(float, line[2:])) for line in lines if line[0] == str(path)])
        expected = detector(str(path), score_threshold=0.0)
        assert_allclose(found[:, 0], expected.scores, atol=1e-3)
        distance = np.abs(found[:, None, 1:] - expected.boxes.numpy()).max(-1)
        assert distance.min(0).max() < 0.05


_RUNTIME = """
class InferenceSession:
    def __init__(self, *arguments, **options): pass
    def run(self, names, inputs):
        picture = inputs["picture"]
        return [[[[*picture.shape[:2], 1, 1]]], [[picture.max() / 255]], [[0]]]
"""


def test_what_a_program_cannot_read(tmp_path):
    description = {"format": "onnx", "inputs": ["picture"], "classes": ["bolt"], "score_thresholds": [0.1]}
    described = {**description, "model": "DINO", "precision": "float32", "options": {}}
    write_usage(described, tmp_path)
    write_json(tmp_path / "model.json", described)
    (tmp_path / "onnxruntime.py").write_text(_RUNTIME)
    values = np.full((4, 5), 65535)
    exif = Image.Exif()
    exif[0x0112] = 6
    for name, kind in {"deep.png": np.uint16, "wide.tif": np.int32, "float.tif": np.float32}.items():
        Image.fromarray((values + (kind != np.uint16)).astype(kind)).save(tmp_path / name)
    program = partial(run_python, "infer.py", cwd=tmp_path)
    Image.fromarray(values.astype(np.uint8)).save(tmp_path / "turned.tif", exif=exif)
    for name, sides in {"deep.png": "4.00 5.00", "turned.tif": "5.00 4.00"}.items():
        assert program(name)[0] == f"{name} bolt 1.0000 {sides} 1.00 1.00\n"
    assert program(status=1)[1].startswith("Print the objects in pictures, with their boxes")
    for name, said in {
        "--help": "--help cannot be read: ",
        "model.json": "model.json cannot be read: ",
        "float.tif": "float.tif must have 8 or 16 bits: its values of mode F",
        "wide.tif": "wide.tif must have 8 or 16 bits: its values of mode I",
    }.items():
        assert program(name, status=1)[1].startswith(said)


def with_images_within(detector, side):
    """Return a detector whose pipeline resizes images as a graph of side x side pixels does."""
    resize = next(step for step in detector._pipeline.transforms if type(step).__name__ == "Resize")
    resize.scale, resize.keep_ratio = (side, side), True
    return detector


@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        ([LOAD, {"type": "RandomFlip", "prob": 1.0}, PACK], "cannot have the transform RandomFlip"),
        ([LOAD, {**RESIZE, "backend": "pillow"}, PACK], "no antialiasing"),
        ([LOAD, {"type": "Resize", "scale_factor": 0.5}, PACK], "must have a scale"),
        ([LOAD, RESIZE, RESIZE, PACK], "cannot have the transform Resize .* --no-embed"),
        ([{**LOAD, "color_type": "color_ignore_orientation"}, PACK], "must turn pictures as their EXIF"),
    ],
)
def test_other_steps_are_refused(pipeline, message):
    with pytest.raises(ExportError, match=message):
        Steps.of(pipeline)


def test_the_canvas_holds_every_picture():
    assert Steps.of([LOAD, RESIZE, PACK]).canvas() == (96, 96)
    assert Steps.of([LOAD, {**RESIZE, "keep_ratio": False}, PACK]).canvas() == (64, 96)
    for pipeline in ([LOAD, PACK], [LOAD, {**RESIZE, "scale": (float("inf"), 64)}, PACK]):
        with pytest.raises(ExportError, match="--shape H W"):
            Steps.of(pipeline).canvas()


def test_a_picture_is_one_image_of_a_latency(monkeypatch):
    monkeypatch.setattr(run, "latencies", lambda call, batch: {"images_per_second": batch})
    family = MagicMock(batch=1, device=torch.device("cpu"))
    family.cases.return_value = iter([[{"picture": torch.zeros(97, 131, 3)}]])
    assert run._latencies(family, family.run)["exported"]["images_per_second"] == 1


def test_files_of_the_users_stay(tmp_path):
    (tmp_path / "README.md").write_text("mine")
    visdet.export(LearnableGaussianField(5), tmp_path, check=False)
    assert (tmp_path / "README.md").read_text() == "mine"


def test_without_a_largest_size_the_steps_stay_before_the_graph(trained, tmp_path, monkeypatch, stdout):
    cfg, checkpoint = copy.deepcopy(trained[0]), trained[1]
    pipeline = cfg.test_dataloader.dataset.pipeline
    cfg.test_dataloader.dataset.pipeline = [step for step in pipeline if step["type"] != "Resize"]
    monkeypatch.setattr(from_config, "export", lambda model, out, **arguments: arguments)
    assert export_config(cfg, checkpoint, tmp_path)["steps"] is None
    assert "with --shape H W it takes pictures" in stdout()
    assert export_config(cfg, checkpoint, tmp_path, shape=(64, 64))["steps"].resize is None
    assert export_config(*trained, tmp_path)["steps"].limits_sizes()
