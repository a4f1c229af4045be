"""Reading numpy's files of arrays."""

import zlib
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from visdet.errors import InvalidInputError, reading

# What numpy raises for damaged files.
DAMAGED = (ValueError, EOFError, RuntimeError, BadZipFile, zlib.error)


def load_array(path: str | Path) -> np.ndarray:
    """Return the array of a .npy file.

    Raises:
        MissingFileError: there is no such file.
        InvalidInputError: it is damaged, is no .npy file, or holds objects.
    """
    with reading(f"array file {path}"):
        try:
            loaded = np.load(path, allow_pickle=False)
        except DAMAGED as error:
            raise InvalidInputError(
                f"array file {path} cannot be read: it is damaged, no .npy file, or holds objects"
            ) from error
    if isinstance(loaded, np.ndarray):
        return loaded
    with loaded:
        raise InvalidInputError(
            f"array file {path} must be a .npy file, got one with the arrays {loaded.files}"
        )
