"""The process group of a run under torchrun. It uses NCCL on GPUs and gloo on machines without GPUs."""

import datetime
import os

import torch

from visdet.errors import check_choice

from ..errors import UserError


def checked_launcher(launcher: str | None) -> str:
    """Return ``launcher``. If it is None, return 'pytorch' under torchrun and 'none' otherwise.

    Raises:
        UserError: the launcher is 'pytorch' but torchrun did not start the process, or a machine with GPUs runs more
            processes than it has GPUs.
    """
    variables = os.environ
    if launcher is None:
        launcher = "pytorch" if "TORCHELASTIC_RUN_ID" in variables else "none"
    check_choice("launcher", launcher, ("none", "pytorch"))
    if launcher == "none":
        return launcher
    if "RANK" not in variables:
        raise UserError(
            "--launcher pytorch needs torchrun: torchrun --nproc-per-node 2 -m visdet train CONFIG --launcher pytorch"
        )
    if torch.cuda.is_available():
        gpus = torch.cuda.device_count()
        process = variables["LOCAL_RANK"]
        if int(process) >= gpus:
            raise UserError(
                f"process {process} of this machine has no GPU, because the machine has only {gpus}. Use "
                f"--nproc-per-node {gpus} or less"
            )
    return launcher


def start_process_group(launcher: str, timeout: float | None = None) -> None:
    """Join a gloo process group if the launcher is 'pytorch' and there are no GPUs. mmengine joins one of NCCL on GPUs.

    Args:
        launcher: 'pytorch', 'none' or another launcher of mmengine.
        timeout: the seconds that a collective waits for another process before it fails. The default is torch's.
    """
    if launcher != "pytorch" or torch.distributed.is_initialized():
        return
    # Functions of this module have the group that exists at its import as default arguments. DistributedDataParallel
    # imports it, and then the group would live until the interpreter ends (see leave_process_group).
    from torch.distributed.nn import functional  # noqa: F401

    if torch.cuda.is_available():
        return
    limit = None if timeout is None else datetime.timedelta(seconds=timeout)
    torch.distributed.init_process_group("gloo", timeout=limit)
