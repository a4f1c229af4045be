"""The check that a driving model fits the cameras, classes and keys of a data set of driving frames."""

from collections.abc import Iterator
from typing import Any

from torch import nn

from ..errors import ConfigError

# A key of a part of the model, its number, the number of the data set, and the noun that is counted.
_Number = tuple[str, int, int, str]
_NORMALIZES = "NormalizeMultiviewImage"


def check_driving_data(model: nn.Module, loader_name: str, dataset: Any) -> None:
    """Raise an error if the model does not fit the data set of a loop.

    Data sets without cameras are left to others.

    Raises:
        ConfigError: the message names the key of the config, and what the model and the data set have.
    """
    if not hasattr(dataset, "num_cameras") or not hasattr(dataset, "get_info"):
        return
    classes = list(dataset.CLASSES)
    num_classes = len(classes)
    for step in dataset.pipeline.transforms:
        kind = type(step).__name__
        if kind == _NORMALIZES and hasattr(model.data_preprocessor, "mean"):
            raise ConfigError(
                f"the images of {loader_name} would be normalised twice: by {_NORMALIZES} of the pipeline and by the "
                "mean and the std of model.data_preprocessor. Leave out one of them"
            )
        names = list(getattr(step, "classes", None) or classes)
        if names != classes:
            raise ConfigError(
                f"{kind} of {loader_name} is for the classes {names}, but {loader_name}.dataset has {classes}"
            )
        distances = getattr(step, "class_dist_thred", 0.0)
        if isinstance(distances, list | tuple) and len(distances) < num_classes:
            raise ConfigError(
                f"{kind} of {loader_name} would drop all boxes of some classes: class_dist_thred has "
                f"{len(distances)} distances, but {loader_name}.dataset has {num_classes} classes"
            )
    info = dataset.get_info(0)
    is_learnt = loader_name == "train_dataloader"
    for name, module in model.named_modules():
        if hasattr(module, "gt_cls_key") and hasattr(module, "layers"):
            is_map = module.gt_cls_key == "gt_map_labels"
            keys = ["map_annos" if is_map else "gt_boxes"]
            numbers = _numbers_of_head(module, dataset, is_map)
        elif hasattr(module, "motion_anchor"):
            keys = ["gt_agent_fut_trajs", "gt_ego_fut_trajs", "ego_status"]
            numbers = _numbers_of_planner(module, dataset, info)
        else:
            continue
        for key, found, expected, things in numbers:
            if found != expected:
                raise ConfigError(
                    f"model.{name}.{key} is for {found} {things}, but {loader_name}.dataset has {expected}"
                )
        missing = [key for key in keys if key not in info]
        if missing and is_learnt:
            raise ConfigError(
                f"model.{name} learns from {', '.join(missing)}, but frame {info['token']} of {dataset.ann_file} "
                "does not have it. Without it, leave out the head by model.head.task_config"
            )


def _numbers_of_head(head: Any, dataset: Any, is_map: bool) -> Iterator[_Number]:
    classes, kind = (dataset.MAP_CLASSES, "map classes") if is_map else (dataset.CLASSES, "classes")
    count = len(classes)
    for layer in head.layers:
        if hasattr(layer, "num_cams"):
            yield "deformable_model.num_cams", layer.num_cams, dataset.num_cameras, "cameras"
        if getattr(layer, "cls_layers", None) is not None:
            yield "refine_layer.num_cls", layer.num_cls, count, kind
    if hasattr(head.sampler, "num_cls"):
        yield "sampler.num_cls", head.sampler.num_cls, count, kind


def _numbers_of_planner(planner: Any, dataset: Any, info: dict[str, Any]) -> Iterator[_Number]:
    for key, of in (("fut_ts", "gt_agent_fut_trajs"), ("ego_fut_ts", "gt_ego_fut_trajs")):
        if of in info:
            yield key, getattr(planner, key), info[of].shape[-2], f"steps of {of}"
    yield "motion_anchor", len(planner.motion_anchor), len(dataset.CLASSES), "classes"
