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

_UNREADABLE = re.compile(r"LoadImageFromFile: (cannot read image|image .* (does not exist|cannot be read))")


@contextmanager
def advice_for_training(runner: Any) -> Iterator[None]:
    """Add to an interrupt, a failure of a data worker, or an image that cannot be read, how training can go on."""
    try:
        yield
    except (KeyboardInterrupt, UserError) as error:
        checkpoint = _newest_checkpoint(runner)
        resume = f"--resume {shlex.quote(checkpoint)}" if checkpoint else ""
        if _UNREADABLE.search(str(error)):
            keys = list(_image_readers(runner.cfg.get("train_dataloader"), "train_dataloader"))
            options = " ".join(f"{key}.ignore_empty=True" for key in keys)
            if keys:
                add_hint(
                    error,
                    f"to train without images that cannot be read: {resume} --cfg-options {options}".replace(
                        "  ", " "
                    ),
                )
        elif isinstance(error, KeyboardInterrupt | WorkerError):
            add_hint(
                error, f"`{resume}` continues the run" if resume else "no checkpoint has been written yet"
            )
        raise


def _newest_checkpoint(runner: Any) -> str | None:
    """Return the checkpoint that the run has written last, or else the one that it was resumed from."""
    for path in (runner.message_hub.get_info("last_ckpt"), runner.resumed_from):
        if path and os.path.isfile(path):
            return short_path(path)
    return None


def _image_readers(section: Any, key: str) -> Iterator[str]:
    """Yield the keys of the transforms in a section of a config that read image files."""
    if isinstance(section, dict) and str(section.get("type")).endswith("LoadImageFromFile"):
        yield key
    items = (
        section.items()
        if isinstance(section, dict)
        else enumerate(section if isinstance(section, list) else ())
    )
    for name, value in items:
        yield from _image_readers(value, f"{key}.{name}")
