"""Detectors for frames of several cameras: Sparse4D and SparseDrive."""

from typing import Any

from ..errors import ExportError
from .family import Family


class Frames(Family):
    def __init__(self, model: Any, *_: Any) -> None:
        raise ExportError(f"{type(model).__name__} cannot be exported yet")
