"""The facts about the machine and the packages that a run writes to its log."""

import platform
import sys
from collections import Counter

import torch

from visdet.checks.installed import installed_version

_PACKAGES = (
    "torch",
    "torchvision",
    "mmengine",
    "onedl-mmengine",
    "visdet-ops",
    "numpy",
    "opencv-python",
    "pillow",
)


def environment() -> dict[str, str]:
    """Return the versions of the packages and the names of the GPUs, each under a title for the log.

    mmengine's function for this purpose imports torchvision and runs compilers, which takes a second.
    """
    facts = {"platform": platform.platform(), "Python": sys.version.replace("\n", "")}
    for package in _PACKAGES:
        version = installed_version(package)
        if version is not None:
            facts[package] = version
    gpus = torch.cuda
    names = Counter(map(gpus.get_device_name, range(gpus.device_count() if gpus.is_available() else 0)))
    facts["GPU"] = ", ".join(f"{count} x {name}" for name, count in names.items()) or "none"
    facts["build of torch"] = torch.__config__.show().replace("\n", "\n    ").strip()
    return facts
