"""Running a trained model on images."""

import logging
import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from typing import Annotated, Any, Literal, overload

import numpy as np
import torch
from mmengine.config import Config
from mmengine.dataset import Compose, pseudo_collate
from mmengine.registry import init_default_scope
from PIL import Image
from torch import nn

from visdet.checks.arguments import AtLeast0, Positive, Range, Share, checked, checked_value, with_other_names
from visdet.checks.heads import check_heads
from visdet.errors import InvalidInputError
from visdet.registry import VISUALIZERS
from visdet.structures import DetDataSample

from ..checkpoints.checkpoint import read_checkpoint
from ..checkpoints.held_config import load_config, meta_of, names_checkpoint, say_differences
from ..checkpoints.score_thresholds import measured_thresholds, thresholds_for
from ..checkpoints.weights import load_weights, weights_of
from ..config.build_errors import build_model, building
from ..config.checks import section_of
from ..config.load import complete_config
from ..config.other_names import NAMES_OF_DETECTING, NAMES_OF_LOADING
from ..errors import ConfigError
from ..graphs.methods import graphs_for
from ..process.default_device import cpu_by_default
from ..stages import StagedModel
from .detections import Detections
from .detector_config import checked_device, dataset_meta_of, model_class, takes_images, test_pipeline
from .given_images import Array, GivenImage, as_array, each_image, frames_per_second, is_one_image, video_of
from .image_files import AnyPath, is_stream
from .read_ahead import computed_ahead
from .sample_images import rgb_of_file
from .tiles import joined, windows_of
from .videos import written_as_video

__all__ = ["Detector", "init_detector"]

_AHEAD = 16  # images that are read in advance


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
        category_ids: the number of each class in the annotation file of the training, or None if it is not known.

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
        self.device = checked_device(device)
        path = None if checkpoint is None else os.path.expanduser(checkpoint)
        if not takes_images(cfg):
            kind = model_class(cfg)
            raise ConfigError(
                f"{kind.__name__} does not take image files. Its samples are {kind.sample_type.__name__}s, which "
                "only a data set can read. Use visdet test CONFIG CHECKPOINT --out FILE --show-dir FOLDER, or "
                "visdet.evaluate, to write and draw the predictions for the data set of the config"
            )
        option = cfg.get
        content = {} if path is None else read_checkpoint(path, trust=option("trust_checkpoint", False))
        say_differences(cfg, content, path or "")
        model = build_model(cfg, cfg.model)
        self.dataset_meta = dataset_meta_of(cfg, content, path, model)
        classes = self.dataset_meta["classes"]
        owner = "the checkpoint, or else test_dataloader.dataset.metainfo, names"
        check_heads(model, classes, owner, names_may_be_unused=path is None)
        if path is not None:
            is_strict = option("strict_load", True)
            allows_nonfinite = option("allow_nonfinite_weights", False)
            weights = weights_of(content, path)
            load_weights(model, weights, path, is_strict, allow_nonfinite=allows_nonfinite)
        self.model: nn.Module = model.to(self.device).eval()
        measured, self.origin_of_thresholds = measured_thresholds(content)
        self.category_ids = meta_of(content).get("category_ids")
        self.score_thresholds = thresholds_for(classes, measured)
        with building(cfg, "test_dataloader"):
            self._pipeline = Compose(test_pipeline(cfg))
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
        tiles: Positive | None = None,
        overlap: Annotated[float, Range(0, 0.9)] = 0.2,
        nms: Share | None = None,
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
            tiles: the sides of the tiles, in pixels, into which a larger picture is cut for small objects. The whole
                picture is seen, too, and detections of a class that overlap are one.
            overlap: the share of a tile that the next one shows, too.
            nms: the IoU above which the worse of two detections of a class is left out. The default is None, or 0.5
                where tiles meet.

        Raises:
            UserError: an argument cannot be used, or an image or a video cannot be read. The message says which.
        """
        images = as_array(images)
        given = each_image(images, channel_order)
        video = video_of(images)
        is_one = is_one_image(images)
        is_finite = isinstance(images, AnyPath | Sequence | Array)
        # The images of a user's iterator are taken when they are needed, such as those of a camera.
        reads_ahead = is_finite and not is_one
        options: Any = {
            "batch_size": batch_size,
            "thresholds": score_threshold,
            "amp": bool(amp),
            "graph": graph,
        }
        if tiles is None:
            read = computed_ahead(self._read, given, _AHEAD) if reads_ahead else map(self._read, given)
            found = self.detect_items(read, nms=nms, **options)
        else:
            found = self.detect_tiles(given, tiles, overlap, nms, **options)
        rate = 25.0 if video is None or is_stream(video) else frames_per_second(video)
        if save_video is not None:
            found = written_as_video(found, save_video, rate)
        if is_one:
            (result,) = found
            return result
        return list(found) if is_finite and video is None else found

    def _checked_thresholds(self) -> list[float]:
        given: Any = self.score_thresholds
        given = given.tolist() if isinstance(given, Array) else given
        given = checked_value("score_thresholds", given, list[AtLeast0])  # One above 1 leaves its class out.
        count = len(self.dataset_meta["classes"])
        if len(given) != count:
            raise InvalidInputError(
                f"score_thresholds must have a number for each of the {count} classes, got {given!r:.200}"
            )
        return given

    def detect_items(
        self,
        items: Iterator[tuple[GivenImage, dict[str, Any]]],
        batch_size: int = 1,
        thresholds: float | list[float] | None = None,
        amp: bool = False,
        graph: bool | None = None,
        nms: float | None = None,
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
                options = (image.pixels, self._picture, image.frame, image.time, self.category_ids)
                found = Detections(sample, classes, thresholds, *options)
                yield found if nms is None else found.nms(nms)

    def detect_tiles(
        self,
        images: Iterable[GivenImage],
        tiles: int,
        overlap: float = 0.2,
        nms: float | None = None,
        **options: Any,
    ) -> Iterator[Detections]:
        """Yield the detections in images that are cut into tiles. A call of the detector has the arguments.

        Args:
            images: the images.
            options: those arguments of :meth:`detect_items` that are not named here.
        """
        for image in images:
            pixels = rgb_of_file(image.path) if image.pixels is None else image.pixels
            height, width, _ = pixels.shape
            shape = height, width
            windows = windows_of(height, width, tiles, overlap)
            crops = (GivenImage(pixels=pixels[y1:y2, x1:x2]) for x1, y1, x2, y2 in windows)
            parts = list(self.detect_items(map(self._read, crops), **options))
            yield joined(parts, windows, image, shape, overlap * tiles, 0.5 if nms is None else nms)

    def _read(self, image: GivenImage) -> tuple[GivenImage, dict[str, Any]]:
        return image, self.item_of(image)

    @cpu_by_default()
    def item_of(self, image: GivenImage) -> dict[str, Any]:
        """Return what the test pipeline makes of an image."""
        pipeline = self._pipeline
        pixels = image.pixels
        given: dict[str, Any] = {"img_path": image.path, "img_id": 0}
        if pixels is not None:
            first = type(pipeline.transforms[0]).__name__
            if first != "LoadImageFromFile":
                raise ConfigError(
                    f"the test pipeline begins with {first}, which reads files only; LoadImageFromFile also takes "
                    "arrays, tensors and images of Pillow"
                )
            given["rgb"] = pixels.copy()
        return pipeline(given)

    @torch.no_grad()
    @cpu_by_default()
    def _predict(self, items: list[dict], amp: bool, graph: bool | None) -> list[DetDataSample]:
        replays = self._cfg.get("graph", True) if graph is None else graph
        model = StagedModel(self.model, self._graphs if replays else None)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=amp):
            return [sample.to("cpu") for sample in model.test_step(pseudo_collate(items))]

    @cached_property
    def _graphs(self) -> dict[str, Any]:
        return graphs_for({"graph": True}, self.model, logging.getLogger(__name__))

    @cached_property
    def _visualizer(self) -> Any:
        drawing = section_of(self._cfg, "visualizer")
        if not hasattr(VISUALIZERS.get(drawing.get("type")), "draw_sample"):
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
