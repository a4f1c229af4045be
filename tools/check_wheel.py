"""Build a wheel, install it in a new virtual environment with a chosen version of torch, and test the operators.

The tests run from a folder outside the checkout, so that they can import only the installed package. auditwheel finds
the oldest manylinux platform that the libraries run on. It must not be newer than the one in the wheel's name.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--torch",
        nargs="+",
        required=True,
        help='the versions to install, such as "torch==2.10.*" "torchvision==0.25.*"',
    )
    parser.add_argument("--wheel", type=Path, help="an existing wheel to check (default: build one)")
    parser.add_argument(
        "--environment",
        type=Path,
        default=ROOT / ".venv-wheel",
        help="folder of the environment, which is replaced (default: %(default)s)",
    )
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        outside = Path(folder)
        wheel = (arguments.wheel or build_wheel(outside)).resolve()
        run(sys.executable, "-m", "venv", "--clear", arguments.environment)
        python = arguments.environment.resolve() / "bin" / "python"
        install = [python, "-m", "pip", "install", "--quiet"]
        run(*install, *arguments.torch)
        run(*install, f"visdet-ops[test] @ {wheel.as_uri()}", "auditwheel")
        check_platform(python, wheel)
        check_package(python, outside)
        shutil.copytree(ROOT / "tests", outside / "tests", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", outside)
        run(python, "-m", "pytest", "-p", "no:cacheprovider", "tests/ops", cwd=outside)
    print(f"check-wheel: {wheel.name} installs and runs beside {' '.join(arguments.torch)}")


def run(*command: object, cwd: Path = ROOT, stdout: int | None = None) -> str:
    """Run a command without the environment variables that could lead Python to the checkout.

    Returns:
        what the command prints, with ``stdout=subprocess.PIPE``.

    Raises:
        CalledProcessError: the command fails.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    words = [str(part) for part in command]
    return subprocess.run(words, check=True, text=True, env=environment, cwd=cwd, stdout=stdout).stdout


def build_wheel(folder: Path) -> Path:
    pip_wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps"]
    run(*pip_wheel, "--wheel-dir", folder, ROOT)
    return next(folder.glob("*.whl"))


def check_platform(python: Path, wheel: Path) -> None:
    """Check with auditwheel that the wheel's libraries load on the platform in its name.

    Raises:
        SystemExit: the libraries need a newer platform, or libraries that the platform lacks.
    """
    audit = json.loads(run(python, "-m", "auditwheel", "show", "--json", wheel, stdout=subprocess.PIPE))
    print(f"check-wheel: auditwheel: {audit['sym_tag']}, beside {sorted(audit['external_libs'])}", flush=True)
    named, found = (re.search(r"manylinux_(\d+)_(\d+)_", tag) for tag in (wheel.name, audit["sym_tag"]))
    is_told = (
        named and found and [int(part) for part in found.groups()] <= [int(part) for part in named.groups()]
    )
    if not is_told:
        raise SystemExit(
            f"check-wheel: auditwheel finds that {wheel.name} needs {audit['sym_tag']}, which is newer than its name "
            "tells"
        )
    others = [name for name in audit["external_libs"] if not name.startswith(("libtorch", "libc10"))]
    if others:  # torch's own libraries are loaded before visdet's.
        raise SystemExit(
            f"check-wheel: {wheel.name} needs {others}, which belong neither to torch nor to every system"
        )


def check_package(python: Path, outside: Path) -> None:
    """Check that the package comes from the environment and that its libraries load.

    Raises:
        SystemExit: the package comes from elsewhere, or a library does not load.
    """
    code = (
        "import json, torch, torchvision, visdet, visdet.ops as ops\n"
        "print(json.dumps([visdet.__file__, torch.__version__, ops.build_info()]))"
    )
    package, torch_version, info = json.loads(run(python, "-c", code, cwd=outside, stdout=subprocess.PIPE))
    print(f"check-wheel: {package} with torch {torch_version}: {info}", flush=True)
    if not Path(package).is_relative_to(python.parents[1]):
        raise SystemExit(f"check-wheel: visdet comes from {package}, not from {python.parents[1]}")
    if not info["cpu"]["loaded"]:
        raise SystemExit(f"check-wheel: the CPU library is not loaded: {info['cpu']['problem']}")
    is_with_cuda = Path(info["cuda"]["path"]).exists()
    if is_with_cuda and not info["cuda"]["loaded"] and "CPU-only" not in info["cuda"]["problem"]:
        raise SystemExit(f"check-wheel: the CUDA library is not loaded: {info['cuda']['problem']}")


if __name__ == "__main__":
    main()
