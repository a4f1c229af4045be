"""The functions of ``mmcv._ext`` for deformable and masked convolution, CARAFE and deformable attention."""

from typing import Any

import torch
from torch import Tensor

from visdet import ops

from ._gradients import add_gradients, write

__all__ = [
    "carafe_backward",
    "carafe_forward",
    "carafe_naive_backward",
    "carafe_naive_forward",
    "deform_conv_backward_input",
    "deform_conv_backward_parameters",
    "deform_conv_forward",
    "masked_col2im_forward",
    "masked_im2col_forward",
    "modulated_deform_conv_backward",
    "modulated_deform_conv_forward",
    "ms_deform_attn_backward",
    "ms_deform_attn_forward",
]


def _deform_settings(settings: dict) -> tuple:
    stride = (settings["dH"], settings["dW"])
    padding = (settings["padH"], settings["padW"])
    dilation = (settings["dilationH"], settings["dilationW"])
    return stride, padding, dilation, settings["group"], settings["deformable_group"]


def deform_conv_forward(
    input: Tensor,
    weight: Tensor,
    offset: Tensor,
    output: Tensor,
    columns: Tensor,
    ones: Tensor,
    **settings: Any,
) -> None:
    convolved = ops.deform_conv2d(input, offset, weight, *_deform_settings(settings))
    write("deform_conv_forward", "output", output, convolved)


def deform_conv_backward_input(
    input: Tensor,
    offset: Tensor,
    grad_output: Tensor,
    grad_input: Tensor,
    grad_offset: Tensor,
    weight: Tensor,
    columns: Tensor,
    **settings: Any,
) -> None:
    def convolve(input: Tensor, offset: Tensor) -> Tensor:
        return ops.deform_conv2d(input, offset, weight, *_deform_settings(settings))

    add_gradients(
        "deform_conv_backward_input", convolve, [input, offset], grad_output, [grad_input, grad_offset]
    )


def deform_conv_backward_parameters(
    input: Tensor,
    offset: Tensor,
    grad_output: Tensor,
    grad_weight: Tensor,
    columns: Tensor,
    ones: Tensor,
    **settings: Any,
) -> None:
    def convolve(weight: Tensor) -> Tensor:
        return ops.deform_conv2d(input, offset, weight, *_deform_settings(settings))

    scaled, weight = grad_output * settings["scale"], torch.zeros_like(grad_weight)
    add_gradients("deform_conv_backward_parameters", convolve, [weight], scaled, [grad_weight])


def _modulated_settings(settings: dict) -> tuple:
    pairs = ((settings[f"{name}_h"], settings[f"{name}_w"]) for name in ("stride", "pad", "dilation"))
    return (*pairs, settings["group"], settings["deformable_group"])


def _from_start(maps: Tensor, size: torch.Size) -> Tensor:
    """Return an offset or a mask [B, C, H, W] for an output of another size.

    mmcv's C++ does not compare the sizes. It reads the memory of each image from its start as if it were of the size of
    the output. DyHead relies on that.
    """
    if maps.dim() != 4 or maps.shape[2:] == size or maps.shape[2:].numel() < size.numel():
        return maps
    return maps.flatten(1)[:, : maps.shape[1] * size.numel()].unflatten(1, (maps.shape[1], *size))


def modulated_deform_conv_forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    ones: Tensor,
    offset: Tensor,
    mask: Tensor,
    output: Tensor,
    columns: Tensor,
    **settings: Any,
) -> None:
    given_bias = bias if settings["with_bias"] else None
    offset, mask = (_from_start(maps, output.shape[2:]) for maps in (offset, mask))
    arguments = (input, offset, mask, weight, given_bias, *_modulated_settings(settings))
    convolved = ops.modulated_deform_conv2d(*arguments)
    write("modulated_deform_conv_forward", "output", output, convolved)


def modulated_deform_conv_backward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    ones: Tensor,
    offset: Tensor,
    mask: Tensor,
    columns: Tensor,
    grad_input: Tensor,
    grad_weight: Tensor,
    grad_bias: Tensor,
    grad_offset: Tensor,
    grad_mask: Tensor,
    grad_output: Tensor,
    **settings: Any,
) -> None:
    has_bias = settings["with_bias"]

    def convolve(input: Tensor, offset: Tensor, mask: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        given_bias = bias if has_bias else None
        offset, mask = (_from_start(maps, grad_output.shape[2:]) for maps in (offset, mask))
        arguments = (input, offset, mask, weight, given_bias, *_modulated_settings(settings))
        return ops.modulated_deform_conv2d(*arguments)

    outputs = [grad_input, grad_offset, grad_mask, grad_weight, grad_bias if has_bias else None]
    add_gradients(
        "modulated_deform_conv_backward", convolve, [input, offset, mask, weight, bias], grad_output, outputs
    )


def masked_im2col_forward(
    features: Tensor,
    mask_h_idx: Tensor,
    mask_w_idx: Tensor,
    data_col: Tensor,
    kernel_h: int,
    kernel_w: int,
    pad_h: int,
    pad_w: int,
) -> None:
    """Write the pixels of the window at each unmasked place to a column. Pixels outside the map are 0.

    Raises:
        ValueError: ``data_col`` is not [C * kernel_h * kernel_w, number of places].
    """
    C, H, W = features.shape[1:]
    expected = [C * kernel_h * kernel_w, len(mask_h_idx)]
    if list(data_col.shape) != expected:
        raise ValueError(
            f"mmcv._ext.masked_im2col_forward: data_col must be {expected}, got {list(data_col.shape)}"
        )
    row = mask_h_idx - pad_h + torch.arange(kernel_h, device=features.device)[:, None, None]
    column = mask_w_idx - pad_w + torch.arange(kernel_w, device=features.device)[:, None]
    is_inside = (row >= 0) & (row < H) & (column >= 0) & (column < W)
    padded = torch.nn.functional.pad(features[0], (0, 1, 0, 1))  # An empty map then has a pixel to read.
    taps = torch.where(is_inside, padded[:, row.clamp(0, H), column.clamp(0, W)], 0)
    data_col.copy_(taps.reshape(expected))


def masked_col2im_forward(
    col: Tensor,
    mask_h_idx: Tensor,
    mask_w_idx: Tensor,
    output: Tensor,
    height: int,
    width: int,
    channels: int,
) -> None:
    """Write each column to its place in the map. Columns of places outside the map are dropped.

    Raises:
        ValueError: ``output`` is not [1, channels, height, width], or ``col`` is not [channels, number of places].
    """
    if list(output.shape) != [1, channels, height, width]:
        raise ValueError(
            f"mmcv._ext.masked_col2im_forward: output must be {[1, channels, height, width]}, got "
            f"{list(output.shape)}"
        )
    if list(col.shape) != [channels, len(mask_h_idx)]:
        raise ValueError(
            f"mmcv._ext.masked_col2im_forward: col must be {[channels, len(mask_h_idx)]}, got {list(col.shape)}"
        )
    is_inside = (mask_h_idx >= 0) & (mask_h_idx < height) & (mask_w_idx >= 0) & (mask_w_idx < width)
    pixels = height * width
    # An additional place after those of the map takes the columns that are dropped.
    place = torch.where(is_inside, mask_h_idx * width + mask_w_idx, pixels).long()
    filled = torch.nn.functional.pad(output[0].flatten(1), (0, 1)).index_copy(1, place, col)
    output[0] = filled[:, :pixels].view(channels, height, width)


def carafe_naive_forward(
    features: Tensor, masks: Tensor, output: Tensor, kernel_size: int, group_size: int, scale_factor: int
) -> None:
    upsampled = ops.carafe(features, masks, kernel_size, group_size, scale_factor)
    write("carafe_naive_forward", "output", output, upsampled)


def carafe_naive_backward(
    grad_output: Tensor,
    features: Tensor,
    masks: Tensor,
    grad_input: Tensor,
    grad_masks: Tensor,
    kernel_size: int,
    group_size: int,
    scale_factor: int,
) -> None:
    def upsample(features: Tensor, masks: Tensor) -> Tensor:
        return ops.carafe(features, masks, kernel_size, group_size, scale_factor)

    add_gradients("carafe_naive_backward", upsample, [features, masks], grad_output, [grad_input, grad_masks])


def carafe_forward(
    features: Tensor,
    masks: Tensor,
    rfeatures: Tensor,
    routput: Tensor,
    rmasks: Tensor,
    output: Tensor,
    **sizes: int,
) -> None:
    # The wrapper saves rfeatures for the backward pass. mmcv's kernels would write it in channels-last order.
    rfeatures.copy_(features)
    carafe_naive_forward(features, masks, output, **sizes)


def carafe_backward(
    grad_output: Tensor,
    rfeatures: Tensor,
    masks: Tensor,
    rgrad_output: Tensor,
    rgrad_input_hs: Tensor,
    rgrad_input: Tensor,
    rgrad_masks: Tensor,
    grad_input: Tensor,
    grad_masks: Tensor,
    **sizes: int,
) -> None:
    carafe_naive_backward(grad_output, rfeatures, masks, grad_input, grad_masks, **sizes)


def ms_deform_attn_forward(
    value: Tensor,
    level_shapes: Tensor,
    level_starts: Tensor,
    locations: Tensor,
    weights: Tensor,
    im2col_step: int,
) -> Tensor:
    return ops.ms_deform_attn(value, level_shapes, level_starts, locations, weights)


def ms_deform_attn_backward(
    value: Tensor,
    level_shapes: Tensor,
    level_starts: Tensor,
    locations: Tensor,
    weights: Tensor,
    grad_output: Tensor,
    grad_value: Tensor,
    grad_locations: Tensor,
    grad_weights: Tensor,
    im2col_step: int,
) -> None:
    def attend(value: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
        return ops.ms_deform_attn(value, level_shapes, level_starts, locations, weights)

    outputs: list[Tensor | None] = [grad_value, grad_locations, grad_weights]
    add_gradients("ms_deform_attn_backward", attend, [value, locations, weights], grad_output, outputs)
