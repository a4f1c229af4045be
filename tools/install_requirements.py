"""Install the dependencies that pyproject.toml names, with an OpenCV that can be imported on this machine."""

import argparse
import subprocess
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]


def pip_install(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *arguments], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--extra",
        action="append",
        default=[],
        help="a group of optional-dependencies to install (can be given several times)",
    )
    parser.add_argument(
        "--mmengine", help="install this requirement instead of mmengine, such as onedl-mmengine==0.10.12"
    )
    args = parser.parse_args()
    extras = args.extra
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    unknown = set(extras) - set(project["optional-dependencies"])
    if unknown:
        parser.error(
            f"--extra must be one of {', '.join(sorted(project['optional-dependencies']))}, got "
            f"{', '.join(sorted(unknown))}"
        )
    requirements = list(project["dependencies"])
    for extra in extras:
        requirements += project["optional-dependencies"][extra]
    if args.mmengine:
        requirements = [args.mmengine if r.startswith("mmengine") else r for r in requirements]
    pip_install(*requirements)

    # opencv-python's wheel needs the system's libGL, which servers often lack.
    if subprocess.run([sys.executable, "-c", "import cv2"], capture_output=True).returncode != 0:
        print(
            "opencv-python cannot be imported, probably because libGL is missing. opencv-python-headless is installed "
            "instead",
            flush=True,
        )
        pip_install("--force-reinstall", "--no-deps", "opencv-python-headless")


if __name__ == "__main__":
    main()
