"""The process group of a distributed run, for code that must not import torch."""

import gc
import sys
from types import ModuleType


def joined_process_group() -> ModuleType | None:
    """Return ``torch.distributed`` if this process has joined a group, and None otherwise.

    A process that has not imported torch has joined none. It is not imported for the answer.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed


def leave_process_group() -> None:
    """Wait until all processes of the group come here, and end the group with its threads. Without a group, return.

    The group's destructor waits for its threads. It must run before the interpreter ends, because a thread that frees
    a Python object later than that aborts the process. ``destroy_process_group`` does not call it while anything still
    refers to the group, such as a model in DistributedDataParallel that is part of a reference cycle.
    """
    distributed = joined_process_group()
    if distributed is None:
        return
    distributed.barrier()
    gc.collect()  # frees models and their CUDA graphs before the communication that they use
    group = distributed.group.WORLD
    distributed.destroy_process_group()
    # The destructor runs here, where the interpreter's lock is released while it waits. Elsewhere it might not be.
    del group
