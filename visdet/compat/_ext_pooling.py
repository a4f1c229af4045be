"""The functions of ``mmcv._ext`` that pool regions of other forms, correlate maps, and grow labels."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from visdet.ops.mmcv import aligned_pooling, map_correlation
from visdet.ops.mmcv.label_growth import contour_expand, pixel_group

from ._gradients import add_gradients, choice, write

__all__ = [
    "bezier_align_backward",
    "bezier_align_forward",
    "border_align_backward",
    "border_align_forward",
    "contour_expand",
    "correlation_backward",
    "correlation_forward",
    "pixel_group",
    "prroi_pool_backward",
    "prroi_pool_coor_backward",
    "prroi_pool_forward",
    "psamask_backward",
    "psamask_forward",
    "tin_shift_backward",
    "tin_shift_forward",
]


def border_align_forward(
    input: Tensor, boxes: Tensor, output: Tensor, argmax_idx: Tensor, pool_size: int
) -> None:
    pooled, place = aligned_pooling.border_samples(input, boxes, pool_size)
    write("border_align_forward", "output", output, pooled)
    write("border_align_forward", "argmax_idx", argmax_idx, place)


def border_align_backward(
    grad_output: Tensor, boxes: Tensor, argmax_idx: Tensor, grad_input: Tensor, pool_size: int
) -> None:
    def sample(input: Tensor) -> Tensor:
        return aligned_pooling.border_samples(input, boxes, pool_size, argmax_idx)[0]

    # Samples are linear in the map, so that their gradient does not depend on it.
    input = torch.zeros_like(grad_input)
    add_gradients("border_align_backward", sample, [input], grad_output, [grad_input])


def _bezier_align(beziers: Tensor, settings: dict) -> Callable[[Tensor], Tensor]:
    size = (settings["aligned_height"], settings["aligned_width"])
    rest = settings["spatial_scale"], settings["sampling_ratio"], settings["aligned"]
    return lambda input: aligned_pooling.bezier_align(input, beziers, size, *rest)


def bezier_align_forward(input: Tensor, rois: Tensor, output: Tensor, **settings: Any) -> None:
    write("bezier_align_forward", "output", output, _bezier_align(rois, settings)(input))


def bezier_align_backward(grad_output: Tensor, rois: Tensor, grad_input: Tensor, **settings: Any) -> None:
    input = torch.zeros_like(grad_input)
    pool = _bezier_align(rois, settings)
    add_gradients("bezier_align_backward", pool, [input], grad_output, [grad_input])


def prroi_pool_forward(
    input: Tensor,
    rois: Tensor,
    output: Tensor,
    pooled_height: int,
    pooled_width: int,
    spatial_scale: float,
) -> None:
    pooled = aligned_pooling.prroi_pool(input, rois, (pooled_height, pooled_width), spatial_scale)
    write("prroi_pool_forward", "output", output, pooled)


def prroi_pool_backward(
    grad_output: Tensor,
    rois: Tensor,
    grad_input: Tensor,
    pooled_height: int,
    pooled_width: int,
    spatial_scale: float,
) -> None:
    def pool(input: Tensor) -> Tensor:
        return aligned_pooling.prroi_pool(input, rois, (pooled_height, pooled_width), spatial_scale)

    input = torch.zeros_like(grad_input)
    add_gradients("prroi_pool_backward", pool, [input], grad_output, [grad_input])


def prroi_pool_coor_backward(
    output: Tensor,
    grad_output: Tensor,
    input: Tensor,
    rois: Tensor,
    grad_rois: Tensor,
    pooled_height: int,
    pooled_width: int,
    spatial_scale: float,
) -> None:
    def pool(rois: Tensor) -> Tensor:
        return aligned_pooling.prroi_pool(input, rois, (pooled_height, pooled_width), spatial_scale)

    add_gradients("prroi_pool_coor_backward", pool, [rois], grad_output, [grad_rois])


def _psa_mask(entry: str, psa_type: int, settings: dict) -> Callable[[Tensor], Tensor]:
    name = choice(entry, "psa_type", psa_type, map_correlation.PSA_TYPES)
    size = (settings["h_mask"], settings["w_mask"])
    return lambda input: map_correlation.psa_mask(input, name, size)


def psamask_forward(input: Tensor, output: Tensor, psa_type: int, **settings: int) -> None:
    write("psamask_forward", "output", output, _psa_mask("psamask_forward", psa_type, settings)(input))


def psamask_backward(grad_output: Tensor, grad_input: Tensor, psa_type: int, **settings: int) -> None:
    attend = _psa_mask("psamask_backward", psa_type, settings)
    add_gradients("psamask_backward", attend, [torch.zeros_like(grad_input)], grad_output, [grad_input])


def _correlation(settings: dict) -> Callable[[Tensor, Tensor], Tensor]:
    names = ("k", "patch", "d", "pad", "dilation", "dilation_patch")
    sizes = [(settings[f"{name}H"], settings[f"{name}W"]) for name in names]
    return lambda one, other: map_correlation.correlation(one, other, *sizes)


def correlation_forward(input1: Tensor, input2: Tensor, output: Tensor, **settings: int) -> None:
    write("correlation_forward", "output", output, _correlation(settings)(input1, input2))


def correlation_backward(
    grad_output: Tensor,
    input1: Tensor,
    input2: Tensor,
    grad_input1: Tensor,
    grad_input2: Tensor,
    **settings: int,
) -> None:
    outputs = [grad_input1, grad_input2]
    correlate = _correlation(settings)
    add_gradients("correlation_backward", correlate, [input1, input2], grad_output, outputs)


def tin_shift_forward(input: Tensor, shift: Tensor, output: Tensor) -> None:
    write("tin_shift_forward", "output", output, map_correlation.tin_shift(input, shift))


def tin_shift_backward(grad_output: Tensor, shift: Tensor, grad_input: Tensor) -> None:
    write("tin_shift_backward", "grad_input", grad_input, map_correlation.tin_shift(grad_output, -shift))
