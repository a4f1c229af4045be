"""Reading numpy's files of arrays."""

import zlib
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from visdet.errors import InvalidInputError, MissingFileError

# What numpy raises for damaged files.
DAMAGED = (ValueError, EOFError, RuntimeError, BadZipFile, zlib.error)


def load_arrays(path: str | Path) -> np.ndarray | dict[str, np.ndarray]:
    """Return the array of a .npy file, or the arrays of a .npz file by their names.

    Raises:
        MissingFileError: there is no such file.
        InvalidInputError: it is damaged, is no such file, or holds objects.
    """
    if not Path(path).is_file():
        raise MissingFileError(f"array file {path} does not exist")
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return loaded
        with loaded:
            return {name: loaded[name] for name in loaded.files}
    except DAMAGED as error:
        raise InvalidInputError(
            f"array file {path} cannot be read: it is damaged, no .npy or .npz file, or holds objects"
        ) from error


def load_array(path: str | Path) -> np.ndarray:
    """Return the array of a .npy file. The errors are those of ``load_arrays``, also for a .npz file."""
    loaded = load_arrays(path)
    if isinstance(loaded, dict):
        raise InvalidInputError(f"array file {path} must be a .npy file, got one with the arrays {[*loaded]}")
    return loaded
