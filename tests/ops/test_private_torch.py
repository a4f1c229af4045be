"""Every private name of torch that the package uses: why, and that there is no public one yet."""

import re
from importlib import import_module
from pathlib import Path

import pytest
import torch

import visdet

PACKAGE = Path(visdet.__file__).parent  # the installed package, where `make check-wheel` runs these tests
PRIVATE = re.compile(r"(?:torch(?:\.[a-z_]+)*|forward_ad)\._[A-Za-z]\w*(?:\.\w+)*")

# For each name, what it is for; and where a public name for it would be, with a pattern of that name. There is none in
# torch 2.10 to 2.14.
USES = {
    "torch._C._AutoDispatchBelowAutograd": (
        "An autograd.Function calls an operator that has an autograd kernel of its own.",
        ("torch.library", "below_autograd"),
    ),
    "torch._C._are_functorch_transforms_active": (
        "Under torch.func, the operators keep to what its transforms see through.",
        ("torch.func", "active"),
    ),
    "torch._C._get_dispatch_mode": (
        "Tables that were made under a mode of tensors without numbers, such as an export's, are not kept.",
        ("torch.utils._python_dispatch", "^get_.*mode"),
    ),
    "torch._C._TorchDispatchModeKey": (
        "It names those modes.",
        ("torch.utils._python_dispatch", "ModeKey$"),
    ),
    "torch._C._dispatch_has_kernel_for_dispatch_key": (
        "Whether an operator has a kernel for a device is asked without calling it.",
        ("torch.library", "has_kernel"),
    ),
    "torch._C._autograd": (
        "_top_saved_tensors_default_hooks tells whether a checkpointed segment runs. Without it, weights are kept.",
        ("torch.autograd.graph", "(top|active)_.*hook"),
    ),
    "forward_ad._current_level": (
        "Forward-mode derivatives need plain torch.",
        ("torch.autograd.forward_ad", "^(is_|current)"),
    ),
    "torch._foreach_copy_": ("Many tensors are copied by few kernels.", ("torch", "^foreach_copy")),
    "torch._foreach_norm": ("The norms of many tensors take few kernels.", ("torch", "^foreach_norm")),
    "torch._dynamo": (
        "The compiler's cache is named by this module only.",
        ("torch.compiler", "^cache_size"),
    ),
    "torch._utils": (
        "Checkpoints name _rebuild_tensor, _rebuild_tensor_v2 and _rebuild_parameter, which a reader has to allow.",
        ("torch.serialization", "^rebuild"),
    ),
    "torch.utils._python_dispatch": (
        "TorchDispatchMode is documented, but only there.",
        ("torch.utils", "TorchDispatchMode"),
    ),
}


def found() -> dict[str, list[str]]:
    places: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for name in PRIVATE.findall(line):
                places.setdefault(name, []).append(f"{path.relative_to(PACKAGE)}:{number}")
    return places


def entry_of(name: str) -> str | None:
    return next((entry for entry in USES if name == entry or name.startswith(f"{entry}.")), None)


def test_no_other_private_name_is_used():
    unknown = {name: places for name, places in found().items() if entry_of(name) is None}
    assert not unknown, "add the use to USES with its reason, or use a public name"


def test_no_entry_is_left_over():
    used = {entry_of(name) for name in found()}
    assert used == set(USES)


@pytest.mark.parametrize("name", USES)
def test_there_is_no_public_name_yet(name):
    module, pattern = USES[name][1]
    public = [
        other
        for other in dir(import_module(module))
        if not other.startswith("_") and re.search(pattern, other)
    ]
    assert not public, f"torch {torch.__version__} may have a public name for {name}"


@pytest.mark.parametrize("name", [name for name in USES if name.startswith("torch._C._") or "level" in name])
def test_the_name_exists(name):
    module, _, attribute = name.replace("forward_ad", "torch.autograd.forward_ad").rpartition(".")
    parent = import_module(module) if module != "torch._C" else torch._C
    assert hasattr(parent, attribute)
