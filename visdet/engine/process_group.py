"""The process group of a distributed run, for code that must not import torch."""

import sys
from types import ModuleType

__all__ = ["joined_process_group"]


def joined_process_group() -> ModuleType | None:
    """Return ``torch.distributed`` if this process has joined a group, and None otherwise.

    A process that has not imported torch has joined none. It is not imported for the answer.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed
