"""The class of bridges. A bridge replaces attributes of a package's modules and can restore them."""

import importlib.util
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from visdet.checks.installed import installed_version

__all__ = ["Bridge", "CompatWarning", "Installable"]

_MISSING = object()


class CompatWarning(UserWarning):
    """A bridge found a package other than expected, so that the package keeps its own implementation."""


class Installable:
    """What can be installed and uninstalled."""

    is_installed: Any
    install: Any
    uninstall: Any

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Install this for the body of a ``with`` statement, and restore the previous state afterwards."""
        was_installed = self.is_installed
        self.install()
        try:
            yield
        finally:
            if not was_installed:
                self.uninstall()


class Bridge(Installable):
    """Replaces attributes in the modules of one package.

    Args:
        name: the name of the bridge.
        package: the name of the top-level package.
        modules: a regular expression that matches the full names of the modules that may have to be patched.
        patch: a function of a module and this bridge. It calls ``replace`` for each operator that it finds, and yields
            a line of text about each replacement.
        distribution: the name of the distribution that installs the package. The default is the name of the package.

    ``install`` patches modules that are already imported. Modules that are imported later are patched at their import.
    For that purpose, the bridge stays at the first place of ``sys.meta_path`` until ``uninstall``. The specs of the
    modules do not show it.
    """

    def __init__(
        self,
        name: str,
        package: str,
        modules: str,
        patch: Callable[[ModuleType, "Bridge"], Iterable[str]],
        distribution: str | None = None,
    ) -> None:
        self.name = name
        self.package = package
        self.distribution = distribution or package
        self.wants = re.compile(modules).fullmatch
        self.reached: dict[str, list[str]] = {}
        self._patch = patch
        self._undo: list[Callable[[], Any]] = []

    @property
    def functions(
        self,
    ) -> tuple[
        Callable[[], None],
        Callable[[], None],
        Callable[[], AbstractContextManager[None]],
        Callable[[], dict[str, list[str]]],
    ]:
        """``install``, ``uninstall``, ``installed`` and ``patched``, which are the functions of the bridge's module."""
        return self.install, self.uninstall, self.installed, self.patched

    @property
    def is_installed(self) -> bool:
        return self in sys.meta_path

    @property
    def is_present(self) -> bool:
        """Whether the package can be imported."""
        return self.package in sys.modules or importlib.util.find_spec(self.package) is not None

    def install(self) -> None:
        """Make the package use visdet's operators, in models that were built before or after this call.

        A second call changes nothing.

        Raises:
            ImportError: the package is not installed.
            visdet.ops.NotBuiltError: visdet's own libraries are missing.
        """
        if not self.is_present:
            raise ImportError(
                f"visdet.compat.{self.name}: {self.package} is not installed in this environment. Install it, or do "
                "not install this bridge"
            )
        from visdet.ops.devices import require

        require("cpu")
        self.watch()

    def watch(self) -> None:
        """Do the same as ``install``, but without its checks. torch is imported only when a module is patched."""
        if self.is_installed:
            return
        sys.meta_path.insert(0, self)
        try:
            for name, module in list(sys.modules.items()):
                if module is not None and self.wants(name):
                    self.patch_module(module)
        except BaseException:  # such as a CompatWarning that a filter turns into an error
            self.uninstall()
            raise

    def uninstall(self) -> None:
        """Undo what ``install`` has done, but for what somebody else has replaced since."""
        if self.is_installed:
            sys.meta_path.remove(self)
        while self._undo:
            self._undo.pop()()
        self.reached.clear()

    def patched(self) -> dict[str, list[str]]:
        """Return a line of text about each replacement so far, by the names of the modules."""
        return {name: list(lines) for name, lines in self.reached.items()}

    def warn(self, module: ModuleType, change: str) -> None:
        """Warn that a module is not patched because it differs from what this bridge expects.

        Args:
            module: the module.
            change: the difference, as a text that begins with the name of the attribute.
        """
        # A package that is imported from its repository has no metadata.
        version = installed_version(self.distribution) or "(unknown version)"
        warnings.warn(
            f"visdet.compat.{self.name}: in {self.distribution} {version}, {module.__name__}.{change}. The package "
            "keeps its own implementation there. Update visdet-ops, or report this message to visdet's developers.",
            CompatWarning,
            stacklevel=2,
        )

    def patch_module(self, module: ModuleType) -> None:
        """Patch a module and remember its replacements.

        Whatever mode the import happens in, such as that of tensors without data, small examples are compared outside.
        """
        from torch.utils._python_dispatch import _disable_current_modes

        with _disable_current_modes():
            reached = list(self._patch(module, self))
        if reached:
            self.reached[module.__name__] = reached

    def replace(self, owner: Any, attribute: str, value: Any) -> None:
        """Set an attribute of a module or class, and keep its old value for ``uninstall``."""
        original = vars(owner).get(attribute, _MISSING)

        def undo() -> None:
            if vars(owner).get(attribute) is not value:
                return  # Somebody else has replaced it since.
            if original is _MISSING:
                delattr(owner, attribute)
            else:
                setattr(owner, attribute, original)

        self.at_uninstall(undo)
        setattr(owner, attribute, value)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module by the other finders, and give it a loader that patches it after it has run."""
        if not self.wants(name):
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None:
                continue
            spec = find(name, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader, self)
                return spec
        return None

    def at_uninstall(self, undo: Callable[[], Any]) -> None:
        """Let ``uninstall`` call a function. The functions are called in the reverse order."""
        self._undo.append(undo)


class _Loader:
    """Loads a module by another loader and then patches it."""

    def __init__(self, loader: Any, bridge: Bridge) -> None:
        self._loader = loader
        self._bridge = bridge

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        spec: Any = module.__spec__
        module.__loader__ = spec.loader = self._loader
        self._loader.exec_module(module)
        if self._bridge.is_installed:
            self._bridge.patch_module(module)
