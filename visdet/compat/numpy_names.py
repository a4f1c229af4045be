"""What numpy 1.24 to 2.4 have dropped, by the names in ``numpy``, as numpy 1.23 had it.

The functions of this module are numpy's own of that time in today's terms. ``names()`` returns them with the aliases,
the constants, and what numpy 2 has moved into its own modules.
"""

import ast
import functools
import inspect
import math
import os
import sys
import warnings
from collections.abc import Callable
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
    "_core.numerictypes": "issctype issubclass_ issubsctype obj2sctype sctype2char",
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
_ERRORS = ("ignore", "warn", "raise", "call", "print", "log")
_KINDS = ("divide", "over", "under", "invalid")  # from the lowest three bits of an error mask on
_KINDS_OF_NUMBERS = {
    "int": "Integer",
    "uint": "UnsignedInteger",
    "float": "Float",
    "complex": "Complex",
}


def names() -> dict[str, Any]:
    """Return all names and what they mean. A few lack where numpy itself is older than what they mean."""
    found = dict(_VALUES, sctypes=_sctypes(), cast=_OfType(_cast_to), nbytes=_OfType(_size_of))
    for name, olds in _ALIASES.items():
        if value := getattr(np, name, None):
            found |= dict.fromkeys(olds.split(), value)
    for path, kept in _KEPT.items():
        module = functools.reduce(_part_of, path.split("."), np)
        for name in kept.split():
            if hasattr(module, name):
                found[name] = getattr(module, name)
    for function in _FUNCTIONS:
        found[function.__name__] = function
    return found


def _part_of(module: Any, name: str) -> Any:
    return getattr(module, name, None)


class _OfType(dict):
    """A value for each type of numbers, which is also found by a name of the type."""

    def __init__(self, value_of: Callable[[type], Any]) -> None:
        scalars = [np.dtype(code).type for code in np.typecodes["All"]]
        super().__init__(zip(scalars, map(value_of, scalars), strict=True))

    def __missing__(self, key: Any) -> Any:
        return dict.__getitem__(self, np.dtype(key).type)


def _cast_to(scalar: type) -> Callable[[Any], Any]:
    return functools.partial(np.asarray, dtype=scalar)


def _size_of(scalar: Any) -> int:
    return np.dtype(scalar).itemsize


def _sctypes() -> dict[str, list[type]]:
    kinds: dict[str, list[type]] = {}
    for kind, codes in _KINDS_OF_NUMBERS.items():
        numbers = dict.fromkeys(map(np.dtype, np.typecodes[codes]))  # Some have two codes.
        kinds[kind] = [number.type for number in numbers]
    kinds["others"] = [bool, object, bytes, str, np.void]
    return kinds


def maximum_sctype(t: Any) -> Any:
    """Return the type of the greatest size of the same kind."""
    try:
        scalar = np.dtype(t).type
    except TypeError:
        return t
    for types in _sctypes().values():
        if scalar in types:
            return types[-1]
    return scalar


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


def fastCopyAndTranspose(a: Any) -> Any:
    """Return a transposed copy."""
    return np.transpose(a).copy()


def geterrobj() -> list[Any]:
    """Return the size of the buffer, the mask of what happens on errors, and the function that is called."""
    state: dict[str, Any] = dict(np.geterr())
    mask = sum(_ERRORS.index(state[kind]) << 3 * place for place, kind in enumerate(_KINDS))
    return [np.getbufsize(), mask, np.geterrcall()]


def seterrobj(errobj: Any) -> None:
    """Set what ``geterrobj`` returns."""
    size, mask, function = errobj
    np.setbufsize(size)
    meant: dict[str, Any] = {kind: _ERRORS[mask >> 3 * place & 7] for place, kind in enumerate(_KINDS)}
    np.seterr(**meant)
    np.seterrcall(function)


def disp(mesg: Any, device: Any = None, linefeed: bool = True) -> None:
    """Write a message."""
    print(mesg, file=device or sys.stdout, end="\n" if linefeed else "", flush=True)


def source(object: Any, output: Any = None) -> None:
    """Write the source of an object of Python."""
    disp(inspect.getsource(object), output)


def who(vardict: Any = None) -> None:
    """Write the arrays among the variables of a program."""
    for name, value in (vars(sys.modules["__main__"]) if vardict is None else vardict).items():
        if isinstance(value, np.ndarray):
            disp(f"{name:15} {value.shape!s:20} {value.nbytes:15} {value.dtype}")


def lookfor(what: str, module: Any = None, import_modules: bool = True, *options: Any, **named: Any) -> None:
    """Write the names in numpy, or in another module, whose documentation has a word."""
    for name, value in vars(np if module is None else module).items():
        if what.lower() in (inspect.getdoc(value) or "").lower():
            disp(name)


def set_string_function(f: Any, repr: bool = True) -> None:
    """Set how arrays are written: by ``repr`` only, and by numpy's own function if ``f`` is None."""
    if not repr and f is not None:
        raise NotImplementedError("numpy.set_string_function: numpy 2 lets repr alone be replaced")
    np.set_printoptions(override_repr=f)


def set_numeric_ops(**operators: Any) -> dict[str, Any]:
    """Return an empty dict. numpy 2 does not let the operators of arrays be replaced."""
    if operators:
        raise NotImplementedError("numpy.set_numeric_ops: numpy 2 does not let operators be replaced")
    return {}


def add_newdoc_ufunc(ufunc: Any, new_docstring: str) -> None:
    """Do nothing, as numpy 2 keeps the documentation of its functions."""


_FUNCTIONS: tuple[Any, ...] = (
    asfarray,
    asscalar,
    add_newdoc_ufunc,
    disp,
    fastCopyAndTranspose,
    find_common_type,
    geterrobj,
    in1d,
    lookfor,
    maximum_sctype,
    msort,
    set_numeric_ops,
    set_string_function,
    seterrobj,
    source,
    who,
)
