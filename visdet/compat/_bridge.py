"""What every bridge does: replace attributes of a package's modules, now and at their import, and put them back."""

import importlib.metadata
import importlib.util
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["Bridge", "CompatWarning"]

_MISSING = object()


class CompatWarning(UserWarning):
    """A package has changed where a bridge replaces its operator; the package keeps its own implementation there."""


class Bridge:
    """Replaces attributes in the modules of one package.

    Args:
        name: the bridge, as users type it. package: the top-level package it serves.
        wants: whether a module, by its full name, is to be looked at.
        patch: given a module and this bridge, calls ``replace`` for what it finds there and returns what it reached,
            one line each.
        distribution: what installs the package, if its name is another one.

    A module that is already imported is patched by ``install``, one imported later at its import: until ``uninstall``
    a finder stands first in ``sys.meta_path`` for the modules it wants, and leaves no trace in their specs.
    """

    def __init__(
        self,
        name: str,
        package: str,
        wants: Callable[[str], bool],
        patch: Callable[[ModuleType, "Bridge"], Iterable[str]],
        distribution: str | None = None,
    ) -> None:
        self.name = name
        self.package = package
        self.distribution = distribution or package
        self.wants = wants
        self.reached: dict[str, list[str]] = {}
        self._patch = patch
        self._undo: list[Callable[[], Any]] = []
        self._finder = _Finder(self)

    @property
    def is_installed(self) -> bool:
        return self._finder in sys.meta_path

    @property
    def is_present(self) -> bool:
        """Whether the package can be imported."""
        return self.package in sys.modules or importlib.util.find_spec(self.package) is not None

    def install(self) -> None:
        """Make the package use visdet's operators, in models built before and after; again changes nothing.

        Raises:
            ImportError: the package is not installed.
            visdet.ops.NotBuiltError: visdet's own libraries are missing.
        """
        if not self.is_present:
            raise ImportError(
                f"visdet.compat.{self.name}: {self.package} is not installed in this environment; install it first, "
                f"or leave this bridge out"
            )
        from visdet.ops import _library

        _library.require_cpu()
        self.watch()

    def watch(self) -> None:
        """Do what ``install`` does, without checking anything: torch is imported only with the first module."""
        if self.is_installed:
            return
        sys.meta_path.insert(0, self._finder)
        for name, module in list(sys.modules.items()):
            if module is not None and self.wants(name):
                self.patch_module(module)

    def uninstall(self) -> None:
        """Undo everything that ``install`` did; where nothing is installed it changes nothing."""
        if self.is_installed:
            sys.meta_path.remove(self._finder)
        while self._undo:
            self._undo.pop()()
        self.reached.clear()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Install for the body of a ``with`` statement; leave as it was found."""
        was_installed = self.is_installed
        self.install()
        try:
            yield
        finally:
            if not was_installed:
                self.uninstall()

    def patched(self) -> dict[str, list[str]]:
        """Return what has been replaced so far: of each module, one line for each replacement."""
        return {name: list(lines) for name, lines in self.reached.items()}

    def warn(self, module: ModuleType, change: str) -> None:
        """Say that a module is not what this bridge knows, and that it is left alone."""
        version = importlib.metadata.version(self.distribution)
        warnings.warn(
            f"visdet.compat.{self.name}: in {self.distribution} {version}, {module.__name__}.{change}. It keeps its "
            "own implementation there; update visdet-ops, or report it with this message.",
            CompatWarning,
            stacklevel=2,
        )

    def patch_module(self, module: ModuleType) -> None:
        """Patch one module, and note what was reached in it."""
        reached = list(self._patch(module, self))
        if reached:
            self.reached[module.__name__] = reached

    def replace(self, owner: Any, attribute: str, value: Any) -> None:
        """Set an attribute of a module or class, and remember what was there."""
        original = vars(owner).get(attribute, _MISSING)
        if original is _MISSING:
            self.at_uninstall(lambda: delattr(owner, attribute))
        else:
            self.at_uninstall(lambda: setattr(owner, attribute, original))
        setattr(owner, attribute, value)

    def at_uninstall(self, undo: Callable[[], Any]) -> None:
        """Have a function called by ``uninstall``; the last one given is called first."""
        self._undo.append(undo)


class _Finder:
    """Finds what the other finders find, with a loader that patches the module once it has run."""

    def __init__(self, bridge: Bridge) -> None:
        self.bridge = bridge

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not self.bridge.wants(name):
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None:
                continue
            spec = find(name, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader, self.bridge)
                return spec
        return None


class _Loader:
    """Another loader, and the patching of what it loads."""

    def __init__(self, loader: Any, bridge: Bridge) -> None:
        self._loader = loader
        self._bridge = bridge

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        if self._bridge.is_installed:
            self._bridge.patch_module(module)
