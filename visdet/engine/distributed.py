"""The process group of a run under torchrun, on GPUs by NCCL and without them by gloo."""

import datetime
import os

import torch

from .errors import UserError

__all__ = ["checked_launcher", "start_process_group"]


def checked_launcher(launcher: str | None) -> str:
    """Return ``launcher``, or where it is None 'pytorch' under torchrun and 'none' otherwise.

    Raises:
        UserError: 'pytorch' without torchrun, or more processes than GPUs on a machine with GPUs.
    """
    if launcher is None:
        launcher = "pytorch" if "TORCHELASTIC_RUN_ID" in os.environ else "none"
    if launcher == "none":
        return launcher
    if "RANK" not in os.environ:
        raise UserError(
            "--launcher pytorch needs torchrun: torchrun --nproc-per-node 2 tools/train.py CONFIG --launcher pytorch"
        )
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else None
    if gpus is not None and int(os.environ["LOCAL_RANK"]) >= gpus:
        raise UserError(
            f"process {os.environ['LOCAL_RANK']} of this machine has no GPU: start at most {gpus} with --nproc-per-node"
        )
    return launcher


def start_process_group(launcher: str, timeout: float | None = None) -> None:
    """Join the gloo group of a launcher 'pytorch' on a machine without GPUs; leave other cases to mmengine.

    Args:
        timeout: seconds after which a collective that waits for another process fails; default: torch's.
    """
    if launcher != "pytorch" or torch.cuda.is_available() or torch.distributed.is_initialized():
        return
    limit = None if timeout is None else datetime.timedelta(seconds=timeout)
    torch.distributed.init_process_group("gloo", timeout=limit)
