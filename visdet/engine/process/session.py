"""The session of a command-line tool, which reports errors and signals and leaves in order."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from visdet.errors import hints_of

from ..errors import explain
from .interrupts import Interrupted, signals_interrupt
from .process_group import leave_process_group

SHOW_TRACEBACK = "VISDET_TRACEBACK"


@contextmanager
def tool_session() -> Iterator[None]:
    """Report the errors of the block, which is the body of a command-line tool.

    A :class:`UserError`, and a file or a disk that refuses, end the tool with one message on stderr and exit status 1.
    Ctrl-C, SIGTERM and SIGHUP end it with a message and exit status 128 plus the number of the signal. Any other error
    keeps its traceback, and ``VISDET_TRACEBACK=1`` in the environment shows the traceback of a :class:`UserError`, too.

    The processes of a distributed run wait for each other at the end of the body and then leave their group. After
    an error, torchrun ends them.
    """
    with signals_interrupt() as received:
        try:
            yield
            leave_process_group()
        except (KeyboardInterrupt, Exception) as error:
            # An error after a signal is a consequence of the signal, which data workers and other processes get, too.
            variable = os.environ.get
            hints = hints_of(error)
            terminal = sys.stderr
            rank = variable("RANK")
            if received or isinstance(error, KeyboardInterrupt):
                number = received[0] if received else getattr(error, "number", signal.SIGINT)
                if rank in (None, "0"):  # The main process alone says it.
                    print("; ".join([str(Interrupted(number)), *hints]), file=terminal, flush=True)
                sys.exit(128 + number)
            message = explain(error)
            if message is None or variable(SHOW_TRACEBACK):
                if sys.version_info < (3, 11):  # Later versions print the hints below the traceback.
                    print("\n".join(hints), file=terminal)
                raise
            print(f"error{f' (rank {rank})' if rank else ''}: {message}", file=terminal, flush=True)
            sys.exit(1)
