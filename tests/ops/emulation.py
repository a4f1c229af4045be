"""Device code compiled for the CPU, which emulates a block of threads at a time (``emulated/cuda_runtime.h``)."""

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SOURCES = Path(__file__).resolve().parents[2] / "visdet" / "ops" / "csrc"
EMULATED = Path(__file__).with_name("emulated")


def compiled(folder, program, headers=(), dynamic="", static=""):
    """Return the library of a program that includes headers of ``csrc``. The test is skipped where it cannot be built.

    Args:
        folder: an empty folder. program: the source text, whose functions are extern "C".
        headers: the headers below ``csrc`` that have dynamic shared memory, which is not emulated.
        dynamic: its declaration in all of these headers. static: what replaces that.
    """
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs a C++ compiler on Linux")
    if not SOURCES.is_dir():
        pytest.skip("needs the sources, which a wheel does not hold")
    for header in headers:
        text = (SOURCES / header).read_text()
        (folder / header).parent.mkdir(parents=True, exist_ok=True)
        (folder / header).write_text(text.replace(dynamic, static))
    replaced = sum((SOURCES / header).read_text().count(dynamic) for header in headers)
    assert replaced > 0 or not headers
    source, output = folder / "program.cpp", folder / "program.so"
    source.write_text(program)
    command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", "-w"]
    command += [f"-I{path}" for path in (EMULATED, folder, SOURCES)]
    subprocess.run([*command, str(source), "-o", str(output)], check=True)
    return ctypes.CDLL(str(output))


def called(function, *arguments):
    """Call a function of C with tensors or None, which it gets as addresses, and numbers: bool, int64_t or double."""
    kinds = {bool: ctypes.c_bool, int: ctypes.c_int64, float: ctypes.c_double, type(None): ctypes.c_void_p}
    return function(
        *(
            ctypes.c_void_p(one.data_ptr()) if isinstance(one, torch.Tensor) else kinds[type(one)](one)
            for one in arguments
        )
    )
