"""A check that model and data speak of the same number of classes."""

from mmengine.hooks import Hook
from mmengine.model import is_model_wrapper
from torch.utils.data import Dataset

from visdet.registry import HOOKS

from ..errors import ConfigError

__all__ = ["NumClassCheckHook"]


@HOOKS.register_module()
class NumClassCheckHook(Hook):
    """Compares ``num_classes`` of the model's heads with the classes of every data set of the run, before it starts.

    Raises:
        ConfigError: names the head, the data set and both numbers.

    Source: the name is mmdet's, whose hook looks at epoch starts.
    """

    def before_run(self, runner) -> None:
        """Compare the data sets of the loops that were built."""
        model = runner.model.module if is_model_wrapper(runner.model) else runner.model
        heads = {
            name: module
            for name, module in model.named_modules()
            if isinstance(getattr(module, "num_classes", None), int)
            and "head" in f"{name} {type(module)}".lower()
        }
        for loader_name in ("train", "val", "test"):
            loop = getattr(runner, f"_{loader_name}_loop")
            if hasattr(loop, "dataloader"):
                for head_name, head in heads.items():
                    _compare(
                        head_name, head.num_classes, f"{loader_name}_dataloader", loop.dataloader.dataset
                    )


def _compare(head_name: str, num_classes: int, loader_name: str, dataset: Dataset) -> None:
    classes = (getattr(dataset, "metainfo", None) or {}).get("classes")
    if classes is None or len(classes) == num_classes:
        return
    shown = ", ".join(classes[:6]) + (", ..." if len(classes) > 6 else "")
    raise ConfigError(
        f"model.{head_name}.num_classes is {num_classes}, but {loader_name}.dataset ({type(dataset).__name__}) has "
        f"{len(classes)} classes ({shown}). Set model.{head_name}.num_classes={len(classes)}, or name the classes "
        "to train on in the data set's metainfo"
    )
