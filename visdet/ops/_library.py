"""Loads the two operator libraries, and says what to do where one is missing."""

from pathlib import Path
from typing import Any, NoReturn

import torch

__all__ = ["NotBuiltError", "build_info", "declares", "explain_missing_cuda", "is_loaded", "require_cpu"]

_FOLDER = Path(__file__).resolve().parent
_ISA_NAMES = ("baseline", "AVX2", "AVX-512")
_HOW_TO_BUILD = (
    "build it with `pip install --no-build-isolation -e .` (in a clone) or install the visdet-ops wheel"
)


class NotBuiltError(RuntimeError):
    """An operator was called on a device whose library is not there."""


def _load(name: str) -> str | None:
    """Load ``libvisdet_<name>.so``; return None, or why it is not loaded."""
    path = _FOLDER / f"libvisdet_{name}.so"
    if not path.exists():
        return f"{path} does not exist"
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        return f"{path} does not load: {error.__cause__ or error.__context__ or error}"
    return None


def _load_all() -> dict[str, str | None]:
    problems = {"cpu": _load("cpu")}
    if torch.version.cuda is None:
        problems["cuda"] = f"torch {torch.__version__} is a CPU-only build"
    elif problems["cpu"] is not None:
        problems["cuda"] = "it needs the CPU library, which declares the operators"
    else:
        problems["cuda"] = _load("cuda")
    return problems


_problems = _load_all()


def is_loaded(name: str) -> bool:
    """Return whether the ``"cpu"`` or the ``"cuda"`` library is loaded."""
    return _problems[name] is None


def declares(operator: str) -> bool:
    """Return whether the CPU library, which declares the operators, is loaded.

    Raises:
        NotBuiltError: it is, but was built from an older source that has no such operator.
    """
    if not is_loaded("cpu"):
        return False
    if not hasattr(torch.ops.visdet, operator):
        raise NotBuiltError(
            f"visdet.ops: {_FOLDER / 'libvisdet_cpu.so'} has no operator {operator!r}: it was built from an older "
            f"source; {_HOW_TO_BUILD}."
        )
    return True


def require_cpu() -> None:
    """Raise NotBuiltError unless the CPU library, which declares the operators, is loaded."""
    if _problems["cpu"] is not None:
        raise NotBuiltError(
            f"visdet.ops: the CPU library is not loaded: {_problems['cpu']}; {_HOW_TO_BUILD}."
        )


def explain_missing_cuda(*operators: str) -> None:
    """Without the CUDA library, make each of ``operators`` answer a CUDA tensor with NotBuiltError."""
    if is_loaded("cuda"):
        return

    def not_built(*_: Any) -> NoReturn:
        raise NotBuiltError(
            f"visdet.ops: the CUDA library is not loaded: {_problems['cuda']}; {_HOW_TO_BUILD}."
        )

    for operator in operators:
        torch.library.impl(f"visdet::{operator}", "cuda", not_built)


def build_info() -> dict[str, Any]:
    """Return {"cpu": ..., "cuda": ...}: path, whether it is loaded, why not; and the CPU instruction set used."""
    info: dict[str, Any] = {}
    for name, problem in _problems.items():
        path = _FOLDER / f"libvisdet_{name}.so"
        info[name] = {"path": str(path), "loaded": problem is None, "problem": problem}
    info["cpu"]["isa"] = _ISA_NAMES[torch.ops.visdet.cpu_isa()] if is_loaded("cpu") else None
    return info
