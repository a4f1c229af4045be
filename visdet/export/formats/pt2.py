"""torch's own format. It needs torch and the library of visdet's operators (``import visdet.ops``), but no model."""

import io
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from visdet.files.writing import write_atomically
from visdet.models.transfer import device_of

from ..package import Package
from ..program import Program

_OUTPUTS = "outputs"  # a file in the package, which names the outputs


def write(program: Program, folder: Path) -> None:
    """Write ``model.pt2`` into a folder."""
    content = io.BytesIO()  # Writing a file itself, torch ends the process if the disk is full.
    torch.export.save(program.exported, content, extra_files={_OUTPUTS: "\n".join(program.outputs)})
    write_atomically(folder / "model.pt2", content.getbuffer())


def load(folder: str | Path) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """Return the function of named tensors, on any device, that ``model.pt2`` of a folder is."""
    import visdet.ops  # noqa: F401 (its libraries have the operators)

    package = Package.open(folder, "model.pt2")
    extra = {_OUTPUTS: ""}
    module = torch.export.load(package.folder / "model.pt2", extra_files=extra).module()
    device = device_of(module)

    @torch.no_grad()
    def call(inputs: dict[str, Tensor]) -> Iterable[Tensor]:
        return module(*(tensor.to(device) for tensor in inputs.values()))

    return package.function(extra[_OUTPUTS].splitlines() or None, call)
