"""Detecting objects in files, and writing what is found."""

import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from visdet.checks.arguments import Range, Share, checked_value
from visdet.files.writing import write_atomically

from ..errors import UserError
from ..process.console import say
from ..process.places import check_work_dir
from .detections import Detections
from .given_images import GivenImage
from .image_files import AnyPath, is_stream, is_video, one_or_several, pictures_folder
from .picture_paths import PicturePaths
from .read_ahead import computed_ahead

if TYPE_CHECKING:
    from .detector import Detector

__all__ = ["detect_files", "write_detections_file"]

_AHEAD = 16  # images that are read in advance
_DRAWING = 4  # threads that write pictures
_REPEATS = 0.7  # the IoU of two detections of a class that are probably one object


@dataclass
class _Run:
    """The files of a run, and what it cannot read.

    Attributes:
        draws: whether pictures are written. failures: a message for each file that cannot be read.
        Others are those of :func:`detect_files`.
    """

    detector: "Detector"
    paths: list[str]
    out_dir: str
    draws: bool
    score_thr: float | None
    batch_size: int
    amp: bool
    tiles: int | None
    overlap: float
    nms: float | None
    failures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        folders = [os.path.dirname(os.path.abspath(path)) for path in self.paths if not is_stream(path)]
        self.root = os.path.commonpath(folders) if folders else ""
        self.pictures = PicturePaths(pictures_folder(self.out_dir))

    def picture_of(self, path: str, suffix: str) -> Path:
        name = "stream" if is_stream(path) else os.path.relpath(path, self.root)
        picture = self.pictures.path_of(path, name, suffix)
        check_work_dir(picture.parent, "--out-dir")
        return picture

    def results(self) -> Iterator[Detections]:
        for is_alone, group in groupby(self.paths, key=self._is_alone):
            if is_alone:
                for path in group:
                    yield from self._of_file(path)
            else:
                items = self._readable(group)
                yield from self.detector.detect_items(
                    items, self.batch_size, self.score_thr, self.amp, nms=self.nms
                )

    def _is_alone(self, path: str) -> bool:
        """Return whether the images of a batch come from this file alone."""
        return self.tiles is not None or is_video(path)

    def _of_file(self, path: str) -> Iterator[Detections]:
        has_frames = is_video(path)
        video = self.picture_of(path, ".mp4") if self.draws and has_frames else None
        try:
            found = self.detector(
                path,
                self.batch_size,
                self.score_thr,
                amp=self.amp,
                save_video=video,
                tiles=self.tiles,
                overlap=self.overlap,
                nms=self.nms,
            )
            yield from found if has_frames else [found]
        except UserError as error:
            self.failures.append(str(error))

    def _readable(self, paths: Iterator[str]) -> Iterator[tuple[GivenImage, dict[str, Any]]]:
        for image, item in computed_ahead(self._read, paths, _AHEAD):
            if isinstance(item, UserError):
                self.failures.append(str(item))
            else:
                yield image, item

    def _read(self, path: str) -> tuple[GivenImage, Any]:
        image = GivenImage(path)
        try:
            return image, self.detector.item_of(image)
        except UserError as error:
            return image, error


def detect_files(
    detector: "Detector",
    files: AnyPath | Iterable[AnyPath],
    out_dir: str,
    score_thr: float | None,
    batch_size: int = 1,
    amp: bool = False,
    draws: bool = True,
    shown: Callable[[Iterator[Detections], int], Iterable[Detections]] | None = None,
    tiles: int | None = None,
    overlap: float = 0.2,
    nms: float | None = None,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Detect objects in images and videos, and write ``predictions.json`` and a picture of each file below ``out_dir``.

    The picture of a video is an .mp4 file. The pictures are in :func:`pictures_folder`. Their subfolders are those of
    the files below the deepest folder that contains all of them; see also :class:`PicturePaths`. Files are read, and
    pictures are written, in threads while the model predicts.

    Args:
        detector: the detector.
        files: the paths of the images and the videos, or one path.
        out_dir: the folder to write to.
        score_thr: the lowest score of the detections that are kept. With None it is the detector's for each class.
        batch_size, amp: see :class:`Detector`.
        draws: whether pictures are written.
        shown: a function of the results as they come and of the number of files, which returns them, such as that of a
            progress bar.
        tiles, overlap, nms: see :class:`Detector`. Without ``nms``, it is said if 0.7 would have left out more than a
            tenth of the detections.

    Returns:
        the detections in every image and every frame (see :meth:`Detections.to_dict`), and a message for each file that
        cannot be read.
    """
    check_shares(score_thr, overlap, nms)
    paths = [os.fspath(path) for path in one_or_several(files)]
    run = _Run(detector, paths, out_dir, draws, score_thr, batch_size, amp, tiles, overlap, nms)
    predictions = Path(out_dir, "predictions.json")
    found: list[dict[str, Any]] = []
    total = repeated = 0
    drawn: deque[Future] = deque()
    try:
        with ThreadPoolExecutor(_DRAWING) as drawing:
            results = run.results()
            for result in shown(results, len(paths)) if shown else results:
                found.append(result.to_dict())
                number = len(result)
                total += number
                repeated += number - len(result.nms(_REPEATS)) if nms is None else 0
                if draws and result.frame is None:
                    drawn.append(drawing.submit(result.draw, run.picture_of(str(result.path), ".png")))
                if len(drawn) > 2 * _DRAWING:
                    drawn.popleft().result()
            for picture in drawn:
                picture.result()
    except BaseException:  # What was found until then is kept.
        if found:
            with suppress(OSError):
                write_detections_file(predictions, found)
        raise
    write_detections_file(predictions, found)
    if 10 * repeated > total:
        say(
            f"--nms {_REPEATS} would leave out {repeated} of the {total} detections: objects are found several times"
        )
    return found, run.failures


def check_shares(score_thr: float | None, overlap: float, nms: float | None) -> None:
    """Check the options of these names of ``visdet infer``, which :func:`detect_files` takes, too.

    Raises:
        InvalidInputError: one is not in its range.
    """
    checked_value("--score-thr", score_thr, Share | None)
    checked_value("--overlap", overlap, Annotated[float, Range(0, 0.9)])
    checked_value("--nms", nms, Share | None)


def write_detections_file(path: str | Path, images: list[dict[str, Any]]) -> None:
    """Write the results of :func:`detections_of` for some images as a JSON list with one line per image."""
    write_atomically(path, "[\n" + ",\n".join(map(json.dumps, images)) + "\n]\n")
