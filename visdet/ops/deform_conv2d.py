"""Deformable convolution, in which each tap of the kernel reads the map at a learnt offset from its position."""

import functools
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from . import _library, _registration, _torchvision
from ._arguments import computation_dtype, pair
from ._declared import declared
from ._deform_conv_inputs import Pair, check_shapes, output_shape, tap_positions
from ._deform_conv_torchvision import convolve_by_torchvision

__all__ = ["convolve", "deform_conv2d", "deform_conv2d_reference"]


@declared(
    input="real [B, C, H, W]",
    offset="floating",
    weight="real [O, I, KH, KW]",
    stride="1 or 2 integers, at least 1",
    padding="1 or 2 integers, at least 0",
    dilation="1 or 2 integers, at least 1",
    groups="integer, at least 1",
    deform_groups="integer, at least 1",
)
def deform_conv2d(
    input: Tensor,  # [B, C, H, W]
    offset: Tensor,  # [B, G * 2 * KH * KW, H', W'] (y, x) of each tap
    weight: Tensor,  # [C', C / groups, KH, KW]
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
    deform_groups: int = 1,
    bias: bool = False,
    im2col_step: int = 32,
) -> Tensor:  # [B, C', H', W']
    """Return the convolution whose taps read ``input`` bilinearly at their position plus ``offset``.

    A tap whose offset leads out of the map, or is NaN or infinite, reads 0, and its offset has no gradient. Pixels
    outside the map are zeros, so that a tap within one pixel of the border reads a blend with zero. A tap at exactly
    -1, as with a padding of 1 and zero offsets, gives its offset no gradient, as in mmcv. In torchvision it does.

    Args:
        input: [B, C, H, W]. The map, of any floating-point type.
        offset: [B, G * 2 * KH * KW, H', W'] (y, x) of each tap. The offsets in pixels, one field for each of the
            ``deform_groups`` (G) groups of channels. The result has their type.
        weight: [C', C / groups, KH, KW]. The kernel. H' and W' are those of the convolution without offsets.
        stride: (height, width) of the step between neighbouring outputs, or one number for both.
        padding: (height, width) of the border of zeros, or one number for both.
        dilation: (height, width) of the distance between neighbouring taps, or one number for both.
        groups: The number of groups of channels that are convolved separately; it divides C and C'.
        deform_groups: The number of groups of channels that have offsets of their own; it divides C.
        bias: It must be False, as in mmcv.
        im2col_step: On CUDA, the largest number of images whose columns are held at a time. B need not divide by it.

    Returns:
        [B, C', H', W']. The convolution. B = 0 gives an empty result.

    It is differentiable once with respect to ``input``, ``offset`` and ``weight``; the inputs are saved for the
    backward. Positions, interpolation and sums are float32 (float64 for float64). On the CPU the operands of the
    product are float32, too, and results do not depend on the number of threads. On CUDA the other tensors are rounded
    to the type of ``offset``, and so are the columns that torch multiplies. The gradient of the columns has that type
    as well, except for float16, whose range it may pass: it is float32 there. The gradient of ``input`` is summed in no
    fixed order on CUDA; under ``torch.use_deterministic_algorithms(True)`` calls that need gradients there take plain
    torch. Where the library of a device is not built, torchvision serves the call (in float32 for 16-bit types), or
    plain torch.

    Raises:
        ValueError: A shape, a number or the type of ``offset`` does not fit, or ``bias`` is True. The message names the
            argument.
        RuntimeError: On CUDA, deterministic algorithms were switched on between the forward and the backward.

    Source: Deformable Convolutional Networks, arXiv 1703.06211; the signature is mmcv's.
    """
    if bias:
        raise ValueError(
            "deform_conv2d: bias must be False; add a bias to the result, or call modulated_deform_conv2d"
        )
    settings = (stride, padding, dilation)
    check_shapes("deform_conv2d", input, offset, None, weight, settings, groups, deform_groups)
    return convolve(input, offset, None, weight, None, *settings, deform_groups, im2col_step)


def convolve(
    input: Tensor,
    offset: Tensor,
    mask: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    deform_groups: int,
    im2col_step: int = 32,
) -> Tensor:
    """Return the convolution of checked arguments, in the type of ``offset``, by the library that serves the call."""
    settings = (pair(stride), pair(padding), pair(dilation))
    if not _has_kernel(input, offset, mask, weight):
        return _convolve_without_kernel(input, offset, mask, weight, bias, settings, deform_groups)
    tensors = (input, offset, mask, weight)
    is_cuda = _library.kernel_device(input) == "cuda"
    dtype = offset.dtype if is_cuda else _common_dtype(*tensors)
    given = (None if tensor is None else tensor.to(dtype) for tensor in tensors)
    output = _deform_conv2d(*given, *settings, deform_groups, im2col_step)
    output = output if bias is None else output + bias.to(dtype)[:, None, None]
    return output.to(offset.dtype)


def _has_kernel(input: Tensor, *others: Tensor | None) -> bool:
    """Return whether visdet's kernels may run, and their backward, which on CUDA sums in no fixed order."""
    device = _library.kernel_device(input)
    if device not in ("cpu", "cuda") or not _library.is_loaded(device):
        return False
    needs_order = device == "cuda" and torch.are_deterministic_algorithms_enabled()
    has_gradients = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (input, *others)
    )
    return not (needs_order and has_gradients)


def _common_dtype(*tensors: Tensor | None) -> torch.dtype:
    """Return the type that holds the numbers of all tensors."""
    return functools.reduce(torch.promote_types, (t.dtype for t in tensors if t is not None))


def _convolve_without_kernel(
    input: Tensor,
    offset: Tensor,
    mask: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    settings: tuple[tuple[int, int], tuple[int, int], tuple[int, int]],
    deform_groups: int,
) -> Tensor:
    """Return the same by torchvision or by plain torch. 16-bit types are computed in float32."""
    dtype = computation_dtype(offset)
    x, shift, factor, kernel, addend = (
        None if tensor is None else tensor.to(dtype) for tensor in (input, offset, mask, weight, bias)
    )
    assert x is not None and shift is not None and kernel is not None
    if x.shape[0] > 0 and _torchvision.serves_gradients(x, shift, factor, kernel):
        output = convolve_by_torchvision(x, shift, factor, kernel, addend, *settings)
    else:
        output = deform_conv2d_reference(x, shift, factor, kernel, addend, *settings, deform_groups)
    return output.to(offset.dtype)


def deform_conv2d_reference(
    input: Tensor,  # [B, C, H, W]
    offset: Tensor,  # [B, G * 2 * KH * KW, H', W']
    mask: Tensor | None,  # [B, G * KH * KW, H', W']
    weight: Tensor,  # [C', C / groups, KH, KW]
    bias: Tensor | None,  # [C']
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    deform_groups: int,
) -> Tensor:  # [B, C', H', W']
    """Return what ``modulated_deform_conv2d`` returns, in plain torch: the definition kernels are tested against.

    It gathers the columns of im2col at the positions of the taps and multiplies them by the weight. It computes in
    float32 at least, because 16 bits do not hold a position in a map. The result has the type of ``input``.
    """
    dtype = torch.promote_types(offset.dtype, torch.promote_types(input.dtype, torch.float32))
    G, (B, C, H, W), KH, KW = deform_groups, input.shape, *weight.shape[2:]
    height, width = output_shape(input, weight, stride, padding, dilation)
    offset = offset.to(dtype)
    tap_y, tap_x = tap_positions(offset, (KH, KW), stride, padding, dilation)
    offset_of_tap = offset.reshape(B * G, KH, KW, 2, height, width)
    y, x = (offset_of_tap[:, :, :, 0] + tap_y).flatten(1), (offset_of_tap[:, :, :, 1] + tap_x).flatten(1)
    maps = input.to(dtype).reshape(B * G, C // G, H, W)
    columns = _bilinear(maps, y, x).view(B, G, C // G, KH * KW, height * width)
    if mask is not None:
        columns = columns * mask.to(dtype).reshape(B, G, 1, KH * KW, height * width)
    groups = C // weight.shape[1]
    columns = columns.reshape(B, groups, C // groups * KH * KW, height * width)
    kernel = weight.to(dtype).reshape(groups, weight.shape[0] // groups, -1)
    output = torch.matmul(kernel, columns).reshape(B, weight.shape[0], height, width)
    return (output if bias is None else output + bias.to(dtype)[:, None, None]).to(input.dtype)


def _bilinear(maps: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """Return the samples [M, c, K] of maps [M, c, H, W] at y, x [M, K]. Pixels outside are 0.

    A sample at or beyond -1, H or W is 0 and has no gradient.
    """
    H, W = maps.shape[2:]
    counts = (y > -1) & (y < H) & (x > -1) & (x < W)
    y, x = torch.where(counts, y, 0), torch.where(counts, x, 0)
    y0, x0 = y.detach().floor(), x.detach().floor()
    fy, fx = y - y0, x - x0
    flat = maps.flatten(2)
    total = flat.new_zeros(())
    for row, wy in ((y0, 1 - fy), (y0 + 1, fy)):
        for column, wx in ((x0, 1 - fx), (x0 + 1, fx)):
            is_inside = counts & (row >= 0) & (row < H) & (column >= 0) & (column < W)
            # float32 is not exact beyond 2^24.
            index = torch.where(is_inside, row.long() * W + column.long(), 0)
            index = index[:, None].expand(-1, flat.shape[1], -1)
            corner_weight = torch.where(is_inside, wy * wx, 0)
            total = total + flat.gather(2, index) * corner_weight[:, None]
    return total


def _fake_backward(
    grad_output: Tensor, input: Tensor, offset: Tensor, mask: Tensor | None, weight: Tensor, *settings: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    needs_input, needs_offset, needs_weight = settings[-3:]

    def gradient_of(tensor: Tensor, is_needed: bool) -> Tensor:
        return tensor.new_empty(tensor.shape if is_needed else 0)

    return (
        gradient_of(input, needs_input),
        gradient_of(offset, needs_offset),
        gradient_of(offset if mask is None else mask, needs_offset and mask is not None),
        gradient_of(weight, needs_weight),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.settings = inputs[4:]


def _backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    if grad_output.is_cuda and torch.are_deterministic_algorithms_enabled():
        raise RuntimeError(
            "deform_conv2d: torch.use_deterministic_algorithms(True) must be called before the forward"
        )
    needs_input, needs_offset, needs_mask, needs_weight = ctx.needs_input_grad[:4]
    grads = torch.ops.visdet.deform_conv2d_backward.default(
        grad_output, *ctx.saved_tensors, *ctx.settings, needs_input, needs_offset or needs_mask, needs_weight
    )
    needs = ctx.needs_input_grad[:4]
    return *(g if is_needed else None for g, is_needed in zip(grads, needs, strict=True)), *(None,) * 5


_deform_conv2d = _registration.differentiable(
    "deform_conv2d",
    lambda given: given.input.new_empty(given.input.shape[0], given.weight.shape[0], *given.offset.shape[2:]),
    gradient=lambda _: SimpleNamespace(fake=_fake_backward, save=_setup_context, backward=_backward),
)
