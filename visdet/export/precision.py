"""Image features in 16 bit. They are most of the work, and what follows them needs float32.

Coordinates, softmax over points, boxes, projections and the temporal state come after the neck. Conversions stand in
the graph before the backbone and after the neck. If the features of a detector of images are in bfloat16, linear layers
multiply in it, too.
"""

import copy
import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from visdet.execution.tensor_tree import map_tensors

from .errors import ExportError


class Tolerance(NamedTuple):
    """How far an exported model may be from the model.

    Attributes:
        difference: the greatest difference of an output from that of the model in the same precision, relative to its
            largest number. loss: the greatest loss of a metric from the model in float32.
        of_the_mean: whether ``difference`` is that of the mean over an output, instead of the largest one. Compilers
            round to 16 bit at other places than torch does, so that one query may take the place of another one of
            nearly its score.
    """

    difference: float
    loss: float
    of_the_mean: bool = True


LIMITS = {
    "float32": Tolerance(1e-3, 0.001, of_the_mean=False),
    "float16": Tolerance(1e-2, 0.002),
    "bfloat16": Tolerance(5e-2, 0.005),
    "int8": Tolerance(math.inf, 0.01),  # The loss alone counts.
}
_FEATURES = ("backbone", "neck", "img_backbone", "img_neck")


def is_in_bfloat16(model: nn.Module) -> bool:
    """Return whether some of a model's weights, such as those of its features, are in bfloat16."""
    return any(weight.dtype == torch.bfloat16 for weight in model.parameters())


def with_features_in(model: nn.Module, precision: str) -> nn.Module:
    """Return the model, or for 16 bit a copy of it whose backbone and neck have weights and compute in 16 bit."""
    if precision in ("float32", "int8"):  # A format quantises what it has written.
        return model
    model = copy.deepcopy(model)
    dtype = getattr(torch, precision)
    parts = [part for name, part in model.named_children() if name in _FEATURES]
    if not parts:
        raise ExportError(
            f"precision {precision!r} is that of image features, which {type(model).__name__} has not"
        )

    def to_16_bit(_: nn.Module, given: Any) -> Any:
        return map_tensors(partial(Tensor.to, dtype=dtype), given)

    def to_float32(_: nn.Module, __: Any, maps: Any) -> Any:
        return map_tensors(Tensor.float, maps)

    for part in parts:
        part.to(dtype).register_forward_pre_hook(to_16_bit)
        part.register_forward_hook(to_float32)
    return model
