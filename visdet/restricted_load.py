"""Reading of checkpoints and info files of other projects, without running any code from the file.

A pickle creates an object by a call of a global name and may set the object's state afterwards. numpy's own dtypes and
arrays trust that state, which lets a file choose the addresses that numpy follows. Here, each name of numpy stands for
a constructor of this module, which makes arrays of numbers, text and Python objects from bytes and lists. Objects whose
state comes later are :class:`_Unfinished` until :func:`_finished` replaces them.
"""

import pickle
import threading
from argparse import Namespace
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any, BinaryIO

import numpy as np

__all__ = ["load_numpy_pickle", "load_restricted", "start_of_other_file"]

_PYTHON = "is text like Python"
_PICTURE = "is a picture"
_OTHER_FILES = {
    b"version https://git-lfs": "is a pointer of Git LFS; fetch the file itself by `git lfs pull`",
    b"<": "is a web page or XML",
    b"{": "is text like JSON",
    b"#": _PYTHON,
    b'"': _PYTHON,
    b"import ": _PYTHON,
    b"from ": _PYTHON,
    b"_base_": _PYTHON,
    b"\xff\xd8\xff": _PICTURE,
    b"\x89PNG": _PICTURE,
    b"\x08": "is a graph like ONNX",
}
# A data set of a million frames has fewer. A file of some hundred bytes can say that it has 2 ** 1000.
_MOST_VALUES = 10**9
_loading = threading.Lock()


def load_restricted(file: Any, load: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Return the content of a checkpoint of tensors, plain types and what checkpoints often hold besides.

    These are numpy's arrays and scalars, mmengine's history buffers, ``argparse.Namespace`` and paths. Dicts with a
    default are read as plain dicts.

    Args:
        file: the path or the file.
        load: the function that reads it. The default is ``torch.load``.
        options: further options of ``torch.load``, but not ``weights_only``.

    Raises:
        pickle.UnpicklingError: the file holds another type.
    """
    import torch

    names = torch.serialization
    with _loading:
        registered = names.get_safe_globals()
        # The process may have registered a class of its own under one of these names.
        others = [known for known in registered if _name(known) not in _SAFE_GLOBALS]
        names.clear_safe_globals()
        names.add_safe_globals([*others, *((value, name) for name, value in _SAFE_GLOBALS.items())])
        try:
            return _finished((load or torch.load)(file, weights_only=True, **options))
        finally:
            names.clear_safe_globals()
            names.add_safe_globals(registered)


def load_numpy_pickle(file: BinaryIO) -> Any:
    """Return the content of a pickle of Python's plain types and numpy's arrays and scalars.

    Raises:
        pickle.UnpicklingError: the file is no such pickle. The message is the end of a sentence on the file.
    """
    if reason := start_of_other_file(file.read(64)):
        raise pickle.UnpicklingError(f"it {reason}")
    file.seek(0)
    try:
        return _finished(_NumpyUnpickler(file).load())
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # A damaged pickle can end in an error of any type.
        raise pickle.UnpicklingError("it is damaged, cut short or no pickle") from error


def start_of_other_file(start: bytes) -> str | None:
    """Return the end of a sentence on a file that begins with ``start``, if that is surely no pickle."""
    if not start.strip(b"\0"):
        return "holds only zeros" if start else "is empty"
    return next((said for begin, said in _OTHER_FILES.items() if start.lstrip().startswith(begin)), None)


class _Unfinished:
    """An object of a pickle whose state the pickle gives after its creation."""

    value: Any = None


class _DType(_Unfinished):
    def __init__(self, code: str, *_options: Any) -> None:
        self.value = np.dtype(code)

    def __setstate__(self, state: tuple) -> None:
        _version, order, *fields = state[:5]
        if any(field is not None for field in fields) or len(state) > 8:
            raise pickle.UnpicklingError(f"its array type {self.value} is neither of numbers nor of text")
        self.value = self.value.newbyteorder(order)


class _Array(_Unfinished):
    def __init__(self, *_options: Any) -> None:
        """Accept the arguments of numpy's constructors, whose result is empty before its state is set."""

    def __setstate__(self, state: tuple) -> None:
        _version, shape, dtype, is_fortran, content = state
        self.value = _array(content, dtype, shape, "F" if is_fortran else "C")


class _History(_Unfinished):
    def __setstate__(self, state: dict) -> None:
        from mmengine.logging import HistoryBuffer

        histories = _finished([state["_log_history"], state["_count_history"]])
        if not all(isinstance(history, np.ndarray) for history in histories):
            raise pickle.UnpicklingError("the values of a history are no array")
        self.value = HistoryBuffer(*histories)


def _array(content: Any, dtype: _DType, shape: tuple, order: str, axis_order: Any = None) -> np.ndarray:
    """Return a new array of ``content``: the bytes, or a list for an array of Python objects."""
    kind = dtype.value
    if kind.hasobject:
        flat = np.empty(len(content), object)
        for index, item in enumerate(_finished(list(content))):
            flat[index] = item  # numpy would look for further axes in lists that are assigned at once.
    else:  # This refuses types that hold objects.
        flat = np.frombuffer(content, kind) if content else np.empty(0, kind)
    if axis_order is not None and order == "K":
        return flat.reshape(shape).transpose(axis_order).copy(order="K")
    return flat.reshape(shape, order="F" if order == "F" else "C").copy(order="K")


def _frombuffer(*arguments: Any) -> _Array:
    result = _Array()
    result.value = _array(*arguments)
    return result


def _encode(text: str, encoding: str = "latin1") -> bytes:
    return str.encode(text, "latin1") if encoding == "latin1" else b""


def _scalar(dtype: _DType, content: Any) -> Any:
    return _array(content, dtype, (), "C")[()]


def _path(*parts: str) -> PurePosixPath:
    return PurePosixPath(*parts)


def _no_bytes() -> bytes:
    return b""


# The keys are the names in the pickle. numpy 2 renamed its package ``core`` to ``_core``.
_NUMPY_GLOBALS: dict[str, Callable] = {
    "builtins.bytes": _no_bytes,
    "__builtin__.bytes": _no_bytes,
    "numpy.dtype": _DType,
    "numpy.ndarray": _Array,
    "numpy.core.multiarray.scalar": _scalar,
    "numpy._core.multiarray.scalar": _scalar,
    "numpy.core.multiarray._reconstruct": _Array,
    "numpy._core.multiarray._reconstruct": _Array,
    "numpy.core.numeric._frombuffer": _frombuffer,
    "numpy._core.numeric._frombuffer": _frombuffer,
    "_codecs.encode": _encode,
}
_SAFE_GLOBALS: dict[str, Any] = {
    **_NUMPY_GLOBALS,
    "argparse.Namespace": Namespace,
    "mmengine.logging.history_buffer.HistoryBuffer": _History,
    "builtins.getattr": lambda *_names: None,  # A history buffer names its methods by it.
    "collections.defaultdict": lambda *_factory: {},
    "pathlib.PosixPath": _path,
    "pathlib._local.PosixPath": _path,
}


def _finished(value: Any) -> Any:
    """Return ``value`` with every :class:`_Unfinished` object in its containers replaced. Lists and dicts are kept.

    Raises:
        pickle.UnpicklingError: an object has no content, a container holds itself, or containers share parts so often
            that a walk through all of them would not end in a reasonable time.
    """
    return _Finishing().result_of(value)


class _Finishing:
    """A walk through containers that visits each one once, and counts the values as a walk without memory would."""

    def __init__(self) -> None:
        self.num_values = 0
        # The container, which must stay alive to keep its id, what stands for it, and the number of its values.
        self.done: dict[int, tuple[Any, Any, int] | None] = {}

    def result_of(self, value: Any) -> Any:
        content: Any = vars(value) if isinstance(value, Namespace) else value
        if isinstance(value, _Unfinished):
            finished = value.value
            if finished is None:
                raise pickle.UnpicklingError("one of its arrays has no content")
            return finished
        if type(content) is not tuple and not isinstance(content, dict | list):
            self.num_values += 1
            return value
        done, place, finish = self.done, id(value), self.result_of
        if place not in done:
            done[place] = None
            before = self.num_values
            result: Any = value
            if isinstance(content, tuple):
                result = tuple(map(finish, content))
            else:
                for key, item in list(content.items() if isinstance(content, dict) else enumerate(content)):
                    content[key] = finish(item)
            done[place] = value, result, self.num_values - before
            return result
        known = done[place]
        if known is None:
            raise pickle.UnpicklingError("one of its containers holds itself")
        _, result, count = known
        self.num_values += count
        if self.num_values > _MOST_VALUES:
            raise pickle.UnpicklingError(
                f"its containers share parts, so that they hold over {_MOST_VALUES} values"
            )
        return result


class _NumpyUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        call = _NUMPY_GLOBALS.get(full)
        if call is None:
            raise pickle.UnpicklingError(f"it names {full}, which is none of numpy's array types")
        return lambda *arguments: call(*arguments)  # A pickle may change what it gets.


def _name(known: Any) -> str:
    return known[1] if isinstance(known, tuple) else f"{known.__module__}.{known.__qualname__}"
