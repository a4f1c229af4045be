"""The functions of ``mmcv._ext`` for activations, filters, normalisations and losses (``mmcv_ext``)."""

from typing import Annotated, Any, TypeAlias

from torch import Tensor

from visdet.ops.mmcv import filtered_activations

from . import _mmcv_activations as activations
from . import _mmcv_functions as own
from ._served import Gradient, OneOf, Result, serves

Activation: TypeAlias = Annotated[int, OneOf("", *filtered_activations.ACTIVATIONS)]
LeakyActivation: TypeAlias = Annotated[int, OneOf("", "linear", "relu", "lrelu")]


@serves(activations.bias_act, "mmcv._ext.bias_act")
def bias_act(
    input: Tensor,
    bias: Tensor | None,
    xref: Tensor,
    yref: Tensor,
    dy: Tensor,
    grad: int,
    dim: int,
    act: Activation,
    alpha: float,
    gain: float,
    clamp: float,
) -> Any: ...


@serves(activations.filtered_lrelu, "mmcv._ext.filtered_lrelu")
def filtered_lrelu(
    x: Tensor,
    fu: Tensor,
    fd: Tensor,
    b: Tensor,
    si: Tensor | None,
    up: int,
    down: int,
    px0: int,
    px1: int,
    py0: int,
    py1: int,
    sx: int,
    sy: int,
    gain: float,
    slope: float,
    clamp: float,
    flip_filters: bool,
    writeSigns: bool,
) -> Any: ...


@serves(activations.filtered_lrelu_act_, "mmcv._ext.filtered_lrelu_act_")
def filtered_lrelu_act_(
    x: Tensor, si: Tensor | None, sx: int, sy: int, gain: float, slope: float, clamp: float, writeSigns: bool
) -> Any: ...


@serves(activations.fused_bias_leakyrelu, "mmcv._ext.fused_bias_leakyrelu")
def fused_bias_leakyrelu(
    input: Tensor,
    bias: Tensor | None,
    refer: Tensor,
    act: LeakyActivation,
    grad: int,
    alpha: float,
    scale: float,
) -> Any: ...


@serves(
    own.sigmoid_focal_loss,
    "e2e_sigmoid_focal_loss_ext.sigmoid_focal_loss_backward_cuda",
    "mmcv._ext.sigmoid_focal_loss_backward",
    grad_input="input",
)
def sigmoid_focal_loss_backward(
    input: Tensor, target: Tensor, weight: Tensor | None, grad_input: Gradient, gamma: float, alpha: float
) -> None: ...


@serves(
    own.sigmoid_focal_loss,
    "e2e_sigmoid_focal_loss_ext.sigmoid_focal_loss_forward_cuda",
    "mmcv._ext.sigmoid_focal_loss_forward",
)
def sigmoid_focal_loss_forward(
    input: Tensor, target: Tensor, weight: Tensor | None, output: Result, gamma: float, alpha: float
) -> None: ...


@serves(own.softmax_focal_loss, "mmcv._ext.softmax_focal_loss_backward", grad_input="shift")
def softmax_focal_loss_backward(
    softmax: Tensor,
    target: Tensor,
    weight: Tensor | None,
    buff: object,
    grad_input: Gradient,
    gamma: float,
    alpha: float,
) -> None: ...


@serves(own.softmax_focal_loss, "mmcv._ext.softmax_focal_loss_forward")
def softmax_focal_loss_forward(
    softmax: Tensor, target: Tensor, weight: Tensor | None, output: Result, gamma: float, alpha: float
) -> None: ...


@serves(activations.sync_bn_backward_data, "mmcv._ext.sync_bn_backward_data")
def sync_bn_backward_data(
    grad_output: Tensor,
    weight: Tensor,
    grad_weight: Tensor,
    grad_bias: Tensor,
    norm: Tensor,
    std: Tensor,
    grad_input: Result,
) -> None: ...


@serves(activations.sync_bn_backward_param, "mmcv._ext.sync_bn_backward_param")
def sync_bn_backward_param(
    grad_output: Tensor, norm: Tensor, grad_weight: Result, grad_bias: Result
) -> None: ...


@serves(activations.sync_bn_forward_mean, "mmcv._ext.sync_bn_forward_mean")
def sync_bn_forward_mean(input: Tensor, mean: Result) -> None: ...


@serves(activations.sync_bn_forward_output, "mmcv._ext.sync_bn_forward_output")
def sync_bn_forward_output(
    input: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Tensor,
    bias: Tensor,
    running_mean: Result,
    running_var: Result,
    norm: Result,
    std: Result,
    output: Result,
    eps: float,
    momentum: Any,
    group_size: int,
) -> None: ...


@serves(activations.sync_bn_forward_var, "mmcv._ext.sync_bn_forward_var")
def sync_bn_forward_var(input: Tensor, mean: Tensor, var: Result) -> None: ...


@serves(
    filtered_activations.upfirdn2d,
    "mmcv._ext.upfirdn2d",
    upx="up",
    upy="up",
    downx="down",
    downy="down",
    padx0="padding",
    padx1="padding",
    pady0="padding",
    pady1="padding",
    flip="flip_filter",
)
def upfirdn2d(
    input: Tensor,
    filter: Tensor,
    upx: int,
    upy: int,
    downx: int,
    downy: int,
    padx0: int,
    padx1: int,
    pady0: int,
    pady1: int,
    flip: bool,
    gain: float,
) -> Any: ...
