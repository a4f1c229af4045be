"""Writing the pictures of detections as a video."""

import os
from collections.abc import Iterator
from itertools import chain, pairwise
from typing import Any

import numpy as np
from PIL import Image

from visdet.errors import UserError
from visdet.files.writing import written_whole

from ..process.console import say
from ..process.places import check_out_file
from .detections import Detections
from .mp4_times import set_frame_times
from .read_ahead import computed_ahead

__all__ = ["written_as_video"]

_ROUNDING = 0.1  # of the time between two frames; containers round times to milliseconds


def written_as_video(
    found: Iterator[Detections], path: str | os.PathLike, rate: float
) -> Iterator[Detections]:
    """Return an iterator of the detections, which writes their pictures to a video as they pass.

    Args:
        found: the detections in the frames.
        path: the .mp4 file to write.
        rate: the number of frames in a second on average. The frames are shown at the times of ``found``.

    Raises:
        UserError: the file cannot be written as a whole, for example because the disk is full, or it is one that is
            read, or a frame has another size than the first one.
    """
    # FFmpeg would print many lines about a codec that is not there. OpenCV reads this variable at its first video.
    os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")
    path = os.path.expanduser(path)
    if not isinstance(path, str) or not path.lower().endswith(".mp4"):
        raise UserError(f"save_video must name an .mp4 file, got {path!r}")
    check_out_file(path, "save_video")
    return _written(found, path, rate)


def _written(found: Iterator[Detections], path: str, rate: float) -> Iterator[Detections]:
    # Threads predict and draw the next frames while one is written.
    drawn = computed_ahead(_drawn, found, 3, 1)
    first = next(drawn, None)
    if first is None:
        return
    expected = _size_of(first[1])
    width, height = expected
    times: list[float] = []
    stopped: BaseException | None = None
    with written_whole(path, reaches_disk=False) as file:
        partial = str(file)
        writer = _opened(partial, rate, expected)
        try:
            for result, picture in chain([first], drawn):
                files = [str(result.path), path]
                if all(map(os.path.exists, files)) and os.path.samefile(*files):
                    raise UserError(f"save_video must not name a video that is read, got {path!r}")
                size = _size_of(picture)
                if size != expected:
                    raise UserError(f"save_video: the frames must be of one size, got {expected} and {size}")
                rgb = np.asarray(picture)[:height, :width]
                writer.write(np.ascontiguousarray(rgb[..., ::-1]))
                times.append(len(times) / rate if result.time is None else result.time)
                yield result
        except (GeneratorExit, KeyboardInterrupt) as error:  # The frames that were taken until then are kept.
            stopped = error
        finally:
            writer.release()
        _check_complete(partial, len(times))
        _set_times(partial, times, rate)
    if stopped is not None:
        raise stopped


def _size_of(picture: Image.Image) -> tuple[int, int]:
    """Return the size of a frame. The codec takes even sizes only."""
    return picture.width // 2 * 2, picture.height // 2 * 2


def _check_complete(path: str, expected: int) -> None:
    """Compare the number of frames of a video with those that were written. OpenCV's writer reports no error."""
    import cv2

    found = int(cv2.VideoCapture(path).get(cv2.CAP_PROP_FRAME_COUNT))
    if found != expected:
        raise OSError(f"only {max(found, 0)} of its {expected} frames can be read; is the disk full?")


def _drawn(result: Detections) -> tuple[Detections, Image.Image]:
    return result, result.draw()


def _set_times(path: str, times: list[float], rate: float) -> None:
    """Let the frames of a video that was written at one rate be shown at their times, the first one at once."""
    durations = [after - before for before, after in pairwise(times)]
    if all(abs(duration * rate - 1) < _ROUNDING for duration in durations):
        return
    if not set_frame_times(path, [*durations, durations[-1]]):
        say(
            "the frames of the original are shown at uneven times, but those of the written video at a rate of "
            f"{rate:g} in a second"
        )


def _opened(path: str, rate: float, size: tuple[int, int]) -> Any:
    """Return a writer with the codec H.264, which browsers play, or with MPEG-4 if OpenCV has none of it."""
    import cv2

    log: Any = cv2.utils.logging
    level = log.getLogLevel()
    set_level = log.setLogLevel
    kind = cv2.VideoWriter
    set_level(log.LOG_LEVEL_SILENT)
    try:
        for codec in ("avc1", "mp4v"):
            writer = kind(path, kind.fourcc(*codec), rate, size)
            if writer.isOpened():
                break
        else:
            raise UserError(f"OpenCV cannot write the video {path}")
    finally:
        set_level(level)
    if codec == "mp4v":
        say(
            "OpenCV has no H.264 here, so that the video is MPEG-4: players show it, but browsers do not. "
            "`ffmpeg -i IN.mp4 -c:v libx264 OUT.mp4` converts it"
        )
    return writer
