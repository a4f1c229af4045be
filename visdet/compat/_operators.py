"""Replacements of the operator for each form in which other packages define it.

A replacement uses visdet's operator where it can, and otherwise calls the original.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ._attention import attend, attend_ragged, is_known, takes
from ._bridge import Bridge

__all__ = [
    "BoundFunction",
    "channels_first_function",
    "class_forward",
    "function",
    "ragged_function",
    "replace_function",
]


def replace_function(
    module: ModuleType,
    bridge: Bridge,
    name: str,
    form: Callable[[Callable[..., Tensor]], Callable[..., Tensor]],
    *layouts: str,
) -> Iterator[str]:
    """Replace a function that computes the operator, if it is known, and yield its name.

    Args:
        module, name: where it is.
        bridge: the bridge.
        form: the function of this module that makes the replacement.
        layouts: the layouts of its arguments; see ``is_known``.
    """
    original: Any = vars(module).get(name)
    replacement = form(original)
    if is_known(bridge, module, name, original, replacement, *layouts):
        bridge.replace(module, name, replacement)
        yield name


def class_forward(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a forward for the class ``MultiScaleDeformableAttention``."""

    @functools.wraps(original)
    def forward(
        self: Any,
        value: Tensor,
        value_spatial_shapes: Tensor,
        value_spatial_shapes_list: Sequence[tuple[int, int]],
        level_start_index: Tensor,
        sampling_locations: Tensor,
        attention_weights: Tensor,
        im2col_step: int,
    ) -> Tensor:
        if takes(value):
            return attend(value, value_spatial_shapes_list, sampling_locations, attention_weights)
        tables = value_spatial_shapes, value_spatial_shapes_list, level_start_index
        return original(self, value, *tables, sampling_locations, attention_weights, im2col_step)

    return forward


def function(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function ``multi_scale_deformable_attention`` or ``multi_scale_deformable_attn_pytorch``.

    The locations may be [B, Q, G, L, P, 2] or [B, Q, G, L * P, 2].
    """

    @functools.wraps(original)
    def attention(
        value: Tensor,
        value_spatial_shapes: Any,
        sampling_locations: Tensor,
        attention_weights: Tensor,
    ) -> Tensor:
        if not takes(value):
            return original(value, value_spatial_shapes, sampling_locations, attention_weights)
        if sampling_locations.dim() == 5:
            levels = len(value_spatial_shapes), -1
            sampling_locations = sampling_locations.unflatten(3, levels)
            attention_weights = attention_weights.unflatten(3, levels)
        return attend(value, value_spatial_shapes, sampling_locations, attention_weights)

    return attention


def channels_first_function(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function ``ms_deform_attn_core_pytorch``, whose values are [B, G, C, S]. Its exports fold the points."""

    @functools.wraps(original)
    def attention(
        value: Tensor,
        value_spatial_shapes: Tensor,
        sampling_locations: Tensor,
        attention_weights: Tensor,
        value_spatial_shapes_hw: list[tuple[int, int]] | None = None,
    ) -> Tensor:
        shapes = value_spatial_shapes if value_spatial_shapes_hw is None else value_spatial_shapes_hw
        if sampling_locations.dim() == 6 and takes(value):
            weights = attention_weights.view(sampling_locations.shape[:-1])
            return attend(value.permute(0, 3, 1, 2), shapes, sampling_locations, weights)
        arguments = value, value_spatial_shapes, sampling_locations, attention_weights
        return original(*arguments, value_spatial_shapes_hw)

    return attention


def ragged_function(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function ``multi_scale_deformable_attention_v2``. visdet computes only its method "default".

    The values may also be a sequence of levels [B, G, C, H * W]. ``options`` may hold ``value_shape``, which names one
    of these layouts.
    """

    @functools.wraps(original)
    def attention(
        value: Tensor | Sequence[Tensor],
        value_spatial_shapes: Any,
        sampling_locations: Tensor,
        attention_weights: Tensor,
        num_points_list: list[int],
        method: str = "default",
        **options: Any,
    ) -> Tensor:
        samples = value_spatial_shapes, sampling_locations, attention_weights, num_points_list
        one = value if isinstance(value, Tensor) else value[0]
        if method == "default" and options.keys() <= {"value_shape"} and takes(one):
            rows = value if isinstance(value, Tensor) else torch.cat(tuple(value), 3).permute(0, 3, 1, 2)
            return attend_ragged(rows, *samples)
        return original(value, *samples, method, **options)

    return attention


class BoundFunction:
    """A data descriptor for an attribute in which instances keep a function.

    If an instance stores the original function, reading the attribute gives the replacement. Copies and pickles of
    models therefore hold the original, and the replacement also serves models that were built earlier.
    """

    def __init__(self, name: str, original: Any, replacement: Any) -> None:
        self.name = name
        self.original = original
        self.replacement = replacement

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        stored = vars(instance).get(self.name)
        return self.replacement if stored is self.original else stored

    def __set__(self, instance: Any, value: Any) -> None:
        vars(instance)[self.name] = self.original if value is self.replacement else value
