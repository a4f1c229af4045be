"""The module ``numba.errors`` of older versions, which is ``numba.core.errors`` today."""

from numba.core import errors  # type: ignore[import-not-found]

__all__ = [name for name in vars(errors) if not name.startswith("_")]
globals().update((name, getattr(errors, name)) for name in __all__)
