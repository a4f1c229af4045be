"""What a config and a checkpoint say about detecting objects in images."""

from typing import Any

import torch
from mmengine.config import Config
from torch import nn

from visdet.checks.heads import classes_of_heads
from visdet.errors import listed
from visdet.registry import DATASETS, MODELS
from visdet.structures import DetDataSample
from visdet.structures.class_names import checked_classes

from ..checkpoints.class_names import class_lists, lists_of_checkpoint
from ..checkpoints.held_config import meta_of
from ..config.load import dataset_config
from ..errors import ConfigError, UserError, first_line
from ..process.console import say


def model_class(cfg: Config) -> Any:
    if not cfg.get("model"):
        raise ConfigError(f"config {cfg.filename or ''} lacks model")
    model = cfg.model
    return type(model) if isinstance(model, nn.Module) else MODELS.get(model.get("type"))


def takes_images(cfg: Config) -> bool:
    """Return whether the samples of a config's model are single images."""
    return issubclass(getattr(model_class(cfg), "sample_type", DetDataSample), DetDataSample)


def checked_device(device: str | torch.device | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        probe = torch.zeros(1, device=device)
        probe.item()  # Device 'meta' holds no values.
        return probe.device
    except (RuntimeError, AssertionError, TypeError) as error:
        raise UserError(f"device {device!r} is not available: {first_line(error)}") from error


def _test_dataset(cfg: Config) -> dict:
    for split in ("test", "val"):
        if cfg.get(f"{split}_dataloader"):
            return dataset_config(cfg, split)
    raise ConfigError(f"config {cfg.filename} has neither test_dataloader nor val_dataloader")


def test_pipeline(cfg: Config) -> list[dict]:
    """Return the test pipeline without the steps that need annotations."""
    steps = _test_dataset(cfg).get("pipeline")
    if not steps:
        raise ConfigError(f"config {cfg.filename}: test_dataloader.dataset has no pipeline")
    return [step for step in steps if "LoadAnnotations" not in str(step.get("type"))]


def dataset_meta_of(cfg: Config, checkpoint: dict, path: str | None, model: nn.Module) -> dict:
    """Return the data set's meta information, with ``classes``, from a checkpoint or else from the config."""
    meta = meta_of(checkpoint)
    dataset = _test_dataset(cfg)
    older_names = meta.get("CLASSES")
    of_checkpoint = meta.get("dataset_meta") or (older_names and {"classes": older_names})
    metainfo = dataset.get("metainfo")
    found = of_checkpoint or metainfo or {}
    owner = "test_dataloader.dataset.metainfo"
    if of_checkpoint:
        owner = f"checkpoint {path}: meta['dataset_meta']"
    if not found:
        default = getattr(DATASETS.get(dataset.get("type")), "METAINFO", {})
        # Weights of other projects name no classes.
        if not checkpoint or len(default.get("classes", ())) in classes_of_heads(model).values():
            found = default
    if not isinstance(found, dict):
        return checked_classes(found, owner)
    named = found.get
    classes = named("classes") or named("CLASSES") or older_names
    if classes is None:
        raise ConfigError(
            "neither the checkpoint nor the config names the classes. Name them with "
            "--cfg-options test_dataloader.dataset.metainfo.classes=\"('a','b')\""
        )
    trained = lists_of_checkpoint(checkpoint).get("classes")
    given = class_lists(metainfo).get("classes")
    if trained and given and set(trained) != set(given):
        say(
            f"the classes are those of the checkpoint, {listed(trained)}, and not the config's {listed(given)}"
        )
    return checked_classes({**found, "classes": classes}, owner)
