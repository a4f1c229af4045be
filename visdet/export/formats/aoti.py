"""A package of AOTInductor, which C++ programs run without Python, checked with torch's own loader.

torch does not pack the library of an operator, so that the folder also has those of visdet. The package has all that
``model.json`` says as its metadata, in lines of text, so that a C++ program needs no parser of JSON.
"""

import io
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import visdet.ops
from visdet.files.writing import write_atomically

from ..package import Package, read_description
from ..program import Program


def write(program: Program, folder: Path) -> None:
    """Write ``model.pt2`` and the libraries of visdet's operators into a folder, whose ``model.json`` is there."""
    content = io.BytesIO()  # See the format pt2.
    torch._inductor.aoti_compile_and_package(
        program.exported,
        package_path=content,
        inductor_configs={"aot_inductor.metadata": dict(_facts(read_description(folder)))},
    )
    write_atomically(folder / "model.pt2", content.getbuffer())
    for device in {"cpu", *(tensor.device.type for tensor in program.inputs.values())}:
        library = Path(visdet.ops.__file__).with_name(f"libvisdet_{device}.so")
        write_atomically(folder / library.name, library.read_bytes())


def _facts(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the values within a value of JSON by their names, such as ("ranges.height", "96\\n4096").

    A dict also has its keys as its value. Dicts of a list have their types as names.
    """
    if isinstance(value, list) and value and all(isinstance(part, dict) for part in value):
        value = {part["type"]: part for part in value}
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _facts(part, f"{name}.{key}" if name else key)
        yield name, "\n".join(value)
    elif value is not None:
        yield name, "\n".join(map(str, value if isinstance(value, list) else [value]))


def load(folder: str | Path) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """Return the function of named tensors, on any device, that ``model.pt2`` of a folder is."""
    package = Package.open(folder, "model.pt2")
    model = torch._inductor.aoti_load_package(str(package.folder / "model.pt2"))
    facts = model.get_metadata()

    # A package reads its inputs by the type, the device, the sizes and the strides of the examples, which are
    # contiguous, and does not say if others come. Some of the states that it returns are slices of larger tensors.
    def call(inputs: dict[str, Tensor]) -> Iterable[Tensor]:
        return model(*(tensor.to(facts["AOTI_DEVICE_KEY"]).contiguous() for tensor in inputs.values()))

    return package.function(facts["outputs"].splitlines(), call)
