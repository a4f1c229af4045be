"""Reading of the checkpoints of other projects by ``torch.load``, without running any code from the file."""

import threading
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Any

import torch

from visdet.restricted_pickle import NUMPY_GLOBALS, Unfinished, finished


def load_restricted(file: Any, load: Callable[..., Any] = torch.load, **options: Any) -> Any:
    """Return the content of a checkpoint of tensors, plain types and what checkpoints often hold besides.

    These are numpy's arrays and scalars, mmengine's history buffers, ``argparse.Namespace`` and paths. Dicts with a
    default are read as plain dicts.

    Args:
        file: the path or the file.
        load: the function that reads it.
        options: further options of ``torch.load``, but not ``weights_only``.

    Raises:
        pickle.UnpicklingError: the file holds another type.
    """
    with _safe_globals():
        return finished(load(file, weights_only=True, **options))


class _History(Unfinished):
    def __setstate__(self, state: dict) -> None:
        self.state = state

    def finish(self) -> Any:
        from mmengine.logging import HistoryBuffer

        values, counts = (finished(self.state[name]) for name in ("_log_history", "_count_history"))
        return HistoryBuffer(values, counts)


_SAFE_GLOBALS: dict[str, Any] = {
    **NUMPY_GLOBALS,
    "argparse.Namespace": Namespace,
    "mmengine.logging.history_buffer.HistoryBuffer": _History,
    "builtins.getattr": lambda *_names: None,  # A history buffer names its methods by it.
    "collections.defaultdict": lambda *_factory: {},
    "pathlib.PosixPath": lambda *parts: PurePosixPath(*parts),
    "pathlib._local.PosixPath": lambda *parts: PurePosixPath(*parts),
}
_loading = threading.Lock()


@contextmanager
def _safe_globals() -> Iterator[None]:
    """Let ``torch.load`` read our names, and no others of the same name that the process has registered."""
    with _loading:
        registered = set(torch.serialization.get_safe_globals())
        hidden = {known for known in registered if _name(known) in _SAFE_GLOBALS}
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals([*(registered - hidden)])
        try:
            with torch.serialization.safe_globals([(value, name) for name, value in _SAFE_GLOBALS.items()]):
                yield
        finally:
            torch.serialization.add_safe_globals([*hidden])


def _name(known: Any) -> str:
    return known[1] if isinstance(known, tuple) else f"{known.__module__}.{known.__qualname__}"
