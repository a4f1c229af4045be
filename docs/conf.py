"""Sphinx's configuration. ``make docs`` builds the site in ``work_dirs/docs``."""

import importlib
import inspect
from pathlib import Path
from typing import Any

import visdet

ROOT = Path(__file__).resolve().parents[1]

project = "visdet"
release = visdet.__version__
html_title = f"visdet {release}"
html_theme = "furo"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
napoleon_numpy_docstring = False
napoleon_use_ivar = True
suppress_warnings = ["ref.python"]  # two packages may offer one name

autodoc_default_options = {
    "members": True,
    "imported-members": True,
    "undoc-members": True,
    "show-inheritance": True,
}
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 100
autosummary_generate = False  # write_reference makes the pages
autodoc_preserve_defaults = True


def public_names() -> dict[str, dict[str, str]]:
    """Return the public names of each package, and for each name the place of its entry.

    A class that several packages offer has its entry in the first of them, which is the shortest.
    """
    folders = (
        path.parent for path in (ROOT / "visdet").rglob("__init__.py") if "__all__" in path.read_text()
    )
    packages = [".".join(folder.relative_to(ROOT).parts) for folder in folders] + [
        "visdet.registry",
        "visdet.errors",
    ]
    entries: dict[int, str] = {}
    names: dict[str, dict[str, str]] = {}
    for package in sorted(packages, key=lambda package: (package.count("."), package)):
        module = importlib.import_module(package)
        names[package] = {
            name: entries.setdefault(id(getattr(module, name)), f"{package}.{name}")
            for name in module.__all__
        }
    return names


def write_reference(app: Any) -> None:
    """Write a page of the API reference for each public package, and a table of them."""
    for page in {*Path(app.srcdir, "api").glob("*.rst")} - {
        Path(app.srcdir, "api", f"{package}.rst") for package in public_names()
    }:
        page.unlink()  # of a package that there was before
    for package, entries in public_names().items():
        module = importlib.import_module(package)
        elsewhere = {name: entry for name, entry in entries.items() if entry != f"{package}.{name}"}
        values = [
            name
            for name in entries
            if name not in elsewhere
            and not (callable(value := getattr(module, name)) or inspect.ismodule(value))
        ]
        lines = [package, "=" * len(package), "", ".. autosummary::", "   :nosignatures:", ""]
        lines += [
            *(f"   {package}.{name}" for name in entries if name not in elsewhere),
            *(
                "",
                f".. automodule:: {package}",
                f"   :exclude-members: {', '.join([*elsewhere, *values])}",
                "",
            ),
        ]
        for name in values:
            lines += [
                f".. py:data:: {name}",
                f"   :module: {package}",
                f"   :type: {type(getattr(module, name)).__name__}",
                "",
            ]
        lines += [*(f"- :py:obj:`{package}.{name} <{entry}>`" for name, entry in elsewhere.items()), ""]
        write(Path(app.srcdir, "api", f"{package}.rst"), lines)
    write(
        Path(app.srcdir, "api", "packages.inc"),
        [".. autosummary::", "", *(f"   {name}" for name in public_names())],
    )


def write(path: Path, lines: list[str]) -> None:
    """Write a file that has other lines. Sphinx reads again what is newer than its own files."""
    path.parent.mkdir(exist_ok=True)
    if not path.exists() or path.read_text() != "\n".join(lines):
        path.write_text("\n".join(lines))


def check_reference(app: Any, environment: Any) -> None:
    """Raise an error for a public name that has no entry."""
    known = {*environment.domains["py"].objects}
    missing = {entry for entries in public_names().values() for entry in entries.values()} - known
    if missing:
        raise ValueError(f"the API reference has no entry for {', '.join(sorted(missing))}")


def setup(app: Any) -> None:
    app.connect("builder-inited", write_reference)
    app.connect("env-check-consistency", check_reference)
