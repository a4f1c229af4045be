"""What detectron2 and others use of ``pkg_resources``, which setuptools 81 has dropped."""

import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any

__all__ = [
    "DistributionNotFound",
    "get_distribution",
    "parse_version",
    "resource_exists",
    "resource_filename",
]


def __getattr__(name: str) -> None:
    """Raise an error for the other names, as if the package were missing, for which many programs are prepared."""
    if name.startswith("__"):
        raise AttributeError(name)
    raise ImportError(
        f"visdet does not provide pkg_resources.{name}. Install it with `pip install 'setuptools<81'`"
    )


DistributionNotFound = importlib.metadata.PackageNotFoundError
get_distribution = importlib.metadata.distribution  # an object with the ``version`` of an installed package


def parse_version(version: str) -> Any:
    """Return an object that is compared by the rules for the versions of packages."""
    from packaging.version import parse

    return parse(version)


def resource_filename(package: str, name: str) -> str:
    """Return the path of a file of a package, whether or not the file exists."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.origin:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    return str(Path(spec.origin).parent / name)


def resource_exists(package: str, name: str) -> bool:
    """Return whether a package has a file of this name."""
    return Path(resource_filename(package, name)).exists()
