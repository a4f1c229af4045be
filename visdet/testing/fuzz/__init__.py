"""A fuzzer of the operators: random problems, each compared with a float64 reference (docs/fuzzing.md)."""

from .families import FAMILIES
from .problem import Draw, Family, Problem

__all__ = ["FAMILIES", "Draw", "Family", "Problem"]
