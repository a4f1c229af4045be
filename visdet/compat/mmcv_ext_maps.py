"""The functions of ``mmcv._ext`` for maps: convolutions, sampling, activations and losses (``mmcv_ext``)."""

from typing import Any, Literal, TypeAlias

from torch import Tensor

from visdet import ops
from visdet.ops.mmcv import label_growth, map_correlation

from . import _mmcv_functions as own
from ._served import Gradient, GradOutput, Result, computes, serves
from .msda_ext import ms_deform_attn_forward as attend

PsaType: TypeAlias = Literal["collect", "distribute"]


@serves(ops.active_rotated_filter, "mmcv._ext.active_rotated_filter_backward", grad_in="input")
def active_rotated_filter_backward(grad_out: GradOutput, indices: Tensor, grad_in: Gradient) -> None: ...


@serves(ops.active_rotated_filter, "mmcv._ext.active_rotated_filter_forward")
def active_rotated_filter_forward(input: Tensor, indices: Tensor, output: Result) -> None: ...


@serves(
    ops.carafe, "mmcv._ext.carafe_backward", rfeatures="features", grad_input="features", grad_masks="masks"
)
def carafe_backward(
    grad_output: GradOutput,
    rfeatures: Tensor,
    masks: Tensor,
    rgrad_output: object,
    rgrad_input_hs: object,
    rgrad_input: object,
    rgrad_masks: object,
    grad_input: Gradient,
    grad_masks: Gradient,
    kernel_size: int,
    group_size: int,
    scale_factor: int,
) -> None: ...


@serves(own.carafe, "mmcv._ext.carafe_forward")
def carafe_forward(
    features: Tensor,
    masks: Tensor,
    rfeatures: Result,
    routput: object,
    rmasks: object,
    output: Result,
    kernel_size: int,
    group_size: int,
    scale_factor: int,
) -> None: ...


@serves(ops.carafe, "mmcv._ext.carafe_naive_backward", grad_input="features", grad_masks="masks")
def carafe_naive_backward(
    grad_output: GradOutput,
    features: Tensor,
    masks: Tensor,
    grad_input: Gradient,
    grad_masks: Gradient,
    kernel_size: int,
    group_size: int,
    scale_factor: int,
) -> None: ...


@serves(ops.carafe, "mmcv._ext.carafe_naive_forward")
def carafe_naive_forward(
    features: Tensor, masks: Tensor, output: Result, kernel_size: int, group_size: int, scale_factor: int
) -> None: ...


@serves(label_growth.contour_expand, "mmcv._ext.contour_expand")
def contour_expand(
    kernel_mask: Tensor, internal_kernel_label: Tensor, min_kernel_area: int, kernel_num: int
) -> Any: ...


@serves(
    map_correlation.correlation,
    "mmcv._ext.correlation_backward",
    grad_input1="input1",
    grad_input2="input2",
    kH="kernel_size",
    kW="kernel_size",
    patchH="patch_size",
    patchW="patch_size",
    padH="padding",
    padW="padding",
    dilationH="dilation",
    dilationW="dilation",
    dilation_patchH="dilation_patch",
    dilation_patchW="dilation_patch",
    dH="stride",
    dW="stride",
)
def correlation_backward(
    grad_output: GradOutput,
    input1: Tensor,
    input2: Tensor,
    grad_input1: Gradient,
    grad_input2: Gradient,
    kH: int,
    kW: int,
    patchH: int,
    patchW: int,
    padH: int,
    padW: int,
    dilationH: int,
    dilationW: int,
    dilation_patchH: int,
    dilation_patchW: int,
    dH: int,
    dW: int,
) -> None: ...


@serves(
    map_correlation.correlation,
    "mmcv._ext.correlation_forward",
    kH="kernel_size",
    kW="kernel_size",
    patchH="patch_size",
    patchW="patch_size",
    padH="padding",
    padW="padding",
    dilationH="dilation",
    dilationW="dilation",
    dilation_patchH="dilation_patch",
    dilation_patchW="dilation_patch",
    dH="stride",
    dW="stride",
)
def correlation_forward(
    input1: Tensor,
    input2: Tensor,
    output: Result,
    kH: int,
    kW: int,
    patchH: int,
    patchW: int,
    padH: int,
    padW: int,
    dilationH: int,
    dilationW: int,
    dilation_patchH: int,
    dilation_patchW: int,
    dH: int,
    dW: int,
) -> None: ...


@serves(
    ops.deform_conv2d,
    "mmcv._ext.deform_conv_backward_input",
    "deform_conv_ext.deform_conv_backward_input",
    "detectron2._C.deform_conv_backward_input",
    grad_input="input",
    grad_offset="offset",
    dH="stride",
    dW="stride",
    padH="padding",
    padW="padding",
    dilationH="dilation",
    dilationW="dilation",
    group="groups",
    deformable_group="deform_groups",
)
def deform_conv_backward_input(
    input: Tensor,
    offset: Tensor,
    grad_output: GradOutput,
    grad_input: Gradient,
    grad_offset: Gradient,
    weight: Tensor,
    columns: object,
    kW: object,
    kH: object,
    dW: int,
    dH: int,
    padW: int,
    padH: int,
    dilationW: int,
    dilationH: int,
    group: int,
    deformable_group: int,
    im2col_step: object = None,
) -> None: ...


@serves(
    own.scaled_deform_conv,
    "mmcv._ext.deform_conv_backward_parameters",
    "deform_conv_ext.deform_conv_backward_parameters",
    "detectron2._C.deform_conv_backward_filter",
    grad_weight="weight",
    dH="stride",
    dW="stride",
    padH="padding",
    padW="padding",
    dilationH="dilation",
    dilationW="dilation",
    group="groups",
    deformable_group="deform_groups",
)
def deform_conv_backward_parameters(
    input: Tensor,
    offset: Tensor,
    grad_output: GradOutput,
    grad_weight: Gradient,
    columns: object,
    ones: object,
    kW: object,
    kH: object,
    dW: int,
    dH: int,
    padW: int,
    padH: int,
    dilationW: int,
    dilationH: int,
    group: int,
    deformable_group: int,
    scale: float,
    im2col_step: object = None,
) -> None: ...


@serves(
    ops.deform_conv2d,
    "mmcv._ext.deform_conv_forward",
    "deform_conv_ext.deform_conv_forward",
    "detectron2._C.deform_conv_forward",
    dH="stride",
    dW="stride",
    padH="padding",
    padW="padding",
    dilationH="dilation",
    dilationW="dilation",
    group="groups",
    deformable_group="deform_groups",
)
def deform_conv_forward(
    input: Tensor,
    weight: Tensor,
    offset: Tensor,
    output: Result,
    columns: object,
    ones: object,
    kW: object,
    kH: object,
    dW: int,
    dH: int,
    padW: int,
    padH: int,
    dilationW: int,
    dilationH: int,
    group: int,
    deformable_group: int,
    im2col_step: object = None,
) -> None: ...


@serves(own.masked_col2im, "mmcv._ext.masked_col2im_forward")
def masked_col2im_forward(
    col: Tensor,
    mask_h_idx: Tensor,
    mask_w_idx: Tensor,
    output: Result,
    height: int,
    width: int,
    channels: object,
) -> None: ...


@serves(own.masked_im2col, "mmcv._ext.masked_im2col_forward")
def masked_im2col_forward(
    features: Tensor,
    mask_h_idx: Tensor,
    mask_w_idx: Tensor,
    data_col: Result,
    kernel_h: int,
    kernel_w: int,
    pad_h: int,
    pad_w: int,
) -> None: ...


@serves(
    own.modulated_deform_conv,
    "mmcv._ext.modulated_deform_conv_backward",
    "deform_conv_ext.modulated_deform_conv_backward",
    "detectron2._C.modulated_deform_conv_backward",
    grad_input="input",
    grad_weight="weight",
    grad_bias="bias",
    grad_offset="offset",
    grad_mask="mask",
    grad_output="output",
    stride_h="stride",
    stride_w="stride",
    pad_h="padding",
    pad_w="padding",
    dilation_h="dilation",
    dilation_w="dilation",
    group="groups",
    deformable_group="deform_groups",
)
def modulated_deform_conv_backward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    ones: object,
    offset: Tensor,
    mask: Tensor,
    columns: object,
    grad_input: Gradient,
    grad_weight: Gradient,
    grad_bias: Gradient,
    grad_offset: Gradient,
    grad_mask: Gradient,
    grad_output: GradOutput,
    kernel_h: object,
    kernel_w: object,
    stride_h: int,
    stride_w: int,
    pad_h: int,
    pad_w: int,
    dilation_h: int,
    dilation_w: int,
    group: int,
    deformable_group: int,
    with_bias: bool,
) -> None: ...


@serves(
    own.modulated_deform_conv,
    "mmcv._ext.modulated_deform_conv_forward",
    "deform_conv_ext.modulated_deform_conv_forward",
    "detectron2._C.modulated_deform_conv_forward",
    stride_h="stride",
    stride_w="stride",
    pad_h="padding",
    pad_w="padding",
    dilation_h="dilation",
    dilation_w="dilation",
    group="groups",
    deformable_group="deform_groups",
)
def modulated_deform_conv_forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    ones: object,
    offset: Tensor,
    mask: Tensor,
    output: Result,
    columns: object,
    kernel_h: object,
    kernel_w: object,
    stride_h: int,
    stride_w: int,
    pad_h: int,
    pad_w: int,
    dilation_h: int,
    dilation_w: int,
    group: int,
    deformable_group: int,
    with_bias: bool,
) -> None: ...


@serves(
    attend,
    "mmcv._ext.ms_deform_attn_backward",
    shapes="spatial_shapes",
    starts="level_start_index",
    locations="sampling_loc",
    weights="attn_weight",
    grad_value="value",
    grad_locations="sampling_loc",
    grad_weights="attn_weight",
)
def ms_deform_attn_backward(
    value: Tensor,
    shapes: Tensor,
    starts: Tensor,
    locations: Tensor,
    weights: Tensor,
    grad_output: GradOutput,
    grad_value: Gradient,
    grad_locations: Gradient,
    grad_weights: Gradient,
    im2col_step: object,
) -> None: ...


@serves(
    attend,
    "mmcv._ext.ms_deform_attn_forward",
    shapes="spatial_shapes",
    starts="level_start_index",
    locations="sampling_loc",
    weights="attn_weight",
)
def ms_deform_attn_forward(
    value: Tensor, shapes: Tensor, starts: Tensor, locations: Tensor, weights: Tensor, im2col_step: object
) -> Any: ...


@serves(label_growth.pixel_group, "mmcv._ext.pixel_group")
def pixel_group(
    score: Tensor,
    mask: Tensor,
    embedding: Tensor,
    kernel_label: Tensor,
    kernel_contour: Tensor,
    kernel_region_num: int,
    distance_threshold: float,
) -> Any: ...


@serves(
    map_correlation.psa_mask,
    "mmcv._ext.psamask_backward",
    grad_input="input",
    h_mask="mask_size",
    w_mask="mask_size",
)
def psamask_backward(
    grad_output: GradOutput, grad_input: Gradient, psa_type: PsaType, h_mask: int, w_mask: int
) -> None: ...


@serves(map_correlation.psa_mask, "mmcv._ext.psamask_forward", h_mask="mask_size", w_mask="mask_size")
def psamask_forward(input: Tensor, output: Result, psa_type: PsaType, h_mask: int, w_mask: int) -> None: ...


@serves(own.rotated_feature_align, "mmcv._ext.rotated_feature_align_backward", grad_input="features")
def rotated_feature_align_backward(
    grad_output: GradOutput, best_bboxes: Tensor, grad_input: Gradient, spatial_scale: float, points: int
) -> None: ...


@serves(own.rotated_feature_align, "mmcv._ext.rotated_feature_align_forward")
def rotated_feature_align_forward(
    features: Tensor, best_bboxes: Tensor, output: Result, spatial_scale: float, points: int
) -> None: ...


@computes("mmcv._ext.tin_shift_backward")
def tin_shift_backward(grad_output: Tensor, shift: Tensor, grad_input: Result) -> Tensor:
    return map_correlation.tin_shift(grad_output, -shift)


@serves(map_correlation.tin_shift, "mmcv._ext.tin_shift_forward")
def tin_shift_forward(input: Tensor, shift: Tensor, output: Result) -> None: ...
