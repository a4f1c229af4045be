"""Python in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

__all__ = ["ROOT", "run_python"]

ROOT = Path(__file__).resolve().parents[1]


def run_python(*arguments, status=0, cwd=ROOT, **variables):
    """Run Python on this checkout, and return what it prints and its errors.

    Args:
        arguments: the arguments of Python.
        status: the exit status that it must have.
        cwd: the current folder.
        variables: variables of the environment beside those of this process, which lacks those that are None.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env={name: value for name, value in environment.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == status, done.stdout[-2000:] + done.stderr
    return done.stdout, done.stderr
