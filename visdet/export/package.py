"""The folder of an exported model: what ``model.json`` says, and calls of the model that keep to it."""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visdet.files.writing import write_atomically

from .errors import ExportError
from .formats import FORMATS

DESCRIPTION = "model.json"
_RESULTS = ("sample.npz", "report.json", "report.md", "libvisdet_*.so")
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Package:
    """What ``model.json`` says of the files beside it. Folders of older versions say less, and less is compared.

    Attributes:
        folder: the folder. description: the content of ``model.json``.
    """

    folder: Path
    description: dict[str, Any]

    @classmethod
    def open(cls, folder: str | Path, *files: str) -> "Package":
        """Read ``model.json`` of a folder, and compare files of the model with it.

        Raises:
            ExportError: a file is missing, or is not the one that ``model.json`` describes.
        """
        package = cls(Path(folder), read_description(folder))
        for name in files:
            path = package.folder / name
            expected = package.description.get("sha256", {}).get(name)
            if not path.is_file():
                raise ExportError(f"{folder} lacks {name}")
            if expected not in (None, _sha256(path)):
                raise ExportError(
                    f"{path} is not the file that {DESCRIPTION} describes: its SHA-256 is another one"
                )
        return package

    def function(
        self, names: list[str] | None, call: Callable[[Tensors], Iterable[Tensor]]
    ) -> Callable[[Tensors], Tensors]:
        """Return a model as a function of named tensors that refuses inputs which ``model.json`` does not allow.

        Args:
            names: the names of the outputs in the file of the model, in their order, or None if the file has none.
            call: the model, which is given the inputs in the order of ``model.json``.
        """
        outputs = list(self.description["outputs"])
        if names is not None and names != outputs:
            raise ExportError(
                f"{self.folder / DESCRIPTION} has the outputs {outputs}, but the model has {names}"
            )

        def run(inputs: Tensors) -> Tensors:
            return dict(zip(outputs, call(self.accepted(inputs)), strict=True))

        return run

    def accepted(self, inputs: Tensors) -> Tensors:
        """Return the inputs in the order of ``model.json``, or raise an ExportError that names a wrong one."""
        described = self.description.get("inputs")
        if described is None:
            return inputs
        sizes: dict[str, int] = {}
        for name, fact in described.items():
            if name not in inputs:
                raise ExportError(f"the input {name} is missing. The model has {', '.join(described)}")
            self._check(name, inputs[name], fact, sizes)
        return {name: inputs[name] for name in described}

    def _check(self, name: str, tensor: Tensor, fact: dict[str, Any], sizes: dict[str, int]) -> None:
        """Compare an input with its description. ``sizes`` are those that inputs before it have by name."""
        if not isinstance(tensor, Tensor) or tensor.dtype != getattr(torch, fact["type"]):
            kind = "" if isinstance(tensor, Tensor) else f" of {type(tensor).__module__}"
            found = str(getattr(tensor, "dtype", type(tensor).__name__)).removeprefix("torch.") + kind
            raise ExportError(f"the input {name} must be a tensor of {fact['type']}, got {found}")
        ranges = [self.description["ranges"].get(size, (size, size)) for size in fact["shape"]]
        if tensor.dim() != len(ranges) or not all(
            low <= size <= high for size, (low, high) in zip(tensor.shape, ranges, strict=True)
        ):
            raise ExportError(f"the sizes of {name} must be within {ranges}, got {list(tensor.shape)}")
        for size, length in zip(
            fact["shape"], tensor.shape, strict=True
        ):  # A number has only its own length.
            if sizes.setdefault(size, length) != length:
                raise ExportError(
                    f"the {size} of {name} is {length}, but that of another input is {sizes[size]}"
                )


def arrays_of(inputs: Tensors, names: Iterable[str]) -> dict[str, Any]:
    """Return the inputs of these names as NumPy arrays."""
    return {name: inputs[name].numpy(force=True) for name in names}


def read_description(folder: str | Path) -> dict[str, Any]:
    """Return the content of ``model.json`` of a folder."""
    path = Path(folder) / DESCRIPTION
    if not path.is_file():
        raise ExportError(f"{folder} lacks {DESCRIPTION}: it is not the folder of an exported model")
    return json.loads(path.read_text())


def write_description(description: dict[str, Any], folder: Path) -> None:
    """Write ``model.json`` into a folder."""
    write_atomically(folder / DESCRIPTION, json.dumps(description, indent=1))


def remove_results(folder: Path) -> None:
    """Remove what an earlier export has written into a folder, so that nothing of it stands beside new results."""
    files = {DESCRIPTION, *_RESULTS}.union(*(kind.files for kind in FORMATS.values()))
    if (folder / DESCRIPTION).is_file():  # Without it, files of these names are the user's own.
        files |= {"README.md", "infer.py"}
    for name in files:
        for path in folder.glob(name):
            path.unlink()


def checksums(folder: Path, files: Sequence[str]) -> dict[str, str]:
    """Return the SHA-256 of files by their names."""
    return {name: _sha256(folder / name) for name in files}


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
