"""Where a config is: a file of the user, or one of the configs that the package brings along."""

import os
from itertools import chain, islice
from pathlib import Path

from mmengine.config.utils import MODULE2PACKAGE

from visdet.errors import ConfigError

from ..errors import nearest_names

__all__ = [
    "CONFIGS",
    "PACKAGE",
    "did_you_mean",
    "existing_config",
    "find_config",
    "named_like",
    "packaged_configs",
]

CONFIGS = Path(__file__).parents[2] / ".mim" / "configs"  # where mmengine looks for the configs of a package
PACKAGE = "visdet::"
MODULE2PACKAGE.setdefault("visdet", "visdet")  # mmengine's own Config finds ``visdet::...``, too.
_MOST_FILES_TO_LOOK_AT = 2000


def packaged_configs() -> list[str]:
    """Return the names of the package's configs, without those that are only bases."""
    names = (path.relative_to(CONFIGS).with_suffix("").as_posix() for path in CONFIGS.glob("*/*.py"))
    return sorted(name for name in names if not name.startswith("_"))


def find_config(name: str) -> str | None:
    """Return the path of a config, or None if there is none.

    Args:
        name: a path, or the name of one of the package's configs, such as ``deformable_detr/deformable-detr_shapes``.
            Both may lack the suffix, and ``visdet::`` may stand before a name.
    """
    inside = name.removeprefix(PACKAGE)
    given = os.path.expanduser(name)
    paths = [] if inside != name else [Path(given), Path(f"{given}.py")]
    paths += [CONFIGS / inside, CONFIGS / f"{inside}.py"]
    return next((str(path) for path in paths if os.path.isfile(path)), None)


def existing_config(name: str) -> str:
    """Return the path of a config; see :func:`find_config`.

    Raises:
        ConfigError: there is none. The message has similar names.
    """
    found = find_config(name)
    if found is not None:
        return found
    if os.path.isdir(name):
        raise ConfigError(f"config {name} is a folder; give one of its files")
    near = [] if name.startswith(PACKAGE) else named_like(name, Path(name).parent)
    wanted = name.removeprefix(PACKAGE).removesuffix(".py")
    known = {short: full for full in packaged_configs() for short in (full.rpartition("/")[2], full)}
    for part in (wanted, wanted.rpartition("/")[2]):
        near = near or [known[like] for like in nearest_names(part, known)]
    hint = did_you_mean(list(dict.fromkeys(near))) or "; `visdet configs` lists those of the package"
    raise ConfigError(f"config {name} does not exist{hint}")


def named_like(path: str | Path, folder: Path) -> list[str]:
    """Return the configs in ``folder`` and in its folders whose names are like that of ``path``."""
    found = chain(folder.glob("*.py"), folder.glob("*/*.py"))
    files = {str(file): file.name for file in islice(found, _MOST_FILES_TO_LOOK_AT)}
    near = nearest_names(Path(path).name, files.values(), cutoff=0.7)
    return [file for name in near for file, its_name in files.items() if its_name == name][:3]


def did_you_mean(candidates: list[str]) -> str:
    return f"; did you mean {' or '.join(candidates)}?" if candidates else ""
