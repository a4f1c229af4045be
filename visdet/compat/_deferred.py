"""Functions of compiled modules that visdet does not provide: they can be imported, and raise an error when called."""

from collections.abc import Callable

__all__ = ["deferred"]


def deferred(module: str) -> Callable[[str], Callable]:
    """Return the ``__getattr__`` of a module, which gives a function for any name.

    Repositories look up all functions of an extension at its import, and then call few of them.

    Args:
        module: the name of the compiled module, for the NotImplementedError that each function raises.
    """

    def look_up(name: str) -> Callable:
        if name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")

        def not_provided(*_: object, **__: object) -> None:
            raise NotImplementedError(
                f"{module}.{name}: visdet does not provide this compiled function. It needs the original {module}, "
                f"which has to be compiled from the sources of {module.partition('.')[0]} for the installed torch"
            )

        not_provided.__name__ = name
        return not_provided

    return look_up
