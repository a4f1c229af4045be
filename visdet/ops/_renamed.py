"""Support for old names of arguments, which configs of mmdet 2 still use."""

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["renamed_arguments"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def renamed_arguments(**new_names: str) -> Callable[[_Function], _Function]:
    """Return a decorator that accepts each old keyword under its new name, with a DeprecationWarning."""

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for old in new_names.keys() & kwargs.keys():
                new = new_names[old]
                if new in kwargs:
                    raise TypeError(f"{function.__qualname__}: got both {old!r} and its new name {new!r}")
                warnings.warn(
                    f"{function.__qualname__}: {old!r} is now {new!r}", DeprecationWarning, stacklevel=2
                )
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate
