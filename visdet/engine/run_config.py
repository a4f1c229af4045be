"""The config of a run, whose text is formatted once."""

import copy

from mmengine.config import Config

__all__ = ["RunConfig"]


class RunConfig(Config):
    """A config that remembers its text until it changes.

    A run asks for it at the start for the log, for the copy in the work_dir and for every visualizer, and with every
    checkpoint; formatting takes a quarter of a second for a small config.
    """

    _formatted = ("", "")  # what the config held, and its text

    @classmethod
    def copy_of(cls, config: Config) -> "RunConfig":
        """Return a copy of ``config``, which is left as it is."""
        result = cls()
        result.__setstate__(copy.deepcopy(config).__getstate__())
        return result

    @property
    def pretty_text(self) -> str:
        """The config as Python code."""
        content = repr(self)
        if self._formatted[0] != content:
            object.__setattr__(self, "_formatted", (content, super().pretty_text))
        return self._formatted[1]
