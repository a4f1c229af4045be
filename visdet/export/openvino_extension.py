"""The C++ extension of OpenVINO with the kernels of visdet's operators."""

import os
import subprocess
from pathlib import Path

from .errors import ExportError

EXTENSION = "libvisdet_openvino.so"
_CSRC = Path(__file__).parents[1] / "ops" / "csrc"
_SOURCES = (
    "openvino/extension.cpp",
    "cpu/ms_deform_attn/forward.cpp",
    "cpu/deformable_aggregation/deformable_aggregation.cpp",
)
_FLAGS = (
    "-std=c++20",
    "-O3",
    "-march=native",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-DVISDET_ISA=baseline",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",
    "-Wno-unknown-pragmas",
)


def build_extension(folder: Path) -> Path:
    """Compile the extension for this processor into a folder and return its path, for ``Core.add_extension``.

    It needs the sources of visdet, which a clone has and a wheel has not, and a C++ compiler (``CXX``, or g++).
    """
    import openvino

    if not (_CSRC / _SOURCES[0]).is_file():
        raise ExportError(
            f"the custom operators of OpenVINO are compiled from {_CSRC}, which only a clone of visdet has"
        )
    package = Path(openvino.__file__).parent
    libraries = [
        next((package / "libs").glob(f"{name}.so*"))
        for name in ("libopenvino", "libopenvino_onnx_frontend", "libtbb")
    ]
    command: list[str | Path] = [
        os.environ.get("CXX", "g++"),
        *_FLAGS,
        f"-I{_CSRC}",
        f"-isystem{package / 'include'}",
        *(_CSRC / source for source in _SOURCES),
        "-o",
        folder / EXTENSION,
        *libraries,
    ]
    try:
        built = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        raise ExportError(
            f"the custom operators of OpenVINO need a C++ compiler; {command[0]} is not installed"
        ) from None
    if built.returncode != 0:
        raise ExportError(f"the custom operators of OpenVINO do not compile:\n{built.stderr[-2000:]}")
    return folder / EXTENSION
