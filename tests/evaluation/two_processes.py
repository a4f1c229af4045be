"""Functions that run in two processes with gloo."""

import multiprocessing

import torch.distributed as dist


def _run(function, rank, share, store, answers):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    answers.put((rank, function(share)))
    dist.barrier()
    dist.destroy_process_group()


def in_two_processes(function, shares, store):
    """Return what ``function`` returns for each of two shares, each in a process of its own."""
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    processes = [
        context.Process(target=_run, args=(function, rank, share, store, answers))
        for rank, share in enumerate(shares)
    ]
    for process in processes:
        process.start()
    received = dict(answers.get(timeout=90) for _ in processes)
    for process in processes:
        process.join()
    return [received[rank] for rank in range(2)]
