"""The device, the versions and the commit of a measurement."""

import datetime
import os
import platform
import subprocess
from pathlib import Path

import torch

from visdet.ops import build_info

ROOT = Path(__file__).resolve().parents[1]


def describe(device: torch.device) -> dict[str, str]:
    """Return {label: value} of everything that a measurement depends on."""
    facts = {"device": _device_name(device), "processor": processor_name()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["multiprocessors"] = str(properties.multi_processor_count)
        facts["memory"] = f"{properties.total_memory / 2**30:.0f} GiB"
        drivers = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        facts["driver"] = drivers.partition("\n")[0] or "unknown"
    else:
        facts["threads"] = f"{torch.get_num_threads()} of {os.cpu_count()} cores"
        facts["load before"] = f"{os.getloadavg()[0]:.2f}"  # the load by other processes
        facts["instruction set"] = build_info()["cpu"]["isa"] or "not built"
    return {
        **facts,
        "torch": torch.__version__,
        "CUDA of torch": torch.version.cuda or "none",
        "python": platform.python_version(),
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return processor_name()


def processor_name() -> str:
    """Return the name of the host's processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _commit() -> str:
    commit = _output("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD")
    if not commit:
        return "unknown"
    changed = _output("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no")
    return f"{commit} with changes" if changed else commit


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
