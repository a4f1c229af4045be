"""Each command explains itself by ``--help``, whatever is installed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def commands():
    """Return the arguments for Python that start each tool, and each module that is run by ``python -m``."""
    found = []
    for path in sorted(
        path for folder in ("visdet", "tools", "benchmarks") for path in ROOT.glob(f"{folder}/**/*.py")
    ):
        if not re.search(r"^if __name__ == .__main__.:", path.read_text(encoding="utf-8"), re.M):
            continue
        if path.parent.name == "tools":
            found.append((f"tools/{path.name}",))
        else:
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found.append(("-m", module.removesuffix(".__main__")))
    return found


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_a_command_explains_itself(command):
    done = subprocess.run(
        [sys.executable, *command, "--help"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ") and command[-1].split("/")[-1] in done.stdout.split("\n\n")[0], (
        done.stdout
    )
