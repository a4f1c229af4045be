"""The parameters of a model, and the operations that it computes for one sample."""

import copy
from math import prod
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from mmengine.registry import init_default_scope
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from visdet.checks.state_dicts import parameters_of
from visdet.errors import ConfigError, MissingFileError
from visdet.registry import DATASETS

from .config.build_errors import build_model
from .config.files import read_config
from .config.load import build_dataset, complete_config, dataset_config
from .inference.detector import Detector, takes_images
from .inference.given_images import GivenImage
from .stages import StagedModel

__all__ = ["model_summary"]

_PER_SAMPLE = 10  # Four taps and a weight are multiplied and added for each channel of a sampling point.


def model_summary(cfg: Config, shape: tuple[int, int] | None = None) -> str:
    """Return a table of the parameters and the FLOPs of each part of a config's model.

    A multiplication and an addition are two operations. Those of convolutions, products of matrices, attention and
    sampling are counted, as torch.utils.flop_counter does, for the prediction of one image, of a drawn frame of six
    cameras, or of a sample of the test set.

    Args:
        cfg: the config.
        shape: the (height, width) of the image before the test pipeline. The default is the size that the pipeline
            resizes to.

    Raises:
        ConfigError: the pipeline resizes to no size, and none is given.
    """
    cfg = copy.deepcopy(cfg)
    complete_config(cfg)
    init_default_scope(cfg.default_scope)
    if takes_images(cfg):
        detector = Detector(cfg, device="cpu")
        height, width = shape or resized_to(cfg)
        model: Any = detector.model
        what = f"an image of {height} x {width} pixels (height x width)"
        items = [detector.item_of(GivenImage(pixels=np.zeros((height, width, 3), np.uint8)))]
    else:
        model = build_model(cfg, cfg.model).eval()
        try:
            *items, what = _samples(cfg)
        except (MissingFileError, ConfigError) as error:
            return "\n".join([*_rows(model, {}), f"FLOPs are not counted without a sample: {error}"])
    # The counter fails on a parameter that learns and that a part gets as an argument.
    frames = StagedModel(copy.deepcopy(model).requires_grad_(False))
    with torch.no_grad():
        for item in items:
            counter = FlopCounterMode(display=False, custom_mapping=_formulas())  # The last one counts.
            with counter:
                frames.test_step(pseudo_collate([item]))
    counts = {name: sum(by_operator.values()) for name, by_operator in counter.get_flop_counts().items()}
    return "\n".join([*_rows(model, counts), f"FLOPs are those of the prediction for {what}."])


def _samples(cfg: Config) -> tuple[Any, Any, str]:
    """Return two samples, the second of which may follow on the first, and what they are.

    Frames of six cameras are drawn, which takes less time than the data set of the config and needs no download.
    """
    dataset = dataset_config(cfg, "test")
    cameras = dataset.get("num_cameras", 6)
    augmentation = dataset.get("data_aug_conf")
    if augmentation is None or cameras != 6:
        built = build_dataset(cfg, "test")
        return built[0], built[min(1, len(built) - 1)], "a sample of the test set"
    size = height, width = augmentation["final_dim"]
    drawn = read_config("visdet::_base_/datasets/driving_scenes").test_dataloader.dataset
    drawn.data_aug_conf.update(final_dim=size, H=height, W=width)
    scenes = dict(num_train=1, num_val=1, num_test=1, num_frames=2, image_size=size)
    with TemporaryDirectory() as folder:
        built = DATASETS.build({**drawn, "data_root": folder, "generator": scenes})
        earlier = built[0]
        frame = built[1]
    return earlier, frame, f"a frame of six images of {height} x {width} pixels that follows on another"


def resized_to(cfg: Config) -> tuple[int, int]:
    """Return the (height, width) of the images that the test pipeline makes."""
    dataset = dataset_config(cfg, "test")
    given = dataset.get
    for step in given("pipeline", ()):
        if step.get("type") == "Resize" and isinstance(step.get("scale"), list | tuple):
            width, height = step["scale"]
            return height, width
    if given("type") == "ShapesDataset":
        side = given("generator", {}).get("image_size", 128)
        return side, side
    raise ConfigError(
        "the test pipeline does not resize images to one size: give the size by --shape HEIGHT WIDTH"
    )


def _formulas() -> dict[Any, Any]:
    """Return the formulas of visdet's sampling operators. They get the shapes of the arguments."""
    operators = torch.ops.visdet
    return {
        operators.ms_deform_attn: _of_attention,
        operators.ms_deform_attn_fused: _of_fused_attention,
        operators.deformable_aggregation: _of_aggregation,
        operators.deformable_aggregation_fused: _of_fused_aggregation,
    }


def _of_attention(value: Any, _shapes: Any, _starts: Any, _locations: Any, weights: Any, **_: Any) -> int:
    *_, channels = value
    return _PER_SAMPLE * prod(weights) * channels


def _of_fused_attention(
    value: Any, _shapes: Any, _starts: Any, _points: Any, _offsets: Any, logits: Any, *_: Any, **__: Any
) -> int:
    return _of_attention(value, None, None, None, logits)


def _of_aggregation(
    features: Any, _shapes: Any, _starts: Any, _locations: Any, weights: Any, **_: Any
) -> int:
    *_, channels = features
    *samples, _groups = weights
    return _PER_SAMPLE * prod(samples) * channels


def _of_fused_aggregation(
    features: Any,
    _shapes: Any,
    _starts: Any,
    points: Any,
    projection: Any,
    _sizes: Any,
    logits: Any,
    *_: Any,
    **__: Any,
) -> int:
    *_, channels = features
    *key_points, _xyz = points
    _, cameras, *_ = projection
    *_, levels, _points, _groups = logits
    return _PER_SAMPLE * prod(key_points) * cameras * levels * channels


def _flops_of(part: str, counts: dict[str, int]) -> int:
    """Return the FLOPs of a part, whose own parts may be called by others than itself."""
    names = [name for name in counts if f"{name}.".startswith(f"{part}.")]
    inner = tuple(f"{name}." for name in names)
    return sum(counts[name] for name in names if not name.startswith(inner))


def _rows(model: nn.Module, counts: dict[str, int]) -> list[str]:
    root = type(model).__name__
    parts = {name: part for name, part in model.named_children() if list(part.parameters())}
    rows = [("part", "parameters", "trained", "FLOPs")]
    for name, part in [*parts.items(), ("all", model)]:
        total, trained = parameters_of(part)
        flops = _flops_of("Global" if part is model else f"{root}.{name}", counts)
        rows.append((name, f"{total:,}", f"{trained:,}", f"{flops / 1e9:.3f} G" if counts else "-"))
    first, *others = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([name.ljust(first), *map(str.rjust, numbers, others)]) for name, *numbers in rows]
