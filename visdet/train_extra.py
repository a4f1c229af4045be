"""The packages of the extra ``train``: the operators need torch alone, everything else needs these too."""

import functools
import importlib.util

from visdet.errors import MissingPackageError

__all__ = ["require_train_extra"]

# Those that are imported with visdet.models, visdet.datasets and so on, by their import names.
_PACKAGES = ("mmengine", "numpy", "torchvision", "scipy", "cv2", "PIL", "matplotlib", "rich")


@functools.cache
def _missing_packages() -> tuple[str, ...]:
    return tuple(name for name in _PACKAGES if importlib.util.find_spec(name) is None)


def require_train_extra(needed_by: str) -> None:
    """Raise a :class:`MissingPackageError` that says what to install where a package of the extra is missing.

    Args:
        needed_by: the module or program that needs them, for the message.
    """
    if missing := _missing_packages():
        raise MissingPackageError(
            f"{needed_by} needs {', '.join(missing)}, not installed here. visdet.ops and visdet.compat need torch "
            "alone; for models, data sets and training install the extra `train`: pip install 'visdet-ops[train]', "
            "or make setup in a clone"
        )
