"""The operators by name, with what the tests need to know of each."""

import sys
from importlib import import_module
from pathlib import Path

from .problem import Operator

__all__ = ["OPERATORS"]

TESTS = Path(__file__).resolve().parents[1]
FILES = [path for path in sorted((TESTS / "ops").glob("test_*.py")) if "\nOPERATORS = (" in path.read_text()]

# pytest imports the files of these folders by their bare names, too.
sys.path[:0] = [path for path in map(str, (TESTS / "ops", TESTS)) if path not in sys.path]
OPERATORS: dict[str, Operator] = {
    operator.name: operator for path in FILES for operator in import_module(path.stem).OPERATORS
}
