"""What a user can do after a training run that ended early."""

import os
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from visdet.errors import UserError, add_hint

from .data.data_workers import WorkerError
from .process.places import short_path

_WITHOUT_ORDER = re.compile(r"(\w+) does not have a deterministic implementation")
_UNREADABLE = re.compile(r"LoadImageFromFile: (cannot read image|image .* (does not exist|cannot be read))")


@contextmanager
def advice_for_training(runner: Any) -> Iterator[None]:
    """Add to an interrupt, a failure of a data worker, or an image that cannot be read, how training can go on.

    Raises:
        UserError: a deterministic run has called an operator of torch that has no deterministic form.
    """
    try:
        yield
    except (KeyboardInterrupt, UserError) as error:
        # The checkpoint that the run has written last, or else the one that it was resumed from.
        written = (runner.message_hub.get_info("last_ckpt"), runner.resumed_from)
        newest = next((path for path in written if path and os.path.isfile(path)), None)
        resume = f"--resume {shlex.quote(short_path(newest))}" if newest else ""
        if _UNREADABLE.search(str(error)):
            add_hint(
                error,
                f"to train without images that cannot be read, give LoadImageFromFile ignore_empty=True. {resume}",
            )
        elif isinstance(error, KeyboardInterrupt | WorkerError):
            add_hint(
                error, f"`{resume}` continues the run" if resume else "no checkpoint has been written yet"
            )
        raise
    except RuntimeError as error:
        if found := _WITHOUT_ORDER.match(str(error)):
            raise UserError(
                f"the run is deterministic, but {found[1]} has no deterministic form on this device. Replace what "
                "calls it, which the log names, or train without --deterministic (randomness.deterministic)"
            ) from error
        raise
