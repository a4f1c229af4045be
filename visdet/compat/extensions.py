"""The bridge to research repositories, which provides the compiled extensions that their unmodified sources import.

After ``install()``, visdet provides these modules. An extension that is installed is not replaced.

* ``MultiScaleDeformableAttention`` (Deformable DETR, DINO, Mask2Former, MaskDINO and others)
* ``groundingdino._C`` (GroundingDINO from its repository)
* ``detrex._C`` (detrex)
* ``deformable_aggregation_ext``, alone or within a package (SparseDrive, Sparse4D, SparseDriveV2, RIFT), and
  ``deformable_aggregation_with_depth_ext`` likewise (SparseDriveV2, BIP3D)
"""

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["install", "installed", "provided", "uninstall"]

_PROVIDERS = {
    "MultiScaleDeformableAttention": "msda_ext",
    "groundingdino._C": "msda_ext",
    "detrex._C": "msda_ext",
    "deformable_aggregation_ext": "aggregation_ext",
    "deformable_aggregation_with_depth_ext": "aggregation_ext",
}
_WITHIN_PACKAGES = ("deformable_aggregation_ext", "deformable_aggregation_with_depth_ext")


def install() -> None:
    """Make the extensions importable. A program must call this before it imports them. A second call changes nothing.

    Raises:
        visdet.ops.NotBuiltError: visdet's own libraries are missing.
    """
    from visdet.ops import _library

    _library.require_cpu()
    bridge.watch()


def uninstall() -> None:
    """Remove the provided modules from ``sys.modules``. Modules that have imported them keep them."""
    if bridge in sys.meta_path:
        sys.meta_path.remove(bridge)
    for name in provided():
        module = sys.modules.pop(name)
        parent, _, child = name.rpartition(".")
        if parent in sys.modules and vars(sys.modules[parent]).get(child) is module:
            delattr(sys.modules[parent], child)


@contextmanager
def installed() -> Iterator[None]:
    """Install the extensions for the body of a ``with`` statement, and restore the previous state afterwards."""
    was_installed = bridge.is_installed
    install()
    try:
        yield
    finally:
        if not was_installed:
            uninstall()


def provided() -> list[str]:
    """Return the names of the extensions that have been imported from visdet."""
    return [name for name, module in sys.modules.items() if isinstance(_loader_of(module), _Loader)]


def _loader_of(module: ModuleType | None) -> object:
    return getattr(getattr(module, "__spec__", None), "loader", None)


class _Extensions:
    """A finder at the end of ``sys.meta_path``, which is asked only for modules that no other finder finds."""

    name, package = "extensions", None
    install, uninstall = staticmethod(install), staticmethod(uninstall)
    is_present = True

    @property
    def is_installed(self) -> bool:
        return self in sys.meta_path

    def watch(self) -> None:
        """Do the same as ``install``, but without importing torch before an extension is imported."""
        if not self.is_installed:
            sys.meta_path.append(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        provider = _PROVIDERS.get(name)
        child = name.rpartition(".")[2]
        if provider is None and child in _WITHIN_PACKAGES:
            provider = _PROVIDERS[child]
        return None if provider is None else ModuleSpec(name, _Loader(provider), origin="visdet")


class _Loader(Loader):
    """Fills a module with the functions of a module of this package."""

    def __init__(self, provider: str) -> None:
        self.provider = provider

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        source = importlib.import_module(f"visdet.compat.{self.provider}")
        module.__doc__ = source.__doc__
        for name in source.__all__:
            setattr(module, name, getattr(source, name))


bridge = _Extensions()
