"""The entries of ``mmcv._ext``: each writes into the tensors mmcv's wrappers allocate, as the compiled ones do.

Backward entries differentiate visdet's operator again from the inputs the wrappers saved.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from visdet import ops
from visdet.ops import ms_deform_attn as _ms_deform_attn
from visdet.ops.nms import SOFT_METHODS, kept_indices, soft_nms_reference
from visdet.ops.roi_pool import roi_pool_with_argmax

_METHODS = dict(enumerate(SOFT_METHODS))


def __getattr__(name: str) -> Callable:
    """Return, for any other operator of mmcv, a function that says what is missing when it is called."""
    if name.startswith("__"):
        raise AttributeError(name)

    def not_provided(*_: Any, **__: Any) -> None:
        raise NotImplementedError(
            f"mmcv._ext.{name}: visdet provides the operators of mmdet, and this is not one of them. Install "
            "mmcv with its compiled operators instead of mmcv-lite: pip uninstall mmcv-lite; pip install mmcv"
        )

    not_provided.__name__ = name
    return not_provided


def _add_gradients(
    function: Callable[..., Tensor], inputs: list[Tensor], grad_output: Tensor, outputs: list[Tensor | None]
) -> None:
    """Write the gradient of ``function(*inputs)`` for each input that has an output tensor."""
    with torch.enable_grad():
        leaves = [
            tensor.detach().requires_grad_(out is not None)
            for tensor, out in zip(inputs, outputs, strict=True)
        ]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        grads = iter(torch.autograd.grad(function(*leaves), wanted, grad_output, allow_unused=True))
    for out in outputs:
        if out is not None and (grad := next(grads)) is not None:
            out.copy_(grad)


def get_compiler_version() -> str:
    return "none: operators by visdet"


def get_compiling_cuda_version() -> str:
    return torch.version.cuda or "not available"


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float, offset: int) -> Tensor:
    return kept_indices(boxes, scores, iou_threshold, offset)


def softnms(
    boxes: Tensor,
    scores: Tensor,
    dets: Tensor,
    iou_threshold: float,
    sigma: float,
    min_score: float,
    method: int,
    offset: int,
) -> Tensor:
    dtype = torch.float64 if boxes.dtype == torch.float64 else torch.float32
    arguments = (iou_threshold, sigma, min_score, _METHODS[method], offset)
    result, keep = soft_nms_reference(boxes.detach().to(dtype), scores.detach().to(dtype), *arguments)
    dets[: len(result)] = result
    return keep


def nms_match(dets: Tensor, iou_threshold: float) -> list[list[int]]:
    return [group.tolist() for group in ops.nms_match(dets, iou_threshold)]


def bbox_overlaps(
    bboxes1: Tensor, bboxes2: Tensor, ious: Tensor, mode: int, aligned: bool, offset: int
) -> None:
    ious.copy_(ops.bbox_overlaps(bboxes1, bboxes2, ("iou", "iof")[mode], aligned, offset))


def _roi_align(rois: Tensor, settings: dict) -> Callable[[Tensor], Tensor]:
    size = (settings["aligned_height"], settings["aligned_width"])
    mode = ("max", "avg")[settings["pool_mode"]]
    scale, ratio, aligned = settings["spatial_scale"], settings["sampling_ratio"], settings["aligned"]
    return lambda input: ops.roi_align(input, rois, size, scale, ratio, mode, aligned)


def roi_align_forward(
    input: Tensor, rois: Tensor, output: Tensor, argmax_y: Tensor, argmax_x: Tensor, **settings: Any
) -> None:
    """For the maximum, ``argmax_y`` carries the map to the backward, whose signature has no input."""
    output.copy_(_roi_align(rois, settings)(input))
    if settings["pool_mode"] == 0:
        argmax_y.set_(input.detach().clone())


def roi_align_backward(
    grad_output: Tensor,
    rois: Tensor,
    argmax_y: Tensor,
    argmax_x: Tensor,
    grad_input: Tensor,
    **settings: Any,
) -> None:
    input = argmax_y if settings["pool_mode"] == 0 else torch.zeros_like(grad_input)  # the mean is linear
    _add_gradients(_roi_align(rois, settings), [input], grad_output, [grad_input])


def roi_pool_forward(
    input: Tensor,
    rois: Tensor,
    output: Tensor,
    argmax: Tensor,
    pooled_height: int,
    pooled_width: int,
    spatial_scale: float,
) -> None:
    size = (pooled_height, pooled_width)
    pooled, index = roi_pool_with_argmax(input, rois, size, spatial_scale)
    output.copy_(pooled), argmax.copy_(index)


def roi_pool_backward(
    grad_output: Tensor,
    rois: Tensor,
    argmax: Tensor,
    grad_input: Tensor,
    pooled_height: int,
    pooled_width: int,
    spatial_scale: float,
) -> None:
    counted = torch.where(argmax >= 0, grad_output, 0).flatten(2)
    per_region = grad_output.new_zeros(len(rois), *grad_input.shape[1:]).flatten(2)
    per_region.scatter_add_(2, argmax.clamp(min=0).long().flatten(2), counted)
    grad_input.flatten(2).index_add_(0, rois[:, 0].long(), per_region)


def deform_roi_pool_forward(
    input: Tensor,
    rois: Tensor,
    offset: Tensor,
    output: Tensor,
    pooled_height: int,
    pooled_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    gamma: float,
) -> None:
    size = (pooled_height, pooled_width)
    output.copy_(ops.deform_roi_pool(input, rois, offset, size, spatial_scale, sampling_ratio, gamma))


def deform_roi_pool_backward(
    grad_output: Tensor,
    input: Tensor,
    rois: Tensor,
    offset: Tensor,
    grad_input: Tensor,
    grad_offset: Tensor,
    pooled_height: int,
    pooled_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    gamma: float,
) -> None:
    size = (pooled_height, pooled_width)

    def pool(input: Tensor, offset: Tensor) -> Tensor:
        return ops.deform_roi_pool(input, rois, offset, size, spatial_scale, sampling_ratio, gamma)

    outputs = [grad_input, grad_offset if offset.numel() else None]
    _add_gradients(pool, [input, offset], grad_output, outputs)


def sigmoid_focal_loss_forward(
    input: Tensor, target: Tensor, weight: Tensor, output: Tensor, gamma: float, alpha: float
) -> None:
    output.copy_(ops.sigmoid_focal_loss(input, target, gamma, alpha, _given(weight), "none"))


def sigmoid_focal_loss_backward(
    input: Tensor, target: Tensor, weight: Tensor, grad_input: Tensor, gamma: float, alpha: float
) -> None:
    def loss(input: Tensor) -> Tensor:
        return ops.sigmoid_focal_loss(input, target, gamma, alpha, _given(weight), "none")

    _add_gradients(loss, [input], torch.ones_like(input), [grad_input])


def softmax_focal_loss_forward(
    softmax: Tensor, target: Tensor, weight: Tensor, output: Tensor, gamma: float, alpha: float
) -> None:
    loss = ops.softmax_focal_loss(_logits(softmax), target, gamma, alpha, _given(weight), "none")
    output.copy_(loss)


def softmax_focal_loss_backward(
    softmax: Tensor,
    target: Tensor,
    weight: Tensor,
    buff: Tensor,
    grad_input: Tensor,
    gamma: float,
    alpha: float,
) -> None:
    def loss(logits: Tensor) -> Tensor:
        return ops.softmax_focal_loss(logits, target, gamma, alpha, _given(weight), "none")

    _add_gradients(loss, [_logits(softmax)], torch.ones_like(buff), [grad_input])


def _logits(softmax: Tensor) -> Tensor:
    """Return logits with these probabilities; the wrapper hands over no others."""
    return softmax.clamp(min=torch.finfo(softmax.dtype).tiny).log()


def _given(tensor: Tensor) -> Tensor | None:
    """The wrappers write an absent tensor as an empty one."""
    return tensor if tensor.numel() else None


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
    output.copy_(ops.deform_conv2d(input, offset, weight, *_deform_settings(settings)))


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

    _add_gradients(convolve, [input, offset], grad_output, [grad_input, grad_offset])


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

    _add_gradients(convolve, [torch.zeros_like(grad_weight)], grad_output * settings["scale"], [grad_weight])


def _modulated_settings(settings: dict) -> tuple:
    pairs = ((settings[f"{name}_h"], settings[f"{name}_w"]) for name in ("stride", "pad", "dilation"))
    return (*pairs, settings["group"], settings["deformable_group"])


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
    arguments = (input, offset, mask, weight, given_bias, *_modulated_settings(settings))
    output.copy_(ops.modulated_deform_conv2d(*arguments))


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
        arguments = (input, offset, mask, weight, given_bias, *_modulated_settings(settings))
        return ops.modulated_deform_conv2d(*arguments)

    outputs = [grad_input, grad_offset, grad_mask, grad_weight, grad_bias if has_bias else None]
    _add_gradients(convolve, [input, offset, mask, weight, bias], grad_output, outputs)


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
    padded = torch.nn.functional.pad(features[0], (pad_w, pad_w, pad_h, pad_h))
    row = mask_h_idx + torch.arange(kernel_h, device=features.device)[:, None, None]
    column = mask_w_idx + torch.arange(kernel_w, device=features.device)[:, None]
    data_col.copy_(padded[:, row, column].reshape(data_col.shape))


def masked_col2im_forward(
    col: Tensor,
    mask_h_idx: Tensor,
    mask_w_idx: Tensor,
    output: Tensor,
    height: int,
    width: int,
    channels: int,
) -> None:
    output[0, :, mask_h_idx, mask_w_idx] = col


def carafe_naive_forward(
    features: Tensor, masks: Tensor, output: Tensor, kernel_size: int, group_size: int, scale_factor: int
) -> None:
    output.copy_(ops.carafe(features, masks, kernel_size, group_size, scale_factor))


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

    _add_gradients(upsample, [features, masks], grad_output, [grad_input, grad_masks])


def carafe_forward(
    features: Tensor,
    masks: Tensor,
    rfeatures: Tensor,
    routput: Tensor,
    rmasks: Tensor,
    output: Tensor,
    **sizes: int,
) -> None:
    rfeatures.copy_(features)  # what the wrapper saves for backward; mmcv's kernels keep it channels last
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
    return _ms_deform_attn(value, level_shapes, level_starts, locations, weights)


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
        return _ms_deform_attn(value, level_shapes, level_starts, locations, weights)

    outputs: list[Tensor | None] = [grad_value, grad_locations, grad_weights]
    _add_gradients(attend, [value, locations, weights], grad_output, outputs)
