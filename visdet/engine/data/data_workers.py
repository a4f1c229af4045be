"""Failures of data workers, which end a run with their cause."""

import copy
import multiprocessing
import multiprocessing.queues
import os
import re
import signal
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import sleep
from typing import Any

from torch._C import _error_if_any_worker_fails
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader

from visdet.errors import InvalidInputError, UserError, listed
from visdet.structures.planned_batch import say_size

from ..errors import first_line

PATIENCE = 1800  # seconds that a loader waits for a batch, unless its config has a timeout
_OUT_OF_MEMORY = re.compile(
    ".*(is killed by signal|exited unexpectedly|No space left on device|(insufficient|out of) shared memory|"
    "(can't|Cannot) allocate memory).*"
)
# The workers of this process, and the timeouts of their loaders.
_WORKERS: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()
_SILENCE = re.compile(r"DataLoader timed out after (\S+) seconds")
_NO_HANDLES = re.compile(".*(Too many open files|received 0 items of ancdata).*")


class WorkerError(UserError):
    """A data worker that has died, or that cannot pass its batches on."""


class _Results(multiprocessing.queues.Queue):
    """A queue that passes on the error of a batch that cannot be sent.

    Without it, the worker prints a traceback, and the loader waits for that batch for ever.
    """

    def _on_queue_feeder_error(self, error: Exception, item: Any) -> None:  # multiprocessing's hook for this
        cause = (RuntimeError, error, error.__traceback__)
        self.put((item[0], ExceptionWrapper(cause, where="in DataLoader worker process, sending a batch")))


def report_lost_batches(loader: DataLoader) -> None:
    """Make a loader raise the error of a batch that a worker has read but cannot send, and note its workers."""
    if loader.num_workers == 0:
        return
    context: Any = copy.copy(loader.multiprocessing_context or multiprocessing.get_context())
    make = context.Process

    def noted(*arguments: Any, **options: Any) -> Any:
        worker = make(*arguments, **options)
        _WORKERS[worker] = loader.timeout
        return worker

    context.Queue = partial(_Results, ctx=context)
    context.Process = noted
    loader.multiprocessing_context = context


def explain_collation(loader: DataLoader) -> None:
    """Make a loader say in one message that its samples cannot be joined, and give planned batches their size."""
    loader.collate_fn = partial(_collated, loader.collate_fn)


def _collated(collate: Callable[[Any], Any], samples: Any) -> Any:
    try:
        batch = collate(samples)
        say_size(batch)
        return batch
    except RuntimeError as error:
        if "equal size" not in str(error):
            raise
        first = samples[0]
        found = ", ".join(map(str, first)) if isinstance(first, dict) else type(first).__name__
        raise InvalidInputError(
            f"samples of different sizes cannot be joined to a batch. Their parts are {found:.200}; a pipeline must "
            "end with a transform such as PackDetInputs, which gives inputs and data_samples to pseudo_collate"
        ) from error


@contextmanager
def worker_failures_explained() -> Iterator[None]:
    """Raise a WorkerError that names the cause if a data worker is killed in the block, has no memory or no file
    handles, or gives no batch within the timeout of its loader.

    torch's timeout does not hold while the main process fetches a tensor from a worker. A worker that a signal has
    stopped is therefore watched by a thread, and ended.
    """
    is_over = threading.Event()
    ended: list[int] = []
    threading.Thread(target=_watch, args=(is_over, ended), daemon=True).start()
    try:
        try:
            yield
        except (ConnectionError, EOFError):  # The other end may have been a worker that died.
            _error_if_any_worker_fails()
            sleep(1)  # The signal of a worker's death, if it is still to come, raises an error here.
            raise
    except (RuntimeError, OSError, EOFError, MemoryError) as error:
        _end_stopped_workers(Counter(), ended, at_once=True)
        if explained := _explained(error, ended):
            raise WorkerError(explained) from error
        raise
    finally:
        is_over.set()
        _end_stopped_workers(Counter(), ended, at_once=True)


def _watch(is_over: threading.Event, ended: list[int]) -> None:
    """End stopped workers until the event, and add their ids to ``ended``."""
    looks: Counter[int] = Counter()
    while not is_over.wait(1):
        _end_stopped_workers(looks, ended)


def _end_stopped_workers(looks: Counter[int], ended: list[int], at_once: bool = False) -> None:
    """End the workers that are stopped for the timeout of their loader. Python would wait for their end for ever.

    Args:
        looks: how often each process has been found to be stopped, once a second.
        ended: the ids of those that are ended, which are added.
        at_once: whether to end every one that is stopped.
    """
    for worker, patience in list(_WORKERS.items()):
        process = worker.pid
        if not _is_stopped(process):
            looks.pop(process, None)
            continue
        looks[process] += 1
        if at_once or 0 < patience <= looks[process]:
            os.kill(process, signal.SIGKILL)
            ended.append(process)


def _is_stopped(process: int | None) -> bool:
    try:  # Only Linux has this file, and only while the process is there.
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].startswith("T")
    except OSError:
        return False


def _explained(error: Exception, ended: list[int]) -> str | None:
    """Return the message on an error that a worker has caused by its death, its silence or a limit of the system."""
    text = f"{error.__cause__} {error}"
    if ended:
        return (
            f"the data workers {listed(ended)} have been stopped by a signal (SIGSTOP) for the timeout of their "
            "loader, and have been ended. Whoever has stopped them may have wanted the whole run to wait"
        )
    if silence := _SILENCE.search(text):
        return (
            f"no data worker has given a batch for {silence[1]} seconds, which is the timeout of the loader. Workers "
            "may wait for a disk, a network or another process. Set a longer timeout in the config of the loader, or "
            "timeout=0 to wait without end"
        )
    if limit := _NO_HANDLES.search(text):
        return (
            f"data workers have too few file handles: {limit[0][:200]}. Raise the limit by `ulimit -n "
            "65536`, or lower num_workers or prefetch_factor"
        )
    lack = _OUT_OF_MEMORY.search(text)
    if "DataLoader worker" in text and (lack or isinstance(error, MemoryError)):
        said = lack[0] if lack else first_line(text)
        return (
            f"a data worker has died, as it does if its memory or /dev/shm is full: {said[:200]}. "
            "Lower num_workers, prefetch_factor or batch_size, or give the machine or the container more memory "
            "(`docker run --shm-size=8g`)"
        )
    return None
