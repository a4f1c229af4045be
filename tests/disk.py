"""The disk as tests look at it, and one that is full."""

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path


def names_in(folder: str | Path, pattern: str = "*") -> list[str]:
    """Return the names of the files and folders in a folder, in order, hidden ones included."""
    return sorted(path.name for path in Path(folder).glob(pattern))


@contextlib.contextmanager
def full_disk(limit: int = 4000) -> Iterator[None]:
    """Let files have ``limit`` bytes at most within the block, as if the disk were full then."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
