"""Activations with bias, and filters that resample maps, as StyleGAN uses them."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .._arguments import check_that, widened
from .._declared import declared

__all__ = ["ACTIVATIONS", "bias_act", "leaky_with_signs", "upfirdn2d"]

ACTIVATIONS = ("linear", "relu", "lrelu", "tanh", "sigmoid", "elu", "selu", "softplus", "swish")


def _activated(x: Tensor, act: str, alpha: float) -> Tensor:
    if act == "linear":
        return x
    if act == "lrelu":
        return F.leaky_relu(x, alpha)
    return getattr(F, "silu" if act == "swish" else act)(x)


@declared(
    input="floating",
    bias="None or floating [C]",
    act=f"one of {ACTIVATIONS}",
    alpha="number",
    gain="number",
    clamp="number",
)
def bias_act(
    input: Tensor,
    bias: Tensor | None,
    dim: int = 1,
    act: str = "linear",
    alpha: float = 0.0,
    gain: float = 1.0,
    clamp: float = -1.0,
) -> Tensor:
    """Return ``act(input + bias) * gain``, cut to ``clamp``.

    Args:
        input: Any numbers. 16-bit types are computed in float32.
        bias: A number for each place of the dimension ``dim``, or None.
        dim: The dimension of ``bias``.
        act: One of ``ACTIVATIONS``.
        alpha: The slope of 'lrelu' for negative numbers.
        gain: The factor.
        clamp: The largest magnitude. A negative number means any.

    Returns:
        The values in the shape and type of ``input``.

    It is differentiable.

    Raises:
        ValueError: ``act`` or the shape of ``bias`` does not fit.

    Source: The signature is mmcv's.
    """
    value = widened(input, input)
    if bias is not None:
        C = input.shape[dim]
        check_that(len(bias) == C, "bias_act", "bias", "be [{}]", bias, C)
        value = (value.movedim(dim, -1) + bias.to(value)).movedim(-1, dim)
    value = _activated(value, act, alpha) * gain
    return (value.clamp(-clamp, clamp) if clamp >= 0 else value).to(input)


@declared(
    input="floating [B, C, H, W]",
    filter="floating",
    up="2 integers, at least 1, at most 1024",
    down="2 integers, at least 1",
    padding="4 integers",
    gain="number",
)
def upfirdn2d(
    input: Tensor,  # [B, C, H, W]
    filter: Tensor,  # [FH, FW], or [F]
    up: tuple[int, int] = (1, 1),
    down: tuple[int, int] = (1, 1),
    padding: tuple[int, int, int, int] = (0, 0, 0, 0),
    flip_filter: bool = False,
    gain: float = 1.0,
) -> Tensor:  # [B, C, OH, OW]
    """Return maps that are enlarged by zeros between the pixels, padded, filtered, and thinned.

    Args:
        input: [B, C, H, W]. The maps. 16-bit types are computed in float32.
        filter: [FH, FW]. The filter, or [F] for one that acts along x and along y.
        up: The factors (x, y) of the first step, at most 1024.
        down: The factors (x, y) of the last step.
        padding: The columns on the left and the right and the rows above and below. Negative numbers cut.
        flip_filter: Whether the filter is correlated. Otherwise it is convolved.
        gain: A factor.

    Returns:
        [B, C, OH, OW]. The maps.

    It is differentiable with respect to ``input``.

    Raises:
        ValueError: A size does not fit. The message names the argument.

    Source: Paper "StyleGAN2" (Karras et al.). The signature is mmcv's.
    """
    up_x, up_y = up
    if filter.dim() == 1:
        down_x, down_y = down
        once = upfirdn2d(input, filter[None], (up_x, 1), (down_x, 1), (*padding[:2], 0, 0), flip_filter, 1.0)
        rest = (1, up_y), (1, down_y), (0, 0, *padding[2:])
        return upfirdn2d(once, filter[:, None], *rest, flip_filter, gain)
    check_that(filter.dim() == 2, "upfirdn2d", "filter", "be [FH, FW]", filter)
    B, C, H, W = input.shape
    spread = F.pad(widened(input, input)[:, :, :, None, :, None], (0, up_x - 1, 0, 0, 0, up_y - 1))
    padded = F.pad(spread.reshape(B * C, 1, H * up_y, W * up_x), padding)
    (FH, FW), (height, width) = filter.shape, padded.shape[2:]
    fits, expected = height >= FH and width >= FW, "not be larger than the padded map {}"
    check_that(fits, "upfirdn2d", "filter", expected, filter, [height, width])
    taps = widened(filter, input) * gain
    taps = taps if flip_filter else taps.flip(0, 1)
    # Steps beyond the map are one, and torch 2.14 crashes or hangs on some of them.
    stride = [min(step, size) for step, size in zip(reversed(down), padded.shape[2:], strict=True)]
    filtered = F.conv2d(padded, taps[None, None], stride=stride)
    return filtered.view(B, C, *filtered.shape[2:]).to(input)


def leaky_with_signs(
    x: Tensor,  # [B, C, H, W]
    signs: Tensor | None,  # [B, C, SH, SW] uint8
    offset: tuple[int, int],
    gain: float,
    slope: float,
    clamp: float,
) -> tuple[Tensor, Tensor]:
    """Return the leaky ReLU of maps, and what happened to each number: 1 for the slope, 2 for the clamp, otherwise 0.

    Given such signs, do the same to other numbers. The signs begin at ``offset`` (x, y) of the maps' corner.
    """
    scaled = x * gain
    if signs is None:
        leaky = torch.where(scaled < 0, scaled * slope, scaled)
        is_cut = leaky.abs() > (clamp if clamp >= 0 else math.inf)
        signs = torch.where(is_cut, 2, (scaled < 0).to(torch.uint8)).to(torch.uint8)
        return torch.where(is_cut, leaky.sign() * clamp, leaky), signs
    # A number outside the signs is scaled only.
    (H, W), (SH, SW), (left, top) = x.shape[2:], signs.shape[2:], offset
    seen = F.pad(signs, (-left, W + left - SW, -top, H + top - SH))
    return torch.where(seen == 2, 0, torch.where(seen == 1, scaled * slope, scaled)), signs
