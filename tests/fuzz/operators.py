"""The operators by name, with what the tests need to know of each."""

import sys
from importlib import import_module
from pathlib import Path

from .problem import Operator

__all__ = ["OPERATORS"]

TESTS = Path(__file__).resolve().parents[1]


def _described_in(folder: Path, package: str = "") -> dict[str, Operator]:
    """Return what the files of a folder list under ``OPERATORS``."""
    files = [path for path in sorted(folder.glob("*.py")) if "\nOPERATORS = (" in path.read_text()]
    modules = [import_module(package + path.stem) for path in files]
    return {operator.name: operator for module in modules for operator in module.OPERATORS}


# pytest imports the files of these folders by their bare names, too.
sys.path[:0] = [path for path in map(str, (TESTS / "ops", TESTS)) if path not in sys.path]
OPERATORS = _described_in(TESTS / "fuzz" / "families", "tests.fuzz.families.") | _described_in(TESTS / "ops")
