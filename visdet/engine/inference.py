"""A trained model on image files."""

import copy
import json
import os
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config
from mmengine.dataset import Compose, pseudo_collate
from mmengine.registry import init_default_scope
from mmengine.visualization import Visualizer
from torch import nn

from visdet.registry import MODELS
from visdet.structures import DetDataSample

from .checkpoint import read_checkpoint, register_checkpoint_readers
from .config import complete_config
from .errors import ConfigError, UserError
from .picture_paths import PicturePaths
from .sample_images import image_file_of
from .weights import load_weights, weights_of

__all__ = ["Detector", "detect_files", "detections_of", "find_images", "write_detections_file"]

_IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".gif"}


class Detector:
    """A model built from a config, with a checkpoint's weights, and the config's test pipeline.

    Args:
        cfg: the config the checkpoint was trained with.
        checkpoint: a file or an http(s) address.
        device: where to run; default: the GPU if there is one.

    Attributes:
        dataset_meta: ``classes`` and ``palette``, from the checkpoint or else from the config's test data
            set.

    Raises:
        CheckpointError: the checkpoint is missing, damaged, or of another model.
        ConfigError: the config has no test pipeline, or neither it nor the checkpoint names the classes.
        UserError: the device is not there.
    """

    def __init__(self, cfg: Config, checkpoint: str, device: str | None = None) -> None:
        cfg = copy.deepcopy(cfg)
        complete_config(cfg)
        init_default_scope(cfg.default_scope)
        trust = bool(cfg.get("trust_checkpoint", False))
        register_checkpoint_readers(trust)
        self.device = _checked_device(device)
        content = read_checkpoint(checkpoint, trust=trust)
        self.model: nn.Module = MODELS.build(cfg.model)
        _check_takes_images(self.model)
        self.dataset_meta = _dataset_meta(cfg, content)
        load_weights(self.model, weights_of(content, checkpoint), checkpoint, cfg.get("strict_load", True))
        self.model.to(self.device).eval()
        self._pipeline = Compose(_test_pipeline(cfg))

    @torch.no_grad()
    def __call__(self, path: str | Path) -> DetDataSample:
        """Return the detections of one image file, boxes xyxy in pixels of the file.

        Raises:
            ValueError, FileNotFoundError: the file is no image, or not there; named in the message.
        """
        item = self._pipeline({"img_path": str(path), "img_id": 0})
        model: Any = self.model
        return model.test_step(pseudo_collate([item]))[0].to("cpu")


def _check_takes_images(model: nn.Module) -> None:
    """Raise ConfigError for a model whose samples are no single images; docs/contract.md says what serves these."""
    sample_type = getattr(model, "sample_type", DetDataSample)
    if not issubclass(sample_type, DetDataSample):
        raise ConfigError(
            f"{type(model).__name__} does not take image files: its samples are {sample_type.__name__}s, which a data "
            "set reads with what belongs to them; tools/test.py CONFIG CHECKPOINT --out FILE --show-dir FOLDER "
            "writes and draws the predictions for the data set of the config"
        )


def detect_files(
    detector: Detector, visualizer: Visualizer, images: list[str], out_dir: str, score_thr: float
) -> tuple[list[dict[str, Any]], list[str]]:
    """Detect in image files: ``predictions.json`` in ``out_dir``, and pictures of all in ``pictures/`` beside it.

    Pictures lie in folders as the images do below the folder that they share; see :class:`PicturePaths`.

    Returns:
        The detections of every image, as :func:`detections_of`, and a message for each file that is no image.
    """
    visualizer.dataset_meta = detector.dataset_meta
    root = os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in images])
    pictures = PicturePaths(os.path.join(out_dir, "pictures"))
    found, failures = [], []
    for path in images:
        try:
            sample = detector(path)
        except UserError as error:
            failures.append(str(error))
            continue
        found.append(detections_of(sample, detector.dataset_meta["classes"], score_thr))
        picture = pictures.path_of(os.path.relpath(path, root))
        picture.parent.mkdir(parents=True, exist_ok=True)
        visualizer.add_datasample(
            picture.name,
            image_file_of(sample),
            sample,
            draw_gt=False,
            out_file=str(picture),
            pred_score_thr=score_thr,
        )
    write_detections_file(Path(out_dir, "predictions.json"), found)
    return found, failures


def find_images(path: str) -> list[str]:
    """Return an image file as a list of one, or the image files of a folder and those below it, sorted.

    Raises:
        UserError: nothing is there, or no image.
    """
    if os.path.isfile(path):
        return [path]
    if not os.path.isdir(path):
        raise UserError(f"{path} is neither an image file nor a folder")
    found = sorted(str(file) for file in Path(path).rglob("*") if file.suffix.lower() in _IMAGE_SUFFIXES)
    if not found:
        raise UserError(f"folder {path} has no image ({', '.join(sorted(_IMAGE_SUFFIXES))})")
    return found


def detections_of(sample: Any, classes: tuple[str, ...], score_thr: float = 0.0) -> dict[str, Any]:
    """Return a sample's detections from ``score_thr`` up, best first, in types that JSON knows.

    Args:
        sample: a DetDataSample, or its dict, with ``pred_instances`` and meta information.
        classes: the names of the labels.

    Returns:
        ``file``, ``height``, ``width`` of the image in pixels, and ``detections``: dicts with ``class``,
        ``label``, ``score`` and ``bbox_xyxy`` in pixels of the image.
    """
    fields = sample.to_dict() if isinstance(sample, DetDataSample) else sample
    predicted = fields["pred_instances"]
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
    """Write what :func:`detections_of` gave for some images as a JSON list, an image per line."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("[\n" + ",\n".join(map(json.dumps, images)) + "\n]\n")


def _checked_device(device: str | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device {device!r} is not there: {str(error).splitlines()[0]}") from error


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
    """Return what names the labels: the meta information a checkpoint was saved with, or the config's."""
    meta = checkpoint.get("meta", {}) if isinstance(checkpoint.get("meta"), dict) else {}
    found = meta.get("dataset_meta") or _test_dataset(cfg).get("metainfo") or {}
    classes = found.get("classes") or found.get("CLASSES") or meta.get("CLASSES")
    if classes is None:
        raise ConfigError(
            "neither the checkpoint nor the config says what the classes are called; give them with "
            "--cfg-options test_dataloader.dataset.metainfo.classes=\"('a','b')\""
        )
    return {**found, "classes": tuple(classes)}
