"""The times at which the frames of an .mp4 file are shown, which OpenCV can only write at one rate."""

import mmap
import struct
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import BinaryIO

__all__ = ["set_frame_times"]

_TICKS = 90_000  # in a second; most videos have times that are whole numbers of them
_CONTAINERS = (b"moov", b"trak", b"mdia", b"minf", b"stbl", b"edts")
_HEADER = struct.Struct(">I4s")  # the size of a box, with this header, and its kind
# Where a box has its duration: behind the version, the dates and, in a track, its number.
_DURATION_AT = {b"mvhd": 16, b"tkhd": 20, b"mdhd": 16, b"elst": 8}
_TIME_SCALE_AT = 12
_LIMIT = 2**32  # ticks; nearly half a day


def set_frame_times(path: str, durations: Sequence[float]) -> bool:
    """Let each frame of an .mp4 file be shown for a time, in seconds, and return whether the file allows that.

    It is a file of one track that OpenCV's writer has just closed. The result is False, and the file is unchanged, if
    its index is not at the end, or if frames are stored in another order than they are shown.

    Source: the format is ISO/IEC 14496-12. Only ``stts``, the table of durations, and the total durations change.
    """
    edges = [round(seconds * _TICKS) for seconds in accumulate(durations, initial=0)]
    end = edges[-1]
    ticks = [after - before for before, after in pairwise(edges)]
    with open(path, "r+b") as file:
        try:
            start, index = _index(file)
            if b"ctts" in index or end >= _LIMIT:
                return False
            (movie_scale,) = struct.unpack_from(">I", index, index.index(b"mvhd") + 4 + _TIME_SCALE_AT)
            changed = _with_durations(index, ticks, round(end / _TICKS * movie_scale))
        except (struct.error, ValueError):  # The writer could not complete the file.
            return False
        file.seek(start)
        file.write(changed)
    return True


def _index(file: BinaryIO) -> tuple[int, bytes]:
    """Return where the index of a file begins, which must be its last box, and the index."""
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        start = content.rfind(b"moov") - 4  # The size is before the kind.
        (size,) = struct.unpack_from(">I", content, start)
        if start + size != len(content):
            raise ValueError("the last box is cut, or is no index")
        return start, content[start:]


def _boxes(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the kind and the content of each box."""
    position = 0
    while position < len(content):
        size, kind = _HEADER.unpack_from(content, position)
        yield kind, content[position + _HEADER.size : position + size]
        position += size


def _with_durations(content: bytes, ticks: Sequence[int], total: int) -> bytes:
    """Return boxes with a table of durations in ticks, and a total duration in units of the movie."""
    changed = b""
    for kind, inner in _boxes(content):
        if kind in _CONTAINERS:
            inner = _with_durations(inner, ticks, total)
        elif kind == b"stts":
            table = b"".join(struct.pack(">II", 1, duration) for duration in ticks)
            inner = struct.pack(">II", 0, len(ticks)) + table
        elif kind in _DURATION_AT:
            box = bytearray(inner)
            struct.pack_into(">I", box, _DURATION_AT[kind], sum(ticks) if kind == b"mdhd" else total)
            if kind == b"mdhd":
                struct.pack_into(">I", box, _TIME_SCALE_AT, _TICKS)
            inner = bytes(box)
        changed += _HEADER.pack(_HEADER.size + len(inner), kind) + inner
    return changed
