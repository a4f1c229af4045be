"""torch's own format. It needs torch and the library of visdet's operators (``import visdet.ops``), but no model."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ..program import Program, outputs_of

PACKAGES = ("torch",)


def write(program: Program, folder: Path) -> None:
    """Write ``model.pt2`` into a folder."""
    torch.export.save(program.exported, folder / "model.pt2")


def load(folder: Path) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """Return the function of named tensors, on any device, that ``model.pt2`` of a folder is."""
    import visdet.ops  # noqa: F401 (its libraries have the operators)

    module = torch.export.load(folder / "model.pt2").module()
    names, device = outputs_of(folder), next(module.parameters()).device

    @torch.no_grad()
    def run(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return dict(zip(names, module(*(t.to(device) for t in inputs.values())), strict=True))

    return run
