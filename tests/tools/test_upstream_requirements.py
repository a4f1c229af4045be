"""The install lines of docs/upstream.md, which read two files: they resolve, keep torch and numpy, and are complete."""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
FILES = ("tools/upstream/requirements.txt", "tools/upstream/requirements-no-deps.txt")
INSTALLED = {"torch", "torchvision", "numpy", "opencv-python-headless", "pillow"}  # beforehand
# What mmcv 1.x, mmdet 2.x, detectron2 and the checked repositories import at their start.
IMPORTED = {"addict", "cloudpickle", "ipython", "matplotlib", "pyquaternion", "shapely", "six", "yapf"}
UNNEEDED = {"descartes", "fire", "parameterized"}  # by notebooks and programs of nuscenes-devkit


def requirements_of(file):
    """Return the requirements of each package that pip finds for the lines of a file, by its name."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--dry-run",
        "--ignore-installed",
        "--no-deps",
    ]
    done = subprocess.run([*command, "--report", "-", "-r", file], cwd=ROOT, capture_output=True, text=True)
    if "No matching distribution" in done.stderr or "Connection" in done.stderr:
        pytest.skip("there is no package registry")
    assert done.returncode == 0, done.stderr
    found = [item["metadata"] for item in json.loads(done.stdout)["install"]]
    every = {canonicalize_name(one["name"]): map(Requirement, one.get("requires_dist", [])) for one in found}
    return {name: [one for one in given if "extra" not in str(one.marker)] for name, given in every.items()}


def test_the_page_reads_the_files():
    page = (ROOT / "docs/upstream.md").read_text()
    assert all(f"-r {file}" in page for file in FILES)


@pytest.mark.slow
def test_the_lines_resolve_and_hold_what_is_imported():
    with_dependencies, without = map(requirements_of, FILES)
    assert with_dependencies.keys() >= IMPORTED
    needed = {canonicalize_name(one.name) for given in without.values() for one in given}
    assert needed <= with_dependencies.keys() | INSTALLED | UNNEEDED
    for name, given in with_dependencies.items():
        kept = [one for one in given if one.name in INSTALLED and one.marker is None]
        replaced = [
            str(one) for one in kept if not one.specifier.contains(version(one.name), prereleases=True)
        ]
        assert not replaced, f"{name} would replace what is installed"
