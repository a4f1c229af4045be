"""Running a trained model on image files."""

import contextlib
import copy
import json
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config
from mmengine.dataset import Compose, pseudo_collate
from mmengine.registry import init_default_scope
from mmengine.visualization import Visualizer
from torch import nn

from visdet.checks.finite import DIVERGED, check_finite
from visdet.registry import MODELS
from visdet.structures import DetDataSample

from .checkpoints.checkpoint import read_checkpoint, register_checkpoint_readers
from .checkpoints.weights import load_weights, weights_of
from .config import complete_config
from .errors import ConfigError, UserError
from .graphs.methods import graphs_for
from .image_files import pictures_folder
from .picture_paths import PicturePaths
from .sample_images import image_file_of

__all__ = ["Detector", "detect_files", "detections_of", "write_detections_file"]


class Detector:
    """Detects objects in image files by the model and the test pipeline of a config, with a checkpoint's weights.

    Args:
        cfg: the config that the checkpoint was trained with.
        checkpoint: a file or an http(s) address.
        device: the device to run on. The default is the GPU if there is one, and otherwise the CPU.

    Attributes:
        dataset_meta: a dict with ``classes`` and, if it is known, ``palette``. It comes from the checkpoint, or from
            the config's test data set if the checkpoint has none.

    Raises:
        CheckpointError: the checkpoint is missing or damaged, or belongs to another model.
        ConfigError: the model does not take single images, the config has no test pipeline, or neither the config nor
            the checkpoint names the classes.
        UserError: the device is not available.
    """

    def __init__(self, cfg: Config, checkpoint: str, device: str | None = None) -> None:
        cfg = copy.deepcopy(cfg)
        complete_config(cfg)
        init_default_scope(cfg.default_scope)
        trust = bool(cfg.get("trust_checkpoint", False))
        allow_nonfinite = bool(cfg.get("allow_nonfinite_weights", False))
        register_checkpoint_readers(trust, allow_nonfinite)
        self.device = _checked_device(device)
        content = read_checkpoint(checkpoint, trust=trust)
        self.model: nn.Module = MODELS.build(cfg.model)
        _check_takes_images(self.model)
        self.dataset_meta = _dataset_meta(cfg, content)
        load_weights(
            self.model,
            weights_of(content, checkpoint),
            checkpoint,
            cfg.get("strict_load", True),
            allow_nonfinite=allow_nonfinite,
        )
        self.model.to(self.device).eval()
        self._pipeline = Compose(_test_pipeline(cfg))
        self._graphs = graphs_for(cfg, self.model, logging.getLogger(__name__))

    @torch.no_grad()
    def __call__(self, path: str | Path) -> DetDataSample:
        """Return the detections in one image file, with boxes (x1, y1, x2, y2) in pixels of that image.

        Raises:
            ValueError: the file is not an image. The message names the file.
            FileNotFoundError: the file does not exist.
        """
        item = self._pipeline({"img_path": str(path), "img_id": 0})
        model: Any = self.model
        return model.test_step(pseudo_collate([item]))[0].to("cpu")

    @contextmanager
    def graphs_installed(self) -> Iterator[None]:
        """Let the model run with CUDA graphs inside the block, unless the config says ``graph=False``.

        Only one thread at a time may call a detector within the block.
        """
        with ExitStack() as stack:
            for graphs in self._graphs:
                stack.enter_context(graphs.installed())
            yield


def _check_takes_images(model: nn.Module) -> None:
    """Raise a ConfigError if the samples of a model are not single images.

    docs/contract.md describes the tools for other samples.
    """
    sample_type = getattr(model, "sample_type", DetDataSample)
    if not issubclass(sample_type, DetDataSample):
        raise ConfigError(
            f"{type(model).__name__} does not take image files. Its samples are {sample_type.__name__}s, which only a "
            "data set can read. Use visdet test CONFIG CHECKPOINT --out FILE --show-dir FOLDER to write and draw "
            "the predictions for the data set of the config"
        )


def detect_files(
    detector: Detector, visualizer: Visualizer, images: list[str], out_dir: str, score_thr: float
) -> tuple[list[dict[str, Any]], list[str]]:
    """Detect objects in image files, and write ``predictions.json`` and a picture of each image below ``out_dir``.

    The pictures are in :func:`pictures_folder`. Their subfolders are those of the images below the deepest folder that
    contains all images; see also :class:`PicturePaths`.

    Args:
        detector: the detector.
        visualizer: the visualizer that draws the pictures.
        images: the paths of the images.
        out_dir: the folder to write to.
        score_thr: the lowest score of the detections that are kept.

    Returns:
        the detections in every image (see :func:`detections_of`), and a message for each file that is not an image.
    """
    visualizer.dataset_meta = detector.dataset_meta
    root = os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in images])
    pictures = PicturePaths(pictures_folder(out_dir))
    found, failures = [], []
    try:
        for path in images:
            try:
                sample = detector(path)
            except UserError as error:
                failures.append(str(error))
                continue
            except OSError as error:  # The file may not be read, or has gone.
                failures.append(f"cannot read image {path}: {error.strerror or error}")
                continue
            found.append(detections_of(sample, detector.dataset_meta["classes"], score_thr))
            picture = pictures.path_of(os.path.relpath(path, root))
            image = image_file_of(sample)
            try:
                picture.parent.mkdir(parents=True, exist_ok=True)
                visualizer.add_datasample(
                    picture.name,
                    image,
                    sample,
                    draw_gt=False,
                    out_file=str(picture),
                    pred_score_thr=score_thr,
                )
            except OSError as error:
                raise UserError(f"cannot write {picture}: {error.strerror or error}") from error
    except BaseException:  # What was found until then is kept.
        if found:
            with contextlib.suppress(OSError):
                write_detections_file(Path(out_dir, "predictions.json"), found)
        raise
    write_detections_file(Path(out_dir, "predictions.json"), found)
    return found, failures


def detections_of(sample: Any, classes: tuple[str, ...], score_thr: float = 0.0) -> dict[str, Any]:
    """Return the detections of a sample, the highest score first, in types that JSON can represent.

    Args:
        sample: a DetDataSample with ``pred_instances`` and ``ori_shape``, or its dict.
        classes: the names of the labels.
        score_thr: the lowest score of the detections that are kept.

    Returns:
        a dict with the ``file`` of the image, its ``height`` and ``width`` in pixels, and ``detections``. That is a
        list of dicts with ``class``, ``label``, ``score`` and ``bbox_xyxy``, the box (x1, y1, x2, y2) in pixels of
        the image.
    """
    fields = sample.to_dict() if isinstance(sample, DetDataSample) else sample
    predicted = fields["pred_instances"]
    check_finite(
        f"image {fields.get('img_path')}", DIVERGED, scores=predicted["scores"], bboxes=predicted["bboxes"]
    )
    height, width = (int(size) for size in fields["ori_shape"][:2])
    order = torch.argsort(predicted["scores"], descending=True, stable=True)
    return {
        "file": fields.get("img_path"),
        "height": height,
        "width": width,
        "detections": [
            {
                "class": classes[int(predicted["labels"][i])],
                "label": int(predicted["labels"][i]),
                "score": round(float(predicted["scores"][i]), 5),
                "bbox_xyxy": [round(float(edge), 2) for edge in predicted["bboxes"][i]],
            }
            for i in order.tolist()
            if predicted["scores"][i] >= score_thr
        ],
    }


def write_detections_file(path: str | Path, images: list[dict[str, Any]]) -> None:
    """Write the results of :func:`detections_of` for some images as a JSON list with one line per image."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("[\n" + ",\n".join(map(json.dumps, images)) + "\n]\n")


def _checked_device(device: str | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device {device!r} is not available: {str(error).splitlines()[0]}") from error


def _test_dataset(cfg: Config) -> dict:
    for key in ("test_dataloader", "val_dataloader"):
        if cfg.get(key):
            return cfg[key]["dataset"]
    raise ConfigError(f"config {cfg.filename} has neither test_dataloader nor val_dataloader")


def _test_pipeline(cfg: Config) -> list[dict]:
    """Return the test pipeline without the steps that need annotations."""
    steps = _test_dataset(cfg).get("pipeline")
    if not steps:
        raise ConfigError(f"config {cfg.filename}: test_dataloader.dataset has no pipeline")
    return [step for step in steps if "LoadAnnotations" not in str(step.get("type"))]


def _dataset_meta(cfg: Config, checkpoint: dict) -> dict:
    """Return the data set's meta information, with ``classes``, from a checkpoint or else from the config."""
    meta = checkpoint.get("meta", {}) if isinstance(checkpoint.get("meta"), dict) else {}
    found = meta.get("dataset_meta") or _test_dataset(cfg).get("metainfo") or {}
    classes = found.get("classes") or found.get("CLASSES") or meta.get("CLASSES")
    if classes is None:
        raise ConfigError(
            "neither the checkpoint nor the config names the classes. Name them with "
            "--cfg-options test_dataloader.dataset.metainfo.classes=\"('a','b')\""
        )
    return {**found, "classes": tuple(classes)}
