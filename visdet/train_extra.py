"""The packages of the extra ``train``, which everything except the operators needs in addition to torch."""

import functools
import importlib.util

from visdet.errors import MissingPackageError

# The import names of the packages that visdet.models, visdet.datasets and so on import.
_PACKAGES = ("mmengine", "numpy", "torchvision", "scipy", "cv2", "PIL", "matplotlib", "rich")


@functools.cache
def _missing_packages() -> tuple[str, ...]:
    return tuple(name for name in _PACKAGES if importlib.util.find_spec(name) is None)


def require_train_extra(needed_by: str) -> None:
    """Check that the packages of the extra ``train`` are installed.

    Args:
        needed_by: the module or program that needs them, for the message.

    Raises:
        MissingPackageError: a package is missing. The message says what to install.
    """
    if missing := _missing_packages():
        raise MissingPackageError(
            f"{needed_by} needs {', '.join(missing)}, not installed here. visdet.ops and visdet.compat need torch "
            "alone; for models, data sets and training install the extra `train`: pip install 'visdet-ops[train]', "
            "or make setup in a clone"
        )
