"""The facts about the machine and the packages that a run writes to its log."""

import platform
import sys

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
    facts["GPU"] = "none"
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        facts["GPU"] = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    facts["build of torch"] = torch.__config__.show().replace("\n", "\n    ").strip()
    return facts
