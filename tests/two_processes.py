"""Functions that run in two processes with gloo."""

import torch
import torch.distributed as dist
from torch.distributed.nn import functional  # noqa: F401 - see start_process_group
from torch.nn.utils import parameters_to_vector

from visdet.engine.process.process_group import leave_process_group


def _run(rank, function, shares, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.save(function(shares[rank]), f"{store}.{rank}")
    leave_process_group()


def in_two_processes(function, shares, store, method="forkserver"):
    """Return what ``function`` returns for each of two shares, each in a process of its own."""
    torch.multiprocessing.start_processes(_run, (function, shares, store), 2, start_method=method)
    return [torch.load(f"{store}.{rank}") for rank in range(2)]


def assert_same_gradients(gradients):
    """Compare the gradients of this process with those of the first."""
    gradient = parameters_to_vector(gradients)
    other = gradient.clone()
    dist.broadcast(other, src=0)
    assert torch.equal(gradient, other) and gradient.any()


def values(losses):
    """Return the losses of a process as numbers, which ``in_two_processes`` can hand on."""
    return {name: loss.item() for name, loss in losses.items()}
