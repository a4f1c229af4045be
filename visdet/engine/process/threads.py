"""The threads on which torch computes in a training step."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread_beside_a_gpu(device: torch.device) -> Iterator[None]:
    """Let torch use one thread of the CPU within the block if a GPU trains, unless OMP_NUM_THREADS says how many.

    The host only pads and copies small tensors then. Where data workers use the other cores, it would wait for its
    threads longer than that work takes.
    """
    threads = torch.get_num_threads()
    if device.type == "cuda" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
