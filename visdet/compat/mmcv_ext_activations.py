"""The functions of ``mmcv._ext`` for activations, filters, normalisations and losses (``mmcv_ext``)."""

from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from visdet.ops.mmcv.filtered_activations import bias_act as activate
from visdet.ops.mmcv.filtered_activations import leaky_with_signs
from visdet.ops.mmcv.filtered_activations import upfirdn2d as resample

from . import _mmcv_functions as own
from ._served import Gradient, Result, computes, serves

Activation: TypeAlias = Literal[
    "", "linear", "relu", "lrelu", "tanh", "sigmoid", "elu", "selu", "softplus", "swish"
]
LeakyActivation: TypeAlias = Literal["", "linear", "relu", "lrelu"]


@computes("mmcv._ext.bias_act")
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
) -> Tensor:
    """Return the activation, or ``input`` times its first derivative, or ``input`` times ``dy`` times its second one.

    The derivatives are those at ``xref``. The wrapper leaves it empty where the result ``yref`` tells the slope.
    """
    if grad == 0:
        return activate(input, bias, dim, act, alpha, gain, clamp)
    if not xref.numel():  # Numbers that give the result, beyond the clamp where that has cut them.
        bias = None
        xref = torch.zeros_like(input)
        if yref.numel():
            xref = yref / gain
            if clamp >= 0:
                beyond = torch.full_like(xref, torch.inf).copysign(xref)
                xref = torch.where(yref.abs() >= clamp, beyond, xref)
    with torch.enable_grad():
        x = xref.detach().requires_grad_()
        y = activate(x, bias, dim, act, alpha, gain, clamp)
        (slope,) = torch.autograd.grad(y, x, input if grad == 1 else dy, create_graph=grad > 1)
        if grad > 1:
            (slope,) = torch.autograd.grad(slope, x, input, allow_unused=True, materialize_grads=True)
    return slope.detach()


@computes("mmcv._ext.filtered_lrelu")
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
) -> tuple[Tensor, Tensor, int]:
    """Return the filtered activation, its signs, and 0, which means that nothing is left to the wrapper."""
    biased = activate(x, b)
    enlarged = resample(biased, fu, (up, up), (1, 1), (px0, px1, py0, py1), flip_filters, float(up**2))
    signs = filtered_lrelu_act_(enlarged, si, sx, sy, gain, slope, clamp, writeSigns)
    return resample(enlarged, fd, (1, 1), (down, down), flip_filter=flip_filters), signs, 0


@computes("mmcv._ext.filtered_lrelu_act_")
def filtered_lrelu_act_(
    x: Tensor, si: Tensor | None, sx: int, sy: int, gain: float, slope: float, clamp: float, writeSigns: bool
) -> Tensor:
    """Activate ``x`` in place, and return the signs for the backward pass, one byte a number."""
    activated, signs = leaky_with_signs(x, si, (sx, sy), gain, slope, clamp)
    x.copy_(activated)
    return signs if writeSigns else signs.new_empty(0)


@computes("mmcv._ext.fused_bias_leakyrelu")
def fused_bias_leakyrelu(
    input: Tensor,
    bias: Tensor | None,
    refer: Tensor,
    act: LeakyActivation,
    grad: int,
    alpha: float,
    scale: float,
) -> Tensor:
    """Return the activation of ``input + bias``, or the sum times the slope that the result ``refer`` tells."""
    biased = activate(input, bias)
    if grad == 0:
        return activate(biased, None, act=act, alpha=alpha, gain=scale)
    if grad > 1:
        return torch.zeros_like(biased)
    return biased * scale if act == "linear" else torch.where(refer > 0, biased, biased * alpha) * scale


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


@computes("mmcv._ext.sync_bn_backward_data")
def sync_bn_backward_data(
    grad_output: Tensor,
    weight: Tensor,
    grad_weight: Tensor,
    grad_bias: Tensor,
    norm: Tensor,
    std: Tensor,
    grad_input: Result,
) -> Tensor:
    count = norm.shape[0] * norm.shape[2]
    mean = torch.addcmul(grad_bias[:, None] / count, norm, grad_weight[:, None] / count)
    return (grad_output - mean).mul_((weight / std)[:, None])


@computes("mmcv._ext.sync_bn_backward_param")
def sync_bn_backward_param(
    grad_output: Tensor, norm: Tensor, grad_weight: Result, grad_bias: Result
) -> tuple[Tensor, Tensor]:
    grad = grad_output.to(norm.dtype)
    return (grad * norm).sum((0, 2)), grad.sum((0, 2))


@computes("mmcv._ext.sync_bn_forward_mean")
def sync_bn_forward_mean(input: Tensor, mean: Result) -> Tensor:
    return input.to(mean.dtype).mean((0, 2))


@computes("mmcv._ext.sync_bn_forward_output")
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
) -> tuple[Tensor, ...]:
    """Return the moving averages, what the backward pass needs, and the result."""
    std = (var + eps).sqrt()
    norm = (input - mean[:, None]).div_(std[:, None])
    output = torch.addcmul(bias[:, None], norm, weight[:, None])
    count = input.shape[0] * input.shape[2] * group_size
    unbiased = var * count / (count - 1) if count > 1 else var
    moving = (
        momentum * mean + (1 - momentum) * running_mean,
        momentum * unbiased + (1 - momentum) * running_var,
    )
    return *moving, norm, std, output


@computes("mmcv._ext.sync_bn_forward_var")
def sync_bn_forward_var(input: Tensor, mean: Tensor, var: Result) -> Tensor:
    """Return the variance around a mean that may be that of several processes."""
    own_var, own_mean = torch.var_mean(input.to(var.dtype), (0, 2), correction=0)
    return own_var + (own_mean - mean).square()


@serves(
    resample,
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
