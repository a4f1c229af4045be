"""Loads the two operator libraries, and raises errors that say how to build a missing one."""

import ctypes
import functools
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "CONSTANTS",
    "NotBuiltError",
    "build_info",
    "declares",
    "explain_failures",
    "is_loaded",
    "kernel_device",
    "operator_of",
    "planning",
    "require",
    "serves",
]

_FOLDER = Path(__file__).resolve().parent
_ISA_NAMES = ("baseline", "AVX2", "AVX-512")
_NEEDED_MEMORY = re.compile(r"it needs (\d+) bytes on ([a-z:0-9]+)\)")
_HOW_TO_BUILD = (
    "build it with `pip install --no-build-isolation -e .` (in a clone) or install the visdet-ops wheel"
)


class NotBuiltError(RuntimeError):
    """The library that an operator needs is missing, or was built from an older source."""


def _load(name: str) -> str | None:
    """Load ``libvisdet_<name>.so``. Return None, or the reason if it cannot be loaded."""
    path = _FOLDER / f"libvisdet_{name}.so"
    if not path.exists():
        return f"{path} does not exist"
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        return f"{path} does not load: {error.__cause__ or error.__context__ or error}"
    return None


def _load_all() -> dict[str, str | None]:
    # torch allows the operators to be declared only once.
    own = os.path.realpath(_FOLDER)
    for path in torch.ops.loaded_libraries:
        folder, name = os.path.split(path)
        if name == "libvisdet_cpu.so" and folder != own:
            raise ImportError(
                f"visdet.ops: the operators of {own} cannot be loaded beside those of {folder}, which this process has "
                "already; import visdet.ops before a kernel of Hugging Face's that has visdet's operators"
            )
    problems = {"cpu": _load("cpu")}
    if torch.version.cuda is None:
        problems["cuda"] = f"torch {torch.__version__} is a CPU-only build"
    elif problems["cpu"] is not None:
        problems["cuda"] = "it needs the CPU library, which declares the operators"
    else:
        problems["cuda"] = _load("cuda")
    return problems


_problems = _load_all()


_state = threading.local()


@contextmanager
def planning() -> Iterator[None]:
    """Treat tensors without data as tensors on a GPU in this thread, within the block (``visdet.ops.explain``)."""
    _state.is_planning = True
    try:
        yield
    finally:
        _state.is_planning = False


def kernel_device(tensor: Tensor) -> str:
    """Return the type of the device whose kernels serve a tensor."""
    kind = tensor.device.type
    return "cuda" if kind == "meta" and getattr(_state, "is_planning", False) else kind


def is_loaded(name: str) -> bool:
    """Return whether the ``"cpu"`` or the ``"cuda"`` library is loaded."""
    return _problems[name] is None


def declares(operator: str) -> bool:
    """Return whether the CPU library, which declares the operators, is loaded.

    Raises:
        NotBuiltError: the library is loaded but was built from an older source, which lacks this operator.
    """
    if not is_loaded("cpu"):
        return False
    if not hasattr(torch.ops.visdet, operator):
        raise NotBuiltError(
            f"visdet.ops: {_FOLDER / 'libvisdet_cpu.so'} has no operator {operator!r}: it was built from an older "
            f"source; {_HOW_TO_BUILD}."
        )
    return True


def _read_constants() -> dict[str, int]:
    """Return the numbers of csrc/common/constants.h by name. Without the library there are none, and no kernels."""
    if not declares("constants"):
        return {}
    operator = torch.ops.visdet.constants.default
    return dict(zip((result.name for result in operator._schema.returns), operator(), strict=True))


CONSTANTS = _read_constants()


def serves(tensor: Tensor) -> bool:
    """Return whether a built library has the kernels for the device of a tensor, or shapes for one without data."""
    device = kernel_device(tensor)
    return device in ("cpu", "cuda", "meta") and is_loaded("cuda" if device == "cuda" else "cpu")


def require(name: str) -> None:
    """Raise NotBuiltError unless the ``"cpu"`` or the ``"cuda"`` library is loaded.

    The first one declares the operators. The second one can be loaded on machines without a GPU, too.
    """
    if _problems[name] is not None:
        raise NotBuiltError(
            f"visdet.ops: the {name.upper()} library is not loaded: {_problems[name]}; {_HOW_TO_BUILD}."
        )


def operator_of(name: str) -> Any:
    """Return the operator ``visdet::<name>``."""
    return getattr(torch.ops.visdet, name).default


def explain_failures(*operators: str) -> None:
    """Make ``operators`` raise the errors that tell a user what failed, whoever calls them.

    These are NotBuiltError for a CUDA tensor if the CUDA library is not loaded, and where memory does not suffice the
    error that torch's own operators raise (torch.OutOfMemoryError on a GPU).
    """

    for operator in operators:
        overload = operator_of(operator)
        overload._op = _with_errors_of_memory(overload._op)
        if not is_loaded("cuda"):
            torch.library.impl(f"visdet::{operator}", "cuda", lambda *_: require("cuda"))


def _with_errors_of_memory(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` such that it raises torch's own error if torch had no memory for it.

    torch's errors lose their type on their way through the functions of its stable C interface. The error that comes
    instead names the memory that was needed (csrc/common/aten.h), and asking for it again raises torch's.
    """

    @functools.wraps(function)
    def run(*inputs: Any, **options: Any) -> Any:
        try:
            return function(*inputs, **options)
        except RuntimeError as error:
            needed = _NEEDED_MEMORY.search(str(error))
            if needed is not None:
                torch.empty(int(needed[1]), dtype=torch.uint8, device=needed[2])
                if "out of memory" in str(error):
                    raise torch.OutOfMemoryError(str(error)) from error
            raise

    return run


def build_info() -> dict[str, Any]:
    """Return {"cpu": ..., "cuda": ...}: ``path``, whether it is ``loaded``, and the ``problem`` if it is not.

    ``cpu`` also has ``isa``, the instruction set in use. ``cuda`` has what the library was compiled with and for:
    ``toolkit`` ("13.0"), ``native`` and ``ptx``, the compute capabilities (["7.5", "8.0"]); None and empty if it is not
    loaded.
    """
    info: dict[str, Any] = {}
    for name, problem in _problems.items():
        path = _FOLDER / f"libvisdet_{name}.so"
        info[name] = {"path": str(path), "loaded": problem is None, "problem": problem}
    info["cpu"]["isa"] = _ISA_NAMES[torch.ops.visdet.cpu_isa()] if is_loaded("cpu") else None
    text = b""
    if is_loaded("cuda"):
        function = ctypes.CDLL(
            info["cuda"]["path"]
        ).visdet_cuda_build  # of the library that has been loaded already
        function.restype = ctypes.c_char_p
        text = function()
    # The text of csrc/cuda/build_info.cpp, such as "toolkit=13.0 native=7.5,8.0 ptx=8.0".
    said = dict(part.split("=", 1) for part in text.decode().split())
    lists = {name: [item for item in said.get(name, "").split(",") if item] for name in ("native", "ptx")}
    info["cuda"].update(toolkit=said.get("toolkit"), **lists)
    return info
