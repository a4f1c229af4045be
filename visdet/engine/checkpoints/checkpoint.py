"""Checkpoint files, which are written as a whole or not at all, and read without running any code from the file."""

import os
import pickle
import re
import sys
from hashlib import sha256
from http.client import HTTPException
from importlib.util import find_spec
from io import BufferedReader, BytesIO, FileIO
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlparse
from urllib.request import Request, urlopen
from zipfile import BadZipFile, ZipFile, is_zipfile

import torch
from mmengine.runner import (
    CheckpointLoader,
    get_deprecated_model_names,
    get_external_models,
    get_mmcls_models,
    get_torchvision_models,
)

from visdet.errors import listed
from visdet.files.writing import write_atomically, written_whole
from visdet.restricted_load import load_restricted, start_of_other_file

from ..errors import (
    CheckpointError,
    DamagedCheckpointError,
    MissingCheckpointError,
    first_line,
    is_out_of_memory,
    nearest_names,
)
from ..process.console import say
from .addresses import SUFFIXES, URL_SCHEMES
from .plain_state import to_plain
from .published import PUBLISHED
from .weights import check_finite, weights_of

LAST_CHECKPOINT = "last_checkpoint"
LAST = "last.pth"
BEST = "best.pth"  # links in the folder of a run
# By torch's convention these are the first digits of the file's SHA-256.
_CHECKSUM_IN_NAME = re.compile(r"-([a-f0-9]{8,})\.")
# The lists of addresses whose names follow a scheme in mmengine's configs.
_LISTS_OF_ADDRESSES = {
    "open-mmlab": get_external_models,
    "openmmlab": get_external_models,
    "mmcls": get_mmcls_models,
    "modelzoo": get_torchvision_models,
    "torchvision": get_torchvision_models,
}
_IF_TRUSTED = (
    "If you trust its origin, read it with `--cfg-options trust_checkpoint=True`, which can run code from the "
    "file."
)
_IF_UNKNOWN = "There is no such type here: the file is damaged, or needs a package that is not installed."
_REFUSED = re.compile(r"GLOBAL (\S+)")  # in an error of torch.load


def write_checkpoint(checkpoint: dict[str, Any], path: str | Path) -> None:
    """Write a checkpoint of tensors and plain types to ``path``.

    After a crash, ``path`` holds either the old file or the complete new one.

    Raises:
        InvalidTypeError: the checkpoint holds a value of another type (see :func:`to_plain`). Nothing is written then.
        UnwrittenFileError: the file cannot be written, for example because the disk is full.
    """
    buffer = BytesIO()
    torch.save(to_plain(checkpoint, "checkpoint"), buffer)
    write_atomically(path, buffer.getbuffer())


def add_thresholds(path: str | Path, thresholds: dict[str, float]) -> None:
    """Write the thresholds of a validation into a checkpoint that was saved before it, as a run does."""
    content = read_checkpoint(path)
    meta = content["meta"]
    if "score_thresholds" in meta:  # Another runner may have written it.
        meta["score_thresholds"] = thresholds
        write_checkpoint(content, path)


def read_checkpoint(path: str | Path, map_location: Any = "cpu", trust: bool = False) -> dict[str, Any]:
    """Return the content of a checkpoint file or URL.

    Tensors and plain types are always read, as are numpy's arrays and scalars, mmengine's history buffers,
    ``argparse.Namespace``, paths, and the types of ``torch.serialization.add_safe_globals``. Any other type is refused,
    because reading it could run code. The content of the file is compared with its checksums.

    Args:
        path: a file; or an http(s) address, a name of :data:`PUBLISHED` or one of mmengine's lists, such as
            ``open-mmlab://detectron2/resnet50_caffe``, whose file is kept in the cache of ``torch.hub``.
        map_location: the device of the tensors, in any form that ``torch.load`` accepts.
        trust: whether to read every type. Code that the file contains is run then.

    Raises:
        MissingCheckpointError: the file does not exist, or cannot be downloaded.
        DamagedCheckpointError: the file is truncated, altered, or not a checkpoint, which is a dict.
        CheckpointError: the file holds a type that is not on the list and ``trust`` is False, or the storage
            reports an error.
    """
    given = str(path)
    check_checkpoint_exists(given)
    address = _address_of(given)
    if address is None:
        return _content_of(given, given, map_location, trust)
    cached, digits = _place_in_cache(address)
    if cached.exists():
        try:
            return _content_of(str(cached), f"{given} in the cache, {cached},", map_location, trust)
        except DamagedCheckpointError as error:
            say(f"{error}; it is downloaded again")
    return _downloaded(address, digits, cached, map_location, trust)


def _content_of(path: str, source: str, map_location: Any, trust: bool) -> dict[str, Any]:
    """Return the content of a file, which messages call ``source``; see :func:`read_checkpoint`."""
    try:
        disk = _DiskFile(path)
    except OSError as error:
        raise _not_now(source, error) from error
    try:
        with BufferedReader(disk) as file:
            content = _read(file, map_location, trust)
    except Exception as error:  # torch.load raises errors of every type for a file that is not a checkpoint.
        if disk.failure is not None:
            raise _not_now(source, disk.failure) from error
        raise _explained(error, os.path.getsize(path), source) from error
    if not isinstance(content, dict):
        raise DamagedCheckpointError(
            f"checkpoint {source} holds a {type(content).__name__}, but a checkpoint is a dict of weights"
        )
    return content


def _explained(error: Exception, size: int, source: str) -> CheckpointError:
    """Return the error to raise after torch's ``error``, for a file of ``size`` bytes."""
    if is_out_of_memory(error):
        return _not_now(source, f"the memory does not suffice for its {size} bytes")
    cause = error.__context__ if isinstance(error, pickle.UnpicklingError) else None
    reason = str(cause or error)
    if refused := _REFUSED.search(reason):
        name = refused[1]
        advice = _IF_TRUSTED if _exists(name) else _IF_UNKNOWN
        return CheckpointError(
            f"checkpoint {source} holds a {name}, which is neither a tensor nor a plain type. {advice}"
        )
    # The number of an OSError would be a riddle: a reader has jumped to a place that the file does not have.
    reason = "the file ends too early" if isinstance(error, OSError) else first_line(reason)[:160]
    return DamagedCheckpointError(
        f"checkpoint {source} ({size} bytes) cannot be read. It is damaged, cut short or not a checkpoint: "
        f"{reason or type(error).__name__}"
    )


def _exists(name: str) -> bool:
    """Return whether there is a type of a dotted name here, as far as that is known without running code of it."""
    package, *rest = name.split(".")
    found: Any = sys.modules.get(package)
    if found is None:
        return bool(package) and find_spec(package) is not None
    for part in rest:
        if not hasattr(found, part):
            return hasattr(found, "__path__") and find_spec(f"{found.__name__}.{part}") is not None
        found = getattr(found, part)
    return True


class _DiskFile(FileIO):
    """A file that keeps an error of the disk, because zipfile would report it as an error in the content."""

    failure: OSError | None = None

    def readinto(self, buffer: Any) -> int | None:
        try:
            return super().readinto(buffer)
        except OSError as error:
            self.failure = error
            raise


def _not_now(source: str, failure: OSError | str) -> CheckpointError:
    """Return the error for a failure of the machine, which says nothing about the content of the file."""
    reason = getattr(failure, "strerror", None) or failure
    return CheckpointError(
        f"checkpoint {source} cannot be read now: {reason}. The file itself may be intact. Try again, or check the "
        "storage that it is on"
    )


def check_checkpoint_exists(path: str | Path, folder_is_fine: bool = False) -> None:
    """Check that ``path`` is a file, or has the form of an address or a name that :func:`read_checkpoint` takes.

    Args:
        path: the path, the address, which is not looked up, or the name.
        folder_is_fine: whether to accept a folder, too.

    Raises:
        MissingCheckpointError: ``path`` is neither. The message names the checkpoints of its folder.
    """
    path = str(path)
    file = Path(path)
    is_folder = file.is_dir()
    is_known = path.startswith(URL_SCHEMES) or path in PUBLISHED
    if is_known or file.is_file() or (folder_is_fine and is_folder):
        return
    folder = file if is_folder else file.parent
    files = sorted(other.name for other in folder.glob("[!.]*") if other.suffix in SUFFIXES)
    wrong = "is a folder; give one of its files" if is_folder else "does not exist"
    near = nearest_names(file.name, [*files, *PUBLISHED])
    there = ("" if is_folder else "its folder has ") + (listed(files, 8) or "none")
    known = f"did you mean {' or '.join(near)}?" if near else there
    raise MissingCheckpointError(f"checkpoint {path} {wrong}: {known}")


def register_checkpoint_readers(trust: bool = False, allow_nonfinite: bool = False) -> None:
    """Make mmengine read local and http(s) checkpoints by :func:`read_checkpoint`, also for ``init_cfg``.

    Args:
        trust: the config's ``trust_checkpoint``; see :func:`read_checkpoint`.
        allow_nonfinite: the config's ``allow_nonfinite_weights``; see ``check_finite`` of ``weights``.
    """

    def load_from_file_or_url(filename: str, map_location: Any = None) -> dict[str, Any]:
        content = read_checkpoint(os.path.expanduser(filename), map_location=map_location, trust=trust)
        weights = weights_of(content, filename)
        check_finite(weights, filename, allow_nonfinite)
        if filename.startswith("mmcls://"):  # These are the weights of classifiers.
            start = "backbone."
            return {key[len(start) :]: value for key, value in weights.items() if key.startswith(start)}
        return content

    CheckpointLoader.register_scheme(("", *URL_SCHEMES), load_from_file_or_url, force=True)


def _read(file: "BufferedReader[Any]", map_location: Any, trust: bool) -> Any:
    is_archive = is_zipfile(file)
    if is_archive:
        _check_archive(file)
    file.seek(0)
    if not is_archive:
        start = file.peek(64)[:64]
        if start[8:9] == b"{":  # after the length of the header
            from safetensors.torch import load

            return load(file.read())
        if start.startswith(b"PK"):
            raise BadZipFile("its end is missing")
        if reason := start_of_other_file(start):
            raise BadZipFile(f"it {reason}")
    if trust:
        return torch.load(file, map_location=map_location, weights_only=False)
    return load_restricted(file, map_location=map_location)


def _check_archive(file: BinaryIO) -> None:
    """Compare the parts of an archive with their checksums, which ``torch.load`` ignores."""
    size = file.seek(0, os.SEEK_END)
    with ZipFile(file) as archive:
        # torch.save does not compress.
        if sum(part.file_size for part in archive.infolist()) > size:
            raise BadZipFile("its parts say that they are larger than the file")
        if damaged := archive.testzip():
            raise BadZipFile(f"the checksum of its part {damaged} is wrong")


def _address_of(path: str) -> str | None:
    """Return the address that a path or a name of :data:`PUBLISHED` stands for, or None for a file."""
    if path in PUBLISHED and not os.path.isfile(path):
        return PUBLISHED[path][1]
    scheme, _, name = path.partition("://")
    if scheme in _LISTS_OF_ADDRESSES:
        addresses = _LISTS_OF_ADDRESSES[scheme]()
        name = get_deprecated_model_names().get(name, name)
        if name not in addresses:
            near = " or ".join(nearest_names(name, addresses)) or f"{len(addresses)} other names"
            raise MissingCheckpointError(f"checkpoint {path} is not in mmengine's list, which has {near}")
        return addresses[name]
    return path if path.startswith(URL_SCHEMES) else None


def _place_in_cache(address: str) -> tuple[Path, str]:
    """Return where the file of an address is kept, and the first digits of its checksum, or "" if it names none."""
    name = Path(urlparse(address).path).name
    folder = Path(torch.hub.get_dir(), "checkpoints")
    if found := _CHECKSUM_IN_NAME.search(name):
        return folder / name, found[1]
    # Another address may end in the same name.
    return folder / f"{sha256(address.encode()).hexdigest()[:8]}-{name}", ""


def _downloaded(address: str, digits: str, cached: Path, map_location: Any, trust: bool) -> dict[str, Any]:
    """Return the content of the file at an address, which is kept in the cache if it can be read as a whole."""
    say(f"downloading {address} to {cached}")
    refused: CheckpointError | None = None
    with written_whole(cached, reaches_disk=False) as file:
        try:
            _fetch(address, file, digits)
            content = _content_of(str(file), address, map_location, trust)
        except DamagedCheckpointError as error:
            raise DamagedCheckpointError(
                f"{error}. The transfer has broken off, or the server has sent something else, such as a page to log "
                f"in. Nothing is kept as {cached}"
            ) from error
        except (OSError, HTTPException, ValueError) as error:
            raise MissingCheckpointError(
                f"checkpoint {address} cannot be fetched: {error}. Download it on a machine with network access. Then "
                f"give the path of the file instead of the address, or put the file at {cached}"
            ) from error
        except CheckpointError as error:  # It is whole, and holds a type that is not on the list.
            refused = error
    if refused is not None:
        raise refused
    return content


def _fetch(address: str, file: Path, digits: str) -> None:
    """Write what a server sends into a file, and compare its length and the first digits of its checksum."""
    checksum = sha256()
    with urlopen(Request(address, headers={"User-Agent": "visdet"})) as answer, open(file, "wb") as opened:
        while part := answer.read(2**20):
            checksum.update(part)
            opened.write(part)
        size = opened.tell()
        length = answer.headers["Content-Length"]
    if length is not None and size != int(length):
        raise DamagedCheckpointError(
            f"checkpoint {address} cannot be read: {size} of its {length} bytes have come"
        )
    found = checksum.hexdigest()
    if not found.startswith(digits):
        raise ValueError(f"invalid hash value (expected {digits!r}, got {found!r})")
