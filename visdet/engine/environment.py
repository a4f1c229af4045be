"""What the log of a run says about the machine and the packages."""

import platform
import sys
from importlib.metadata import PackageNotFoundError, version

import torch

__all__ = ["environment"]

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
    """Return the versions and the devices of this process by name.

    mmengine's function of this purpose imports torchvision and calls compilers, which takes a second.
    """
    facts = {"platform": platform.platform(), "Python": sys.version.replace("\n", "")}
    for package in _PACKAGES:
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            continue
    facts["GPU"] = "none"
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        facts["GPU"] = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    facts["build of torch"] = torch.__config__.show().replace("\n", "\n    ").strip()
    return facts
