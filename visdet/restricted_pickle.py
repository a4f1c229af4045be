"""Reading of pickles whose only objects are numpy's arrays and scalars, without running any code from the file.

A pickle creates an object by a call of a global name and may set the object's state afterwards. numpy's own dtypes and
arrays trust that state, which lets a file choose the addresses that numpy follows. Here, each name stands for a
constructor of this module that accepts plain dtypes only: booleans, numbers, text, times, and arrays of Python objects.
Objects whose state comes later are :class:`Unfinished` until :func:`finished` replaces them.
"""

import math
import pickle
import re
from argparse import Namespace
from collections.abc import Callable
from struct import unpack
from typing import Any, BinaryIO, ClassVar

import numpy as np

_DTYPE = re.compile(r"\?|[biufcSUO][0-9]{1,9}|[mM]8")
_TIME_UNITS = ("Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as", "generic")
_OTHER_FILES = {
    b"version https://git-lfs": "is a pointer of Git LFS; fetch the file itself by `git lfs pull`",
    b"<": "is a web page or XML",
    b"{": "is text like JSON",
}


_PythonUnpickler: Any = pickle._Unpickler  # type: ignore[attr-defined]


class Unfinished:
    """An object of a pickle whose state the pickle gives after its creation."""

    def finish(self) -> Any:
        """Return the object that the pickle describes."""
        raise NotImplementedError


class _DType(Unfinished):
    def __init__(self, code: str, *_options: Any) -> None:
        if not (isinstance(code, str) and _DTYPE.fullmatch(code)):
            raise pickle.UnpicklingError(f"its array type {code!r} is not a plain one")
        self.dtype = np.dtype(code)
        if self.dtype.itemsize == 0:
            raise pickle.UnpicklingError(f"its array type {code!r} has no size")

    def __setstate__(self, state: tuple) -> None:
        _version, order, *fields = state[:5]
        if any(field is not None for field in fields) or order not in ("<", ">", "|", "="):
            raise pickle.UnpicklingError(f"its array type {self.dtype} has fields")
        if self.dtype.kind in "mM":
            unit, count, *_ = state[8][1]
            unit = unit.decode("ascii") if isinstance(unit, bytes) else unit
            if unit not in _TIME_UNITS or type(count) is not int:
                raise pickle.UnpicklingError(f"its unit of time {unit!r} is unknown")
            self.dtype = np.dtype(self.dtype.kind + "8" + ("" if unit == "generic" else f"[{count}{unit}]"))
        self.dtype = self.dtype.newbyteorder(order)

    def finish(self) -> np.dtype:
        return self.dtype


class _Array(Unfinished):
    array: np.ndarray | None = None

    def __init__(self, *_options: Any) -> None:
        """Accept the arguments of numpy's constructors, whose result is empty before its state is set."""

    def __setstate__(self, state: tuple) -> None:
        _version, shape, dtype, is_fortran, content = state
        self.array = _array(shape, dtype, "F" if is_fortran else "C", content)

    def finish(self) -> np.ndarray:
        if self.array is None:
            raise pickle.UnpicklingError("one of its arrays has no content")
        return self.array


def _array(shape: Any, dtype: Any, order: Any, content: Any) -> np.ndarray:
    """Return a new array of ``content``: the bytes, or a list for an array of Python objects."""
    if not isinstance(dtype, _DType) or not all(type(size) is int and size >= 0 for size in shape):
        raise pickle.UnpicklingError("one of its arrays has no plain shape and type")
    kind: Any = list if dtype.dtype.hasobject else (bytes, bytearray)
    size = math.prod(shape) * (1 if dtype.dtype.hasobject else dtype.dtype.itemsize)
    if not isinstance(content, kind) or len(content) != size:
        raise pickle.UnpicklingError(f"one of its arrays has no content for the shape {shape!r}")
    if dtype.dtype.hasobject:
        array = np.empty(len(content), object)
        for place, item in enumerate(content):
            array[place] = finished(item)
        return array.reshape(shape, order=order)
    array = np.ndarray(shape, dtype.dtype, content, order=order).copy(order="K")
    if array.dtype.kind == "U":  # numpy takes numbers that are no character.
        codes = np.frombuffer(bytes(content), np.dtype("u4").newbyteorder(dtype.dtype.byteorder))
        if codes.size and codes.max() > 0x10FFFF:
            raise pickle.UnpicklingError("one of its arrays of text holds what is no character")
    return array


def _scalar(dtype: _DType, content: Any = None) -> Any:
    return (
        content
        if isinstance(dtype, _DType) and dtype.dtype.hasobject
        else _array((), dtype, "C", content)[()]
    )


def _reconstruct(*_options: Any) -> _Array:
    return _Array()


def _frombuffer(content: Any, dtype: _DType, shape: tuple, order: str, axis_order: Any = None) -> _Array:
    result = _Array()
    if order == "K" and axis_order is not None:
        result.array = _array(shape, dtype, "C", content).transpose(axis_order)
    else:
        result.array = _array(shape, dtype, order, content)
    return result


def _encode(text: str, encoding: str = "latin1") -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"its bytes have the encoding {encoding!r}")
    return str.encode(text, "latin1")


# The keys are the names in the pickle. numpy 2 renamed its package ``core`` to ``_core``.
NUMPY_GLOBALS: dict[str, Callable] = {
    **{f"{module}.bytes": lambda: b"" for module in ("builtins", "__builtin__")},
    "numpy.dtype": _DType,
    "numpy.ndarray": _Array,
    **{f"numpy.{core}.multiarray.scalar": _scalar for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray._reconstruct": _reconstruct for core in ("core", "_core")},
    **{f"numpy.{core}.numeric._frombuffer": _frombuffer for core in ("core", "_core")},
}


def finished(value: Any, _done: dict[int, tuple] | None = None) -> Any:
    """Return ``value`` with every :class:`Unfinished` object in its containers replaced. Lists and dicts are kept."""
    done = {} if _done is None else _done
    if isinstance(value, Unfinished):
        return value.finish()
    if not isinstance(value, dict | list | tuple | Namespace):
        return value
    if id(value) in done:
        return done[id(value)][1]
    done[id(value)] = (value, value)  # The first one keeps the id in use.
    if isinstance(value, tuple):
        items = [finished(item, done) for item in value]
        if any(new is not old for new, old in zip(items, value, strict=True)):
            done[id(value)] = (value, tuple(items))
        return done[id(value)][1]
    content: Any = vars(value) if isinstance(value, Namespace) else value
    for key, item in list(content.items() if isinstance(content, dict) else enumerate(content)):
        content[key] = finished(item, done)
    return value


class _Sealed:
    """A constructor that a pickle can call and cannot change."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("it sets the state of a name")


class _NumpyUnpickler(_PythonUnpickler):
    """A restricted form of Python's own unpickler.

    The one in C allocates as much memory as the file says. Sets and the keys of dicts cannot be tuples, as Python ends
    when it hashes a deeply nested one.
    """

    dispatch: ClassVar[dict] = dict(_PythonUnpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full == "_codecs.encode":
            return _Sealed(_encode)
        if full not in NUMPY_GLOBALS:
            raise pickle.UnpicklingError(f"it names {full}, which is none of numpy's array types")
        return _Sealed(NUMPY_GLOBALS[full])

    def load_setitem(self) -> None:
        self._check_keys(self.stack[-2:-1])
        super().load_setitem()

    def load_setitems(self) -> None:
        self._check_keys(self.stack[::2])
        super().load_setitems()

    def load_dict(self) -> None:
        self._check_keys(self.stack[::2])
        super().load_dict()

    def _check_keys(self, keys: list) -> None:
        if any(isinstance(key, tuple | Unfinished) for key in keys):
            raise pickle.UnpicklingError("a key of one of its dicts is neither text nor a number")

    def load_bytearray8(self) -> None:
        self.append(bytearray(self.read(unpack("<Q", self.read(8))[0])))

    for _opcode, _load in (
        (pickle.SETITEM, load_setitem),
        (pickle.SETITEMS, load_setitems),
        (pickle.DICT, load_dict),
        (pickle.BYTEARRAY8, load_bytearray8),
    ):
        dispatch[_opcode[0]] = _load
    for _opcode in (pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET):
        del dispatch[_opcode[0]]


def load_numpy_pickle(file: BinaryIO) -> Any:
    """Return the content of a pickle of Python's plain types and numpy's arrays and scalars.

    Raises:
        pickle.UnpicklingError: the file is no such pickle. The message is the end of a sentence on the file.
    """
    try:
        return finished(_NumpyUnpickler(file).load())
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # A damaged pickle can end in an error of any type.
        file.seek(0)
        reason = start_of_other_file(file.read(64)) or "is damaged, cut short or no pickle"
        raise pickle.UnpicklingError(f"it {reason}") from error


def start_of_other_file(start: bytes) -> str | None:
    """Return the end of a sentence on a file that begins with ``start``, if that is surely no pickle."""
    if not start.strip(b"\0"):
        return "holds only zeros" if start else "is empty"
    return next((said for begin, said in _OTHER_FILES.items() if start.lstrip().startswith(begin)), None)
