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
@pytest.mark.parametrize("orientation", [1, 3, 5, 6])
def test_a_program_finds_the_boxes_that_python_finds(programs, package, trained, picture, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.open(picture).save(picture, exif=exif)
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


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_package_is_given_what_it_was_made_for(programs, package, picture):
    run = aoti.load(package)
    one = {"images": torch.zeros(1, 3, 128, 160), "image_sizes": torch.tensor([[128, 160]])}
    # Inputs are of the CPU, also those of a package of CUDA.
    assert run(one)["scores"].shape == (1, 100)
    for name, dtype in (
        ("image_sizes", "int32"),
        ("image_sizes", "float32"),
        ("images", "float64"),
        ("images", "uint8"),
    ):
        with pytest.raises(ExportError, match=f"{name} must be .*, got {dtype}"):
            run({**one, name: one[name].to(getattr(torch, dtype))})
    with pytest.raises(ExportError, match="images"):
        run({name: value.expand(2, *value.shape[1:]) for name, value in one.items()})
    content = picture.read_bytes()
    picture.write_bytes(content[: len(content) // 2])
    cut = subprocess.run([programs / "detect", package, picture], capture_output=True, text=True)
    assert cut.returncode == 1 and "Premature end" in cut.stderr and not cut.stdout
    picture.write_bytes(content)
    with open("/dev/full", "w") as full:
        written = subprocess.run(
            [programs / "detect", package, picture, "0"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert (written.returncode, written.stderr) == (1, "detect: cannot write the output\n")


def test_errors_name_what_is_wrong(programs, tmp_path):
    def error(*arguments):
        done = subprocess.run([programs / "detect", *arguments], capture_output=True, text=True)
        return done.returncode, done.stderr

    assert error() == (1, "detect: usage: detect FOLDER IMAGE [SCORE]\n")
    assert error(tmp_path, tmp_path / "a.jpg") == (1, f"detect: {tmp_path} lacks model.pt2\n")
    for score in ("much", "0.3x", "nan", ""):
        assert error(tmp_path, tmp_path / "a.jpg", score) == (
            1,
            f"detect: SCORE must be a number, got {score}\n",
        )
