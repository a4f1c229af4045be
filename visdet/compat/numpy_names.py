"""What numpy 1.24 to 2.4 have dropped, by the names in ``numpy``, as numpy 1.23 had it.

The functions of this module are numpy's own of that time in today's terms. ``names()`` returns them with the aliases,
the constants, and what numpy 2 has moved into its own modules. Names that only served numpy itself and its users at a
terminal, such as ``lookfor`` and ``geterrobj``, are not among them.
"""

import ast
import functools
import math
import os
import sys
import warnings
from typing import Any

__all__ = ["names"]

np: Any = sys.modules.get(
    "numpy"
)  # Bridges are imported without numpy, too, and this one then has nothing to give.

_ALIASES = {
    "bool_": "bool bool8",
    "float64": "float_",
    "complex64": "singlecomplex",
    "complex128": "complex_ cfloat",
    "longdouble": "longfloat",
    "clongdouble": "longcomplex clongfloat",
    "str_": "unicode_ str0",
    "bytes_": "string_ bytes0",
    "object_": "object0",
    "void": "void0",
    "intp": "int0",
    "uintp": "uint0",
    "inf": "Inf Infinity infty PINF",
    "nan": "NaN NAN",
    "prod": "product",
    "cumprod": "cumproduct",
    "all": "alltrue",
    "any": "sometrue",
    "round": "round_",
    "vstack": "row_stack",
    "trapezoid": "trapz",
    "asmatrix": "mat",
}
_VALUES: dict[str, Any] = {
    "int": int,
    "float": float,
    "complex": complex,
    "object": object,
    "str": str,
    "unicode": str,
    "long": int,
    "issubclass_": issubclass,
    "safe_eval": ast.literal_eval,
    "math": math,
    "os": os,
    "sys": sys,
    "warnings": warnings,
    "ERR_DEFAULT": 521,
    "ERR_IGNORE": 0,
    "ERR_WARN": 1,
    "ERR_RAISE": 2,
    "ERR_CALL": 3,
    "ERR_PRINT": 4,
    "ERR_LOG": 5,
    "SHIFT_DIVIDEBYZERO": 0,
    "SHIFT_OVERFLOW": 3,
    "SHIFT_UNDERFLOW": 6,
    "SHIFT_INVALID": 9,
}
# Names that numpy 2 keeps in its own modules.
_KEPT = {
    "_core.umath": "NINF PZERO NZERO CLIP WRAP RAISE MAY_SHARE_BOUNDS MAY_SHARE_EXACT MAXDIMS ALLOW_THREADS BUFSIZE "
    "UFUNC_BUFSIZE_DEFAULT FPE_DIVIDEBYZERO FPE_OVERFLOW FPE_UNDERFLOW FPE_INVALID",
    "_core.numerictypes": "issctype issubsctype obj2sctype sctype2char",
    "lib._shape_base_impl": "get_array_wrap",
    "lib._npyio_impl": "recfromcsv recfromtxt",
    "lib._utils_impl": "deprecate deprecate_with_doc",
    "lib": "add_docstring add_newdoc tracemalloc_domain",
    "lib.npyio": "DataSource",
    "lib.array_utils": "byte_bounds",
    "char": "compare_chararrays",
    "rec": "format_parser",
    "exceptions": "AxisError ComplexWarning ModuleDeprecationWarning RankWarning TooHardError "
    "VisibleDeprecationWarning",
}


def names() -> dict[str, Any]:
    """Return all names and what they mean. A few lack where numpy itself is older than what they mean."""
    found = dict(_VALUES, sctypes=_sctypes())
    for name, olds in _ALIASES.items():
        if value := getattr(np, name, None):
            found |= dict.fromkeys(olds.split(), value)
    for path, kept in _KEPT.items():
        module = functools.reduce(_part_of, path.split("."), np)
        for name in kept.split():
            if hasattr(module, name):
                found[name] = getattr(module, name)
    for function in (asfarray, asscalar, find_common_type, in1d, msort):
        found[function.__name__] = function
    return found


def _part_of(module: Any, name: str) -> Any:
    return getattr(module, name, None)


def _sctypes() -> dict[str, list[type]]:
    return {
        "int": [np.int8, np.int16, np.int32, np.int64],
        "uint": [np.uint8, np.uint16, np.uint32, np.uint64],
        "float": [np.float16, np.float32, np.float64, np.longdouble],
        "complex": [np.complex64, np.complex128, np.clongdouble],
        "others": [bool, object, bytes, str, np.void],
    }


def find_common_type(array_types: Any, scalar_types: Any) -> Any:
    """Return the type that holds arrays and scalars. Scalars of no greater kind have no effect."""
    of_arrays = np.result_type(*array_types) if array_types else None
    of_scalars = np.result_type(*scalar_types) if scalar_types else None
    if of_arrays is None or of_scalars is None:
        return of_scalars if of_arrays is None else of_arrays
    order = "buifcSUVOMm"
    if order.index(of_scalars.kind) > order.index(of_arrays.kind):
        return np.promote_types(of_scalars, of_arrays)
    return of_arrays


def asscalar(a: Any) -> Any:
    """Return the number of an array with one number."""
    return a.item()


def asfarray(a: Any, dtype: Any = None) -> Any:
    """Return an array of a floating type, which is float64 by default."""
    return np.asarray(a, dtype if dtype is not None and np.issubdtype(dtype, np.inexact) else np.float64)


def msort(a: Any) -> Any:
    """Return a copy that is sorted along the first axis."""
    return np.sort(a, axis=0)


def in1d(ar1: Any, ar2: Any, **options: Any) -> Any:
    """Return whether each element of the flat first array is in the second."""
    return np.isin(np.ravel(ar1), ar2, **options)
