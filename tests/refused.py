"""Calls that must be refused."""

from collections.abc import Callable

import pytest


def assert_refused(error: type[Exception], *rows: tuple[Callable[[], object], str]) -> None:
    """Check that each call of the rows, of a call and a message, ends with the kind of error and the message."""
    for call, message in rows:
        with pytest.raises(error, match=message):
            call()
