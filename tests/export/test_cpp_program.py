"""A package of AOTInductor gives in C++ what the detector gives in Python."""

import subprocess

import numpy as np
import pytest
import torch
from PIL import Image

from visdet import init_detector
from visdet.export import ExportError
from visdet.export.formats import aoti


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def package(request, trained, tmp_path_factory):
    from visdet.export.from_config import export_config

    folder = tmp_path_factory.mktemp("exported")
    export_config(*trained, folder, format="aoti", batch=1, device=request.param)
    return folder


@pytest.fixture
def picture(tmp_path):
    path = tmp_path / "picture.jpg"
    colours = np.random.default_rng(0).integers(0, 255, (9, 13, 3), dtype=np.uint8)
    Image.fromarray(colours).resize((400, 275), Image.Resampling.BICUBIC).save(path)
    return path


@pytest.mark.slow
@pytest.mark.timeout(1800)  # The compilation takes a minute on an idle machine.
def test_a_program_finds_the_boxes_that_python_finds(programs, package, trained, picture):
    expected = init_detector(*trained)(str(picture), score_threshold=0.0)
    found = subprocess.run([programs / "detect", package, picture, "0"], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    lines = [line.split() for line in found.stdout.splitlines()]
    scores, boxes = expected.scores.numpy(), expected.boxes.numpy()
    assert len(lines) == len(scores) == 100
    np.testing.assert_allclose([float(line[1]) for line in lines], scores, atol=1e-4)
    apart = [
        np.sum(np.abs(scores - score) < 1e-4) == 1 for score in scores
    ]  # Others may be in another order.
    assert sum(apart) >= 5
    for index in np.flatnonzero(apart):
        assert lines[index][0] == expected.classes[expected.labels[index]]
        np.testing.assert_allclose([float(number) for number in lines[index][2:]], boxes[index], atol=0.05)
    two = {"images": torch.zeros(2, 3, 128, 160), "image_sizes": torch.tensor([[128, 160]] * 2)}
    with pytest.raises(ExportError, match="images"):
        aoti.load(package)(two)
    # Inputs are of the CPU, also those of a package of CUDA.
    assert aoti.load(package)({name: value[:1] for name, value in two.items()})["scores"].shape == (1, 100)


def test_errors_name_what_is_wrong(programs, tmp_path):
    def error(*arguments):
        done = subprocess.run([programs / "detect", *arguments], capture_output=True, text=True)
        return done.returncode, done.stderr

    assert error() == (1, "detect: usage: detect FOLDER IMAGE [SCORE]\n")
    assert error(tmp_path, tmp_path / "a.jpg") == (1, f"detect: {tmp_path} lacks model.pt2\n")
