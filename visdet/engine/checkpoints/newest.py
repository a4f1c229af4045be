"""What names the newest checkpoint in the folder of a run, and the best one."""

import os
from contextlib import suppress
from pathlib import Path

from mmengine.logging import MessageHub

from visdet.files.writing import write_atomically

from .checkpoint import BEST, LAST, LAST_CHECKPOINT


def newest_named(work_dir: str | Path) -> str:
    """Return the path in the file ``last_checkpoint`` of a folder, or "" if there is no such file."""
    pointer = Path(work_dir, LAST_CHECKPOINT)
    return pointer.read_text(errors="replace").strip() if pointer.is_file() else ""


def name_newest(work_dir: str, message_hub: MessageHub) -> None:
    """Let the file ``last_checkpoint`` and the link ``last.pth`` name the newest checkpoint of a run.

    The link ``best.pth`` names the best one, or the newest if there is none yet. A file of the user by the name of a
    link stays.

    Args:
        work_dir: the folder of the run.
        message_hub: of the run. It has the path of the newest checkpoint, and that of the best one, whose name alone
            counts, because the folder may have been moved or copied since.
    """
    folder = Path(work_dir)
    last = message_hub.get_info("last_ckpt") or ""
    if last:
        write_atomically(folder / LAST_CHECKPOINT, last)
    newest = Path(last)
    facts = message_hub.runtime_info.items()
    known = [Path(path) for name, path in facts if name.startswith("best_ckpt") and path]
    here = (newest.with_name(path.name) if last else path for path in known)
    best = next(filter(Path.is_file, here), newest)
    for name, path in ((LAST, newest), (BEST, best)):
        link = folder / name
        partial = folder / f"{name}.partial"
        is_of_user = link.exists() and not link.is_symlink()
        if path.is_file() and not is_of_user:
            with suppress(OSError):  # Some file systems have no links.
                partial.unlink(missing_ok=True)  # A run that was killed may have left it.
                partial.symlink_to(os.path.relpath(path, work_dir))
                partial.replace(link)
