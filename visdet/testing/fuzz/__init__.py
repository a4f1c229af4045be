"""A fuzzer of the operators, which compares random problems with a float64 reference (docs/fuzzing.md)."""

from .families import FAMILIES
from .problem import Draw, Family, Problem

__all__ = ["FAMILIES", "Draw", "Family", "Problem"]
