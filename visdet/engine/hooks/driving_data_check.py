"""The check that a driving model fits the cameras, classes and keys of a data set of driving frames."""

from collections.abc import Iterator
from typing import Any

from torch import nn

from ..errors import ConfigError


def check_driving_data(model: nn.Module, loader_name: str, dataset: Any) -> None:
    """Raise an error if the model does not fit the data set of a loop.

    Data sets without cameras are left to others.

    Raises:
        ConfigError: the message names the key of the config, and what the model and the data set have.
    """
    if not hasattr(dataset, "num_cameras") or not hasattr(dataset, "get_info"):
        return
    data = f"{loader_name}.dataset"
    for key, found, expected, things in _numbers(model, dataset):
        if found != expected:
            raise ConfigError(f"model.{key} is for {found} {things}, but {data} has {expected}")
    if loader_name == "train_dataloader":
        info = dataset.get_info(0)
        # Each head, and the keys of a frame's record that it learns from.
        needed: list[tuple[str, tuple[str, ...]]] = [
            (name, ("map_annos",) if head.gt_cls_key == "gt_map_labels" else ("gt_boxes",))
            for name, head in _heads(model)
        ]
        planners = [name for name, part in model.named_modules() if hasattr(part, "motion_anchor")]
        needed += [(name, ("gt_agent_fut_trajs", "gt_ego_fut_trajs", "ego_status")) for name in planners]
        for head, keys in needed:
            if missing := [key for key in keys if key not in info]:
                raise ConfigError(
                    f"model.{head} learns from {', '.join(missing)}, but frame {info['token']} of {dataset.ann_file} "
                    f"does not have it. Without it, leave out the head by model.head.task_config"
                )


def _numbers(model: nn.Module, dataset: Any) -> Iterator[tuple[str, int, int, str]]:
    """Yield a key of the model, its number, the number of the data set, and the noun that is counted."""
    for name, head in _heads(model):
        is_map = head.gt_cls_key == "gt_map_labels"
        classes, kind = (dataset.MAP_CLASSES, "map classes") if is_map else (dataset.CLASSES, "classes")
        for layer in head.layers:
            if hasattr(layer, "num_cams"):
                yield f"{name}.deformable_model.num_cams", layer.num_cams, dataset.num_cameras, "cameras"
            if getattr(layer, "cls_layers", None) is not None:
                yield f"{name}.refine_layer.num_cls", layer.num_cls, len(classes), kind
        if hasattr(head.sampler, "num_cls"):
            yield f"{name}.sampler.num_cls", head.sampler.num_cls, len(classes), kind
    info = dataset.get_info(0)
    for name, module in model.named_modules():
        if hasattr(module, "motion_anchor"):
            for key, of in (("fut_ts", "gt_agent_fut_trajs"), ("ego_fut_ts", "gt_ego_fut_trajs")):
                if of in info:
                    yield f"{name}.{key}", getattr(module, key), info[of].shape[-2], f"steps of {of}"
            yield f"{name}.motion_anchor", len(module.motion_anchor), len(dataset.CLASSES), "classes"


def _heads(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if hasattr(module, "gt_cls_key") and hasattr(module, "layers"):
            yield name, module
