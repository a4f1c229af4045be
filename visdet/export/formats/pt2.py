"""torch's own format. It needs torch and the library of visdet's operators (``import visdet.ops``), but no model."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from ..program import Program, outputs_of

PACKAGES = ("torch",)


def write(program: Program, folder: Path) -> None:
    """Write ``model.pt2`` into a folder."""
    torch.export.save(program.exported, folder / "model.pt2")


def load(folder: Path) -> Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]:
    """Return the function of named arrays that ``model.pt2`` of a folder is."""
    import visdet.ops  # noqa: F401 (its libraries have the operators)

    module = torch.export.load(folder / "model.pt2").module()
    names = outputs_of(folder)

    def run(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        with torch.no_grad():
            outputs = module(*map(torch.from_numpy, inputs.values()))
        return {name: output.cpu().numpy() for name, output in zip(names, outputs, strict=True)}

    return run
