"""The module ``torch._six`` of torch 1."""

import collections.abc as container_abcs
from math import inf, nan

__all__ = ["container_abcs", "inf", "int_classes", "istuple", "nan", "string_classes"]

string_classes = (str, bytes)
int_classes = int


def istuple(obj: object) -> bool:
    """Return whether an object is a tuple."""
    return isinstance(obj, tuple)
