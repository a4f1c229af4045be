"""The config of a run, which formats its text only once."""

import copy

from mmengine.config import Config

__all__ = ["RunConfig"]


class RunConfig(Config):
    """A config that keeps its formatted text until its content changes.

    A run needs the text for the log, for the copy in the work_dir, for every visualizer and for every checkpoint.
    Formatting a small config takes a quarter of a second.
    """

    _formatted = ("", "")  # the content that was formatted last, and its text

    @classmethod
    def copy_of(cls, config: Config) -> "RunConfig":
        """Return a deep copy of ``config``."""
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
