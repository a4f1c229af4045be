"""The config of a run, whose text is formatted fast."""

from copy import deepcopy

from mmengine.config import Config

from .text import config_text


class RunConfig(Config):
    """A config whose text ``config_text`` makes.

    A run needs the text for the log, for the copy in the work_dir, for every visualizer and for every checkpoint.
    """

    @classmethod
    def copy_of(cls, config: Config) -> "RunConfig":
        """Return a deep copy of ``config``."""
        result = cls()
        result.__setstate__(deepcopy(config).__getstate__())
        return result

    @property
    def pretty_text(self) -> str:
        """The config as Python code."""
        return config_text(self.to_dict())
