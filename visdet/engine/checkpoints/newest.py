"""What names the newest checkpoint in the folder of a run, and the best one."""

import os
from contextlib import suppress

from mmengine.logging import MessageHub

from visdet.files.writing import write_atomically

from .checkpoint import BEST, LAST, LAST_CHECKPOINT


def name_newest(work_dir: str, message_hub: MessageHub) -> None:
    """Let the file ``last_checkpoint`` and the link ``last.pth`` name the newest checkpoint of a run.

    The link ``best.pth`` names the best one, or the newest if there is none yet. A file of the user by the name of a
    link stays.

    Args:
        work_dir: the folder of the run.
        message_hub: of the run. It has the path of the newest checkpoint, and that of the best one, whose name alone
            counts, because the folder may have been moved or copied since.
    """
    last = message_hub.get_info("last_ckpt") or ""
    if last:
        write_atomically(os.path.join(work_dir, LAST_CHECKPOINT), last.encode())
    known = [path for name, path in message_hub.runtime_info.items() if name.startswith("best_ckpt") and path]
    here = [os.path.join(os.path.dirname(last or path), os.path.basename(path)) for path in known]
    best = next(filter(os.path.isfile, here), last)
    for name, path in ((LAST, last), (BEST, best)):
        link = os.path.join(work_dir, name)
        is_of_user = os.path.exists(link) and not os.path.islink(link)
        if os.path.isfile(path) and not is_of_user:
            with suppress(OSError):  # Some file systems have no links.
                os.symlink(os.path.relpath(path, work_dir), f"{link}.partial")
                os.replace(f"{link}.partial", link)
