"""Running a trained model on images."""

import contextlib
import functools
import json
import logging
import math
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
import torch
from mmengine.config import Config
from mmengine.dataset import Compose, pseudo_collate
from mmengine.registry import init_default_scope
from PIL import Image
from torch import nn

from visdet.checks.arguments import AtLeast0, Positive, Share, checked, checked_value, with_other_names
from visdet.checks.heads import classes_of_heads
from visdet.errors import InvalidInputError, listed
from visdet.files.writing import write_atomically
from visdet.registry import DATASETS, MODELS, VISUALIZERS
from visdet.structures import DetDataSample
from visdet.structures.class_names import checked_classes

from ..checkpoints.checkpoint import read_checkpoint
from ..checkpoints.class_names import class_lists, lists_of_checkpoint
from ..checkpoints.held_config import load_config, names_checkpoint, say_differences
from ..checkpoints.score_thresholds import DEFAULT_THRESHOLD, measured_thresholds
from ..checkpoints.weights import load_weights, weights_of
from ..config.build_errors import build_model, building
from ..config.load import complete_config, dataset_config
from ..config.other_names import NAMES_OF_DETECTING, NAMES_OF_LOADING
from ..errors import ConfigError, UserError
from ..graphs.methods import graphs_for
from ..process.console import say
from ..process.default_device import cpu_by_default
from ..process.places import check_work_dir
from ..stages import StagedModel
from .detections import Detections
from .given_images import GivenImage, as_array, each_image, frames_per_second, is_one_image, video_of
from .image_files import is_stream, is_video, one_or_several, pictures_folder
from .picture_paths import PicturePaths
from .read_ahead import computed_ahead
from .videos import written_as_video

__all__ = ["Detector", "detect_files", "init_detector", "write_detections_file"]

_AHEAD = 16  # images that are read in advance
_DRAWING = 4  # threads that write pictures


class Detector:
    """Detects objects in images by the model and the test pipeline of a config, with a checkpoint's weights.

    Args:
        cfg: the config that the checkpoint was trained with, as for :func:`init_detector`; or a checkpoint, which
            holds its config.
        checkpoint: a file, an http(s) address, or a name of docs/model_zoo.md. Without one, the weights are random.
        device: the device to run on. The default is the GPU if there is one, and otherwise the CPU.

    Attributes:
        dataset_meta: a dict with ``classes`` and, if it is known, ``palette``. It comes from the checkpoint, or from
            the config's test data set if the checkpoint has none.
        score_thresholds: for each class, the lowest score of the detections that are kept by default. That is the score
            of the best F1 in the checkpoint's own validation, and 0.3 if there was none.
        origin_of_thresholds: where they come from.

    Raises:
        CheckpointError: the checkpoint is missing or damaged, or belongs to another model.
        ConfigError: the model does not take single images, the config has no test pipeline, or neither the config nor
            the checkpoint names the classes.
        UserError: the device is not available.
    """

    @cpu_by_default()
    def __init__(
        self,
        cfg: str | os.PathLike | Config,
        checkpoint: str | os.PathLike | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        if checkpoint is None and names_checkpoint(cfg):
            checkpoint = cfg
        cfg, _ = load_config(cfg)
        complete_config(cfg)
        init_default_scope(cfg.default_scope)
        self.device = _checked_device(device)
        path = None if checkpoint is None else os.path.expanduser(checkpoint)
        if not takes_images(cfg):
            model = _model_class(cfg)
            raise ConfigError(
                f"{model.__name__} does not take image files. Its samples are {model.sample_type.__name__}s, which "
                "only a data set can read. Use visdet test CONFIG CHECKPOINT --out FILE --show-dir FOLDER, or "
                "visdet.evaluate, to write and draw the predictions for the data set of the config"
            )
        content = {} if path is None else read_checkpoint(path, trust=bool(cfg.get("trust_checkpoint")))
        say_differences(cfg, content, path or "")
        self.model: nn.Module = build_model(cfg, cfg.model)
        self.dataset_meta = dataset_meta_of(cfg, content, path, self.model)
        classes = self.dataset_meta["classes"]
        for name, count in classes_of_heads(self.model).items():
            # Without a checkpoint, there may be names that are not used.
            if count > len(classes) or (path is not None and count != len(classes)):
                raise ConfigError(
                    f"model.{name}.num_classes is {count}, but the checkpoint, or else "
                    f"test_dataloader.dataset.metainfo, names {len(classes)} classes"
                )
        if path is not None:
            load_weights(
                self.model,
                weights_of(content, path),
                path,
                cfg.get("strict_load", True),
                allow_nonfinite=bool(cfg.get("allow_nonfinite_weights")),
            )
        self.model.to(self.device).eval()
        measured, self.origin_of_thresholds = measured_thresholds(content, path)
        self.score_thresholds = [
            measured.get(name, DEFAULT_THRESHOLD) for name in self.dataset_meta["classes"]
        ]
        with building(cfg, "test_dataloader"):
            self._pipeline = Compose(_test_pipeline(cfg))
        self._cfg = cfg

    @overload
    def __call__(self, images: Image.Image, *args: Any, **options: Any) -> Detections: ...

    @overload
    def __call__(self, images: list | tuple, *args: Any, **options: Any) -> list[Detections]: ...

    @overload  # A path may be that of a folder or a video, and an array a batch.
    def __call__(self, images: Any, *args: Any, **options: Any) -> Any: ...

    @checked
    @with_other_names(NAMES_OF_DETECTING)
    def __call__(
        self,
        images: Any,
        batch_size: Positive = 1,
        score_threshold: Share | None = None,
        *,
        amp: bool = False,
        graph: bool | None = None,
        channel_order: Literal["bgr", "rgb"] = "bgr",
        save_video: str | os.PathLike | None = None,
    ) -> Any:
        """Return the detections in one image or in many.

        One image gives one :class:`Detections`. A folder, a pattern, a list or a batch gives a list. A video or another
        iterator gives an iterator, which reads ``batch_size`` images at a time.

        Args:
            images: a path or a pattern of image files, videos or folders of both; the number of
                a camera such as "0", or the address of a stream such as "rtsp://…", which are videos; an array
                [H, W, 3]; a tensor [3, H, W]; an image of Pillow; a batch of arrays or tensors; or a list or an
                iterator of these. :func:`each_image` describes the values.
            batch_size: number of images that the model takes at once.
            score_threshold: the lowest score of the detections that are kept, from 0 to 1. The default is that of each
                class in ``score_thresholds``.
            amp: compute in bfloat16 where torch's autocast does.
            graph: replay predictions as CUDA graphs on a GPU. The default is the config's choice. Only one thread at a
                time may then call the detector.
            channel_order: 'bgr' or 'rgb', the order of the channels of arrays and tensors.
            save_video: an .mp4 file to write with the pictures of the detections. It is complete when all results have
                been taken.

        Raises:
            UserError: an argument cannot be used, or an image or a video cannot be read. The message says which.
        """
        images = as_array(images)
        thresholds = self._checked_thresholds() if score_threshold is None else score_threshold
        given = each_image(images, channel_order)
        video = video_of(images)
        is_one = is_one_image(images)
        is_finite = isinstance(images, str | os.PathLike | Sequence | np.ndarray | torch.Tensor)
        # The images of a user's iterator are taken when they are needed, such as those of a camera.
        reads_ahead = is_finite and not is_one
        read = computed_ahead(self._read, given, _AHEAD) if reads_ahead else map(self._read, given)
        found = self.detect_items(read, batch_size, thresholds, bool(amp), graph)
        rate = 25.0 if video is None or is_stream(video) else frames_per_second(video)
        if save_video is not None:
            found = written_as_video(found, save_video, rate)
        if is_one:
            (result,) = found
            return result
        return list(found) if is_finite and video is None else found

    def _checked_thresholds(self) -> list[float]:
        given: Any = self.score_thresholds
        given = given.tolist() if isinstance(given, np.ndarray | torch.Tensor) else given
        given = checked_value("score_thresholds", given, list[AtLeast0])  # One above 1 leaves its class out.
        if len(given) != len(self.dataset_meta["classes"]):
            raise InvalidInputError(
                f"score_thresholds must have a number for each of the {len(self.dataset_meta['classes'])} classes, "
                f"got {given!r:.200}"
            )
        return given

    def detect_items(
        self,
        items: Iterator[tuple[GivenImage, dict[str, Any]]],
        batch_size: int = 1,
        thresholds: float | list[float] | None = None,
        amp: bool = False,
        graph: bool | None = None,
    ) -> Iterator[Detections]:
        """Yield the detections in images that :meth:`item_of` has prepared. A call of the detector has the arguments.

        Args:
            items: each image with its item.
        """
        thresholds = self._checked_thresholds() if thresholds is None else thresholds
        while batch := list(islice(items, min(batch_size, sys.maxsize))):
            samples = self._predict([item for _, item in batch], amp, graph)
            for (image, _), sample in zip(batch, samples, strict=True):
                classes = self.dataset_meta["classes"]
                yield Detections(
                    sample, classes, thresholds, image.pixels, self._picture, image.frame, image.time
                )

    def _read(self, image: GivenImage) -> tuple[GivenImage, dict[str, Any]]:
        return image, self.item_of(image)

    @cpu_by_default()
    def item_of(self, image: GivenImage) -> dict[str, Any]:
        """Return what the test pipeline makes of an image."""
        if image.pixels is None:
            return self._pipeline({"img_path": image.path, "img_id": 0})
        first = self._pipeline.transforms[0]
        if type(first).__name__ != "LoadImageFromFile":
            raise ConfigError(
                f"the test pipeline begins with {type(first).__name__}, which reads files only; LoadImageFromFile also "
                "takes arrays, tensors and images of Pillow"
            )
        return self._pipeline({"img_path": image.path, "img_id": 0, "rgb": image.pixels.copy()})

    @torch.no_grad()
    @cpu_by_default()
    def _predict(self, items: list[dict], amp: bool, graph: bool | None) -> list[DetDataSample]:
        replays = self._cfg.get("graph", True) if graph is None else graph
        model = StagedModel(self.model, self._graphs if replays else None)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=amp):
            return [sample.to("cpu") for sample in model.test_step(pseudo_collate(items))]

    @functools.cached_property
    def _graphs(self) -> dict[str, Any]:
        return graphs_for({"graph": True}, self.model, logging.getLogger(__name__))

    @functools.cached_property
    def _visualizer(self) -> Any:
        drawing = self._cfg.get("visualizer") or {}
        kind = drawing.get("type")
        if not hasattr(VISUALIZERS.get(kind) if isinstance(kind, str) else kind, "draw_sample"):
            drawing = {"type": "DetLocalVisualizer"}
        visualizer = VISUALIZERS.build({**drawing, "vis_backends": None, "name": f"detector {id(self)}"})
        visualizer.dataset_meta = self.dataset_meta
        return visualizer

    def _picture(self, image: np.ndarray, sample: DetDataSample) -> np.ndarray:
        return self._visualizer.draw_sample(image, sample, draw_gt=False, pred_score_thr=-math.inf)[0]


@checked
@with_other_names(NAMES_OF_LOADING)
def init_detector(
    config: str | os.PathLike | Config,
    checkpoint: str | os.PathLike | None = None,
    device: str | torch.device | None = None,
) -> Detector:
    """Return a detector for images: ``init_detector(config, checkpoint)("street.jpg").boxes``.

    Args:
        config: a checkpoint, which holds its config; or the config that the checkpoint was trained with: a file, the
            name of one of the package's configs, or a loaded config, which is not changed.
        checkpoint: a checkpoint file, its http(s) address, or a name of docs/model_zoo.md. Without one, the weights are
            random.
        device: the device to run on, such as 'cpu' or 'cuda:1'. The default is the GPU if there is one.

    Raises:
        UserError: see :class:`Detector`.
    """
    return Detector(config, checkpoint, device)


def _model_class(cfg: Config) -> Any:
    if not cfg.get("model"):
        raise ConfigError(f"config {cfg.filename or ''} lacks model")
    kind = cfg.model.get("type")
    return MODELS.get(kind) if isinstance(kind, str) else kind


def takes_images(cfg: Config) -> bool:
    """Return whether the samples of a config's model are single images."""
    return issubclass(getattr(_model_class(cfg), "sample_type", DetDataSample), DetDataSample)


def detect_files(
    detector: Detector,
    files: str | os.PathLike | Iterable[str | os.PathLike],
    out_dir: str,
    score_thr: float | None,
    batch_size: int = 1,
    amp: bool = False,
    draws: bool = True,
    shown: Callable[[Iterator[Detections], int], Iterable[Detections]] | None = None,
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

    Returns:
        the detections in every image and every frame (see :meth:`Detections.to_dict`), and a message for each file that
        cannot be read.
    """
    checked_value("--score-thr", score_thr, Share | None)
    paths = [os.fspath(path) for path in one_or_several(files)]
    folders = [os.path.dirname(os.path.abspath(path)) for path in paths if not is_stream(path)]
    root = os.path.commonpath(folders) if folders else ""
    pictures = PicturePaths(pictures_folder(out_dir))
    predictions = Path(out_dir, "predictions.json")
    found: list[dict[str, Any]] = []
    failures: list[str] = []

    def picture_of(path: str, suffix: str) -> Path:
        name = "stream" if is_stream(path) else os.path.relpath(path, root)
        picture = pictures.path_of(path, name, suffix)
        check_work_dir(picture.parent, "--out-dir")
        return picture

    def read(path: str) -> tuple[GivenImage, Any]:
        image = GivenImage(path)
        try:
            return image, detector.item_of(image)
        except UserError as error:
            return image, error

    def readable(paths: Iterator[str]) -> Iterator[tuple[GivenImage, dict[str, Any]]]:
        for image, item in computed_ahead(read, paths, _AHEAD):
            if isinstance(item, UserError):
                failures.append(str(item))
            else:
                yield image, item

    def results() -> Iterator[Detections]:
        for are_videos, group in groupby(paths, key=is_video):
            if not are_videos:
                yield from detector.detect_items(readable(group), batch_size, score_thr, amp)
            for path in group if are_videos else ():
                picture = picture_of(path, ".mp4") if draws else None
                try:
                    yield from detector(path, batch_size, score_thr, amp=amp, save_video=picture)  # type: ignore
                except UserError as error:
                    failures.append(str(error))

    drawn: deque[Future] = deque()
    try:
        with ThreadPoolExecutor(_DRAWING) as drawing:
            for result in results() if shown is None else shown(results(), len(paths)):
                found.append(result.to_dict())
                if draws and result.frame is None:
                    drawn.append(drawing.submit(result.draw, picture_of(str(result.path), ".png")))
                if len(drawn) > 2 * _DRAWING:
                    drawn.popleft().result()
            for picture in drawn:
                picture.result()
    except BaseException:  # What was found until then is kept.
        if found:
            with contextlib.suppress(OSError):
                write_detections_file(predictions, found)
        raise
    write_detections_file(predictions, found)
    return found, failures


def write_detections_file(path: str | Path, images: list[dict[str, Any]]) -> None:
    """Write the results of :func:`detections_of` for some images as a JSON list with one line per image."""
    write_atomically(path, "[\n" + ",\n".join(map(json.dumps, images)) + "\n]\n")


def _checked_device(device: str | torch.device | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        probe = torch.zeros(1, device=device)
        probe.item()  # Device 'meta' holds no values.
        return probe.device
    except (RuntimeError, AssertionError, TypeError) as error:
        raise UserError(f"device {device!r} is not available: {str(error).splitlines()[0]}") from error


def _test_dataset(cfg: Config) -> dict:
    for split in ("test", "val"):
        if cfg.get(f"{split}_dataloader"):
            return dataset_config(cfg, split)
    raise ConfigError(f"config {cfg.filename} has neither test_dataloader nor val_dataloader")


def _test_pipeline(cfg: Config) -> list[dict]:
    """Return the test pipeline without the steps that need annotations."""
    steps = _test_dataset(cfg).get("pipeline")
    if not steps:
        raise ConfigError(f"config {cfg.filename}: test_dataloader.dataset has no pipeline")
    return [step for step in steps if "LoadAnnotations" not in str(step.get("type"))]


def dataset_meta_of(cfg: Config, checkpoint: dict, path: str | None, model: nn.Module) -> dict:
    """Return the data set's meta information, with ``classes``, from a checkpoint or else from the config."""
    meta = checkpoint.get("meta", {}) if isinstance(checkpoint.get("meta"), dict) else {}
    dataset = _test_dataset(cfg)
    found = meta.get("dataset_meta") or dataset.get("metainfo") or {}
    owner = "test_dataloader.dataset.metainfo"
    if meta.get("dataset_meta") or meta.get("CLASSES"):
        owner = f"checkpoint {path}: meta['dataset_meta']"
    if not found:
        default = getattr(DATASETS.get(str(dataset.get("type"))), "METAINFO", {})
        # Weights of other projects name no classes.
        if not checkpoint or len(default.get("classes", ())) in classes_of_heads(model).values():
            found = default
    if not isinstance(found, dict):
        return checked_classes(found, owner)
    classes = found.get("classes") or found.get("CLASSES") or meta.get("CLASSES")
    if classes is None:
        raise ConfigError(
            "neither the checkpoint nor the config names the classes. Name them with "
            "--cfg-options test_dataloader.dataset.metainfo.classes=\"('a','b')\""
        )
    trained = lists_of_checkpoint(checkpoint).get("classes")
    given = class_lists(dataset.get("metainfo")).get("classes")
    if trained and given and set(trained) != set(given):
        say(
            f"the classes are those of the checkpoint, {listed(trained)}, and not the config's {listed(given)}"
        )
    return checked_classes({**found, "classes": classes}, owner)
