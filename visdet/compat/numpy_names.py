"""What numpy 1.24 to 2.4 have dropped, by the names in ``numpy``, as numpy 1.23 had it.

The functions of this module are numpy's own of that time in today's terms. ``names()`` returns them with the aliases
and the constants.
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
    "lib.add_docstring": "add_docstring",
    "lib.add_newdoc": "add_newdoc",
    "lib.tracemalloc_domain": "tracemalloc_domain",
    "lib.npyio.DataSource": "DataSource",
    "lib.array_utils.byte_bounds": "byte_bounds",
    "char.compare_chararrays": "compare_chararrays",
    "rec.format_parser": "format_parser",
    "exceptions.AxisError": "AxisError",
    "exceptions.ComplexWarning": "ComplexWarning",
    "exceptions.ModuleDeprecationWarning": "ModuleDeprecationWarning",
    "exceptions.RankWarning": "RankWarning",
    "exceptions.TooHardError": "TooHardError",
    "exceptions.VisibleDeprecationWarning": "VisibleDeprecationWarning",
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
    "NINF": -math.inf,
    "PZERO": 0.0,
    "NZERO": -0.0,
    "CLIP": 0,
    "WRAP": 1,
    "RAISE": 2,
    "MAY_SHARE_BOUNDS": 0,
    "MAY_SHARE_EXACT": -1,
    "MAXDIMS": 32,
    "ALLOW_THREADS": 1,
    "BUFSIZE": 8192,
    "UFUNC_BUFSIZE_DEFAULT": 8192,
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
    "FPE_DIVIDEBYZERO": 1,
    "FPE_OVERFLOW": 2,
    "FPE_UNDERFLOW": 4,
    "FPE_INVALID": 8,
}
_ERRORS = ("ignore", "warn", "raise", "call", "print", "log")
_KINDS = ("divide", "over", "under", "invalid")  # from the lowest three bits of an error mask on


def names() -> dict[str, Any]:
    """Return all names and what they mean. A few lack where numpy itself is older than what they mean."""
    found = dict(_VALUES, sctypes=_sctypes(), cast=_OfType(_cast_to), nbytes=_OfType(_size_of))
    for path, olds in _ALIASES.items():
        value: Any = np
        for part in path.split("."):
            value = getattr(value, part, None)
        if value is not None:
            found |= dict.fromkeys(olds.split(), value)
    for function in _FUNCTIONS:
        found[function.__name__] = function
    return found


class _OfType(dict):
    """A value for each type of numbers, which is also found by a name of the type."""

    def __init__(self, value_of: Callable[[type], Any]) -> None:
        scalars = [np.dtype(code).type for code in np.typecodes["All"]]
        super().__init__((scalar, value_of(scalar)) for scalar in scalars)

    def __missing__(self, key: Any) -> Any:
        return dict.__getitem__(self, obj2sctype(key))


def _cast_to(scalar: type) -> Callable[[Any], Any]:
    return functools.partial(np.asarray, dtype=scalar)


def _size_of(scalar: Any) -> int:
    return np.dtype(scalar).itemsize


def _sctypes() -> dict[str, list[type]]:
    kinds: dict[str, list[type]] = {"int": [], "uint": [], "float": [], "complex": [], "others": []}
    letters = {"i": "int", "u": "uint", "f": "float", "c": "complex"}
    numbers = [np.dtype(code) for code in np.typecodes["AllInteger"] + np.typecodes["AllFloat"]]
    for dtype in sorted(set(numbers), key=_size_of):
        kinds[letters[dtype.kind]].append(dtype.type)
    kinds["others"] = [bool, object, bytes, str, np.void]
    return kinds


def obj2sctype(rep: Any, default: Any = None) -> Any:
    """Return the type of the numbers of an array, a name, a dtype or a type."""
    if isinstance(rep, type) and issubclass(rep, np.generic):
        return rep
    try:
        return rep.dtype.type if isinstance(rep, np.ndarray) else np.dtype(rep).type
    except TypeError:
        return default


def issctype(rep: Any) -> bool:
    """Return whether ``rep`` is a type or dtype of numpy other than that of objects."""
    if not isinstance(rep, type | np.dtype):
        return False
    return obj2sctype(rep) not in (None, np.object_)


def maximum_sctype(t: Any) -> Any:
    """Return the type of the greatest size of the same kind."""
    scalar = obj2sctype(t)
    if scalar is None:
        return t
    for types in _sctypes().values():
        if scalar in types[:-1] and types[-1] is not np.void:
            return types[-1]
    return scalar


def issubsctype(arg1: Any, arg2: Any) -> bool:
    """Return whether the type of the numbers of one object is below that of another."""
    return issubclass(obj2sctype(arg1), obj2sctype(arg2))


def sctype2char(sctype: Any) -> str:
    """Return the letter of a type of numbers."""
    scalar = obj2sctype(sctype)
    if scalar is None:
        raise ValueError("unrecognized type")
    return np.dtype(scalar).char


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


def get_array_wrap(*args: Any) -> Any:
    """Return ``__array_wrap__`` of the argument with the highest priority, or None."""
    wrapping = [one for one in args if hasattr(one, "__array_wrap__")]
    if not wrapping:
        return None
    return max(wrapping, key=_priority).__array_wrap__


def _priority(array: Any) -> float:
    return getattr(array, "__array_priority__", 0)


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


def recfromtxt(fname: Any, **kwargs: Any) -> Any:
    """Return the rows of a text file as records."""
    return np.genfromtxt(fname, **{"dtype": None, **kwargs}).view(np.recarray)


def recfromcsv(fname: Any, **kwargs: Any) -> Any:
    """Return the rows of a table with a line of names as records."""
    return recfromtxt(fname, **{"case_sensitive": "lower", "names": True, "delimiter": ",", **kwargs})


def deprecate(function: Any = None, old_name: Any = None, new_name: Any = None, message: Any = None) -> Any:
    """Return a function that warns that it is deprecated, or what makes it of a function."""
    if function is None:
        return functools.partial(deprecate, old_name=old_name, new_name=new_name, message=message)
    text = f"`{old_name or function.__name__}` is deprecated"
    text += f", use `{new_name}` instead!" if new_name else "!"
    text += f"\n{message}" if message else ""

    @functools.wraps(function)
    def warning(*arguments: Any, **named: Any) -> Any:
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return function(*arguments, **named)

    return warning


def deprecate_with_doc(msg: str) -> Any:
    """Return ``deprecate`` with a message."""
    return deprecate(message=msg)


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
    *(asfarray, asscalar, add_newdoc_ufunc, deprecate, deprecate_with_doc, disp, fastCopyAndTranspose),
    *(find_common_type, get_array_wrap, geterrobj, in1d, issctype, issubsctype, lookfor, maximum_sctype),
    *(msort, obj2sctype, recfromcsv, recfromtxt, sctype2char, set_numeric_ops, set_string_function),
    *(seterrobj, source, who),
)
