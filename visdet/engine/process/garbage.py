"""Python's garbage collector during training."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def living_objects_not_collected() -> Iterator[None]:
    """Let Python's garbage collector leave out, within the block, all objects that exist when it begins.

    To search all objects that packages and a model have made would take up to a tenth of the training. Where a program
    has frozen its objects itself, nothing is done, because ``gc.unfreeze`` would undo that too.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
