"""A package of AOTInductor gives in C++ what the detector gives in Python."""

import shutil
import subprocess

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from PIL import Image

from visdet import init_detector
from visdet.export import ExportError
from visdet.export.formats import aoti


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def package(request, trained, tmp_path_factory):
    from visdet.export.from_config import export_config

    folder = tmp_path_factory.mktemp("exported")
    export_config(*trained, folder, format="aoti", device=request.param)
    return folder


@pytest.fixture(scope="module")
def detect(program):
    """Return a function that runs the program."""
    path, pipes = program("detect"), {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return lambda *arguments, **options: subprocess.run([path, *arguments], **(pipes | options))


@pytest.fixture(scope="module")
def detector(trained):
    return init_detector(*trained)


def error(done):
    """Return what a program that has failed said."""
    assert done.returncode == 1 and not done.stdout
    return done.stderr


def write_picture(path, mode="RGB", orientation=1):
    colours = np.random.default_rng(0).integers(0, 255, (9, 13, 3), dtype=np.uint8)
    picture = Image.fromarray(colours).resize((400, 275), Image.Resampling.BICUBIC)
    if mode == "I;16":
        picture = Image.fromarray(np.asarray(picture.convert("L")).astype(np.uint16) * 256 + 200)
    exif = Image.Exif()
    exif[0x0112] = orientation
    picture.convert(mode).save(path, exif=exif)
    return path


@pytest.mark.slow
@pytest.mark.timeout(1800)  # The compilation takes a minute on an idle machine.
@pytest.mark.parametrize(
    ("name", "mode", "orientation"),
    [
        *(("a.jpg", "RGB", orientation) for orientation in (1, 3, 5, 6)),
        *(("a.png", mode, 8) for mode in ("RGB", "RGBA", "P", "LA", "I;16", "1")),
    ],
)
def test_a_program_finds_the_boxes_that_python_finds(
    detect, package, detector, tmp_path, name, mode, orientation
):
    picture = write_picture(tmp_path / name, mode, orientation)
    expected = detector(str(picture), score_threshold=0.0)
    found = detect(package, picture, "0")
    assert found.returncode == 0, found.stderr
    lines = [line.split() for line in found.stdout.splitlines()]
    scores, boxes = expected.scores.numpy(), expected.boxes.numpy()
    assert len(lines) == len(scores) == 100
    # On a GPU, two programs may choose other convolutions, which compute in TF32.
    tolerance = 5e-4 if torch.cuda.is_available() else 1e-4
    assert_allclose([float(line[1]) for line in lines], scores, atol=tolerance)
    # Others may be in another order.
    apart = [np.sum(np.abs(scores - score) < tolerance) == 1 for score in scores]
    assert sum(apart) >= 5
    for index in np.flatnonzero(apart):
        assert lines[index][0] == expected.classes[expected.labels[index]]
        assert_allclose([float(number) for number in lines[index][2:]], boxes[index], atol=0.02)
    kept = detect(package, picture)
    assert (
        len(kept.stdout.splitlines()) == len(detector(str(picture))) < 100
    )  # by the thresholds of model.json


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_package_is_given_what_it_was_made_for(detect, package, tmp_path):
    run = aoti.load(package)
    picture = torch.zeros(128, 160, 3, dtype=torch.uint8)
    # Inputs are of the CPU, also those of a package of CUDA.
    assert run({"picture": picture})["scores"].shape == (1, 100)
    for wrong, message in (
        (picture.int(), "picture must be .*uint8, got int32"),
        (picture[None], "sizes of picture"),
        (picture[:1], "sizes of picture"),
    ):
        with pytest.raises(ExportError, match=message):
            run({"picture": wrong})
    for name, message in (("a.jpg", "remature end"), ("a.png", "Read Error")):
        path = write_picture(tmp_path / name)
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
        assert message in error(detect(package, path))
    path.write_bytes(content)
    with open("/dev/full", "w") as full:
        assert error(detect(package, path, "0", stdout=full)) == "detect: cannot write the output\n"
    other = tmp_path / "other"
    shutil.copytree(package, other)
    with open(other / "model.pt2", "ab") as model:
        model.write(b"x")
    assert "is not the file that model.json describes" in error(detect(other, path))
    (other / "model.json").unlink()
    assert error(detect(other, path)) == f"detect: {other} lacks model.json\n"


def test_errors_name_what_is_wrong(detect, tmp_path):
    assert error(detect()) == "detect: usage: detect FOLDER PICTURE [SCORE]\n"
    assert error(detect(tmp_path, tmp_path / "a.jpg")) == f"detect: {tmp_path} lacks model.pt2\n"
    for score in ("much", "0.3x", "nan", ""):
        message = error(detect(tmp_path, tmp_path / "a.jpg", score))
        assert message == f"detect: SCORE must be a number, got {score}\n"
