"""The families of models that can be exported, each as a module of named tensors with what a check of it needs."""

from typing import Any

from torch import nn

from visdet.models.deformable_detr.base import DeformableDetectionTransformer
from visdet.models.sparsedrive.sparsedrive import SparseDrive

from ..errors import ExportError
from .family import Family
from .frames import Frames
from .images import Images
from .pictures import Pictures, Steps

# The class of each kind of model. A module of a user's may add its own.
FAMILIES: dict[Any, Any] = {
    DeformableDetectionTransformer: Images,
    SparseDrive: Frames,
}


def family_of(
    model: nn.Module, shape: tuple[int, int] | None, batch: int | None, steps: Steps | None = None
) -> Family:
    """Return a model as a function of named tensors.

    Args:
        model: the model. shape: the (height, width) of its images, or None if any is possible or the model has none.
        batch: the number of images or frames, or None for any.
        steps: the steps before a detector that become part of the graph, which then takes one picture.
    """
    kind = next((family for kind, family in FAMILIES.items() if isinstance(model, kind)), None)
    if kind is None:
        raise ExportError(
            f"{type(model).__name__} cannot be exported. What can are "
            f"{', '.join(sorted(kind.__name__ for kind in FAMILIES))} and their subclasses"
        )
    if steps is None:
        return kind(model, shape, batch)
    if kind is not Images or batch not in (None, 1):
        raise ExportError(
            "a graph with the steps before the model takes one picture of a detector at a time; with --no-embed, it "
            "takes tensors that are resized and normalised before"
        )
    return Pictures(model, shape, steps)
