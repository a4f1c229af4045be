"""Deformable convolution, in which each tap of the kernel reads the map at a learnt offset from its position."""

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _library, _registration
from ._arguments import check_that, numbers_to, pair
from ._declared import declared
from ._roi_sampling import Corners, blended

__all__ = ["Pair", "convolve", "deform_conv2d", "deform_conv2d_reference"]

Pair = int | tuple[int, int]


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

    It is differentiable with respect to ``input``, ``offset`` and ``weight``; the inputs are saved for the backward.
    Positions, interpolation and sums are float32 (float64 for float64). On the CPU the operands of the product are
    float32, too, and results do not depend on the number of threads. On CUDA the other tensors are rounded to the type
    of ``offset``, and so are the columns that torch multiplies. The gradient of the columns has that type as well,
    except for float16, whose range it may pass: it is float32 there. The gradient of ``input`` is summed in no fixed
    order on CUDA. Plain torch computes gradients there under ``torch.use_deterministic_algorithms(True)``, gradients of
    gradients everywhere, and all on devices whose library is not built.

    Raises:
        ValueError: A shape, a number or the type of ``offset`` does not fit, or ``bias`` is True. The message names the
            argument.

    Source: Deformable Convolutional Networks, arXiv 1703.06211; the signature is mmcv's.
    """
    if bias:
        raise ValueError(
            "deform_conv2d: bias must be False; add a bias to the result, or call modulated_deform_conv2d"
        )
    tensors = input, offset, None, weight, None
    settings = stride, padding, dilation, groups, deform_groups
    return convolve("deform_conv2d", *tensors, *settings, im2col_step)


Size = tuple[int, int]  # (height, width)


def output_shape(input: Tensor, weight: Tensor, stride: Size, padding: Size, dilation: Size) -> Size:
    """Return (height, width) of the result."""
    settings = zip(input.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    height, width = ((size + 2 * pad - dil * (k - 1) - 1) // step + 1 for size, k, step, pad, dil in settings)
    return height, width


def convolve(
    operator: str,
    input: Tensor,
    offset: Tensor,
    mask: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
    deform_groups: int,
    im2col_step: int = 32,
) -> Tensor:
    """Return the convolution in the type of ``offset``, by the library that serves the call.

    Raises:
        ValueError: A shape does not fit. The message names the operator and the argument.
    """
    settings = pair(stride), pair(padding), pair(dilation)
    size = output_shape(input, weight, *settings)
    if min(size) <= 0:
        raise ValueError(
            f"{operator}: input {list(input.shape[2:])} is too small, the output would be {list(size)}"
        )
    B, C = input.shape[:2]
    outputs, of_group, KH, KW = weight.shape
    channels = of_group * groups
    check_that(channels == C, operator, "input", "have {} channels", C, channels)
    check_that(C % deform_groups == 0, operator, "deform_groups", "divide {} channels", deform_groups, C)
    is_multiple = outputs % groups == 0
    check_that(is_multiple, operator, "weight", "have a multiple of {} output channels", outputs, groups)
    taps = deform_groups * KH * KW
    expected = [B, 2 * taps, *size]
    check_that(list(offset.shape) == expected, operator, "offset", "be {}", offset, expected)
    if mask is not None:
        expected = [B, taps, *size]
        check_that(list(mask.shape) == expected, operator, "mask", "be {}", mask, expected)
    dtype = offset.dtype
    if _library.kernel_device(input) != "cuda":
        for other in (input, mask, weight):
            dtype = dtype if other is None else torch.promote_types(dtype, other.dtype)
    converted = (None if one is None else one.to(dtype) for one in (input, offset, mask, weight))
    output = _deform_conv2d(*converted, *settings, deform_groups, im2col_step)
    return _with_bias(output, bias).to(offset)


def deform_conv2d_reference(
    input: Tensor,  # [B, C, H, W]
    offset: Tensor,  # [B, G * 2 * KH * KW, H', W']
    mask: Tensor | None,  # [B, G * KH * KW, H', W']
    weight: Tensor,  # [C', C / groups, KH, KW]
    stride: Size,
    padding: Size,
    dilation: Size,
    deform_groups: int,
    im2col_step: int = 32,
    bias: Tensor | None = None,  # [C']
) -> Tensor:  # [B, C', H', W']
    """Return what ``modulated_deform_conv2d`` returns, in plain torch: the definition kernels are tested against.

    It gathers the columns of im2col at the positions of the taps and multiplies them by the weight. It computes in
    float32 at least, because 16 bits do not hold a position in a map. The result has the type of ``input``. It ignores
    ``im2col_step``, and a sample at or beyond -1, H or W is 0 and has no gradient.
    """
    dtype = torch.promote_types(offset.dtype, torch.promote_types(input.dtype, torch.float32))
    outputs, of_group, KH, KW = weight.shape
    G, (B, C, H, W) = deform_groups, input.shape
    num_maps = B * G
    height, width = output_shape(input, weight, stride, padding, dilation)
    size = height * width
    settings = zip((KH, KW), (height, width), stride, padding, dilation, strict=True)
    tap_y, tap_x = (
        numbers_to(count, input) * step - pad + numbers_to(taps, input)[:, None] * gap
        for taps, count, step, pad, gap in settings
    )  # [KH, H'], [KW, W']
    y, x = offset.to(dtype).reshape(num_maps, KH, KW, 2, height, width).unbind(3)
    y, x = (y + tap_y[:, None, :, None]).flatten(1), (x + tap_x[:, None]).flatten(1)
    maps = F.pad(input.to(dtype).reshape(num_maps, C // G, H, W), (1, 1, 1, 1))  # The pixels outside are 0.
    rows = maps.permute(0, 2, 3, 1).flatten(0, 2)
    first_row = numbers_to(num_maps, input) * maps.shape[2:].numel()
    samples = blended(
        rows, first_row, _corners(y, H), _corners(x, W), W + 2
    )  # [B * G, KH * KW * H' * W', C / G]
    columns = samples.mT.reshape(B, G, C // G, KH * KW, size)
    if mask is not None:
        columns = columns * mask.to(dtype).reshape(B, G, 1, KH * KW, size)
    groups = C // of_group
    columns = columns.reshape(B, groups, C // groups * KH * KW, size)
    kernel = weight.to(dtype).reshape(groups, outputs // groups, -1)
    output = torch.matmul(kernel, columns).reshape(B, outputs, height, width)
    return _with_bias(output, bias).to(input)


def _with_bias(output: Tensor, bias: Tensor | None) -> Tensor:
    return output if bias is None else output + bias.to(output.dtype)[:, None, None]


def _corners(position: Tensor, size: int) -> Corners:
    """Return the corners, in a map with one more pixel at each end, of samples that count if -1 < position < size."""
    counts = (position > -1) & (position < size)
    position = torch.where(counts, position, 0)
    low = position.detach().floor()
    index = low.long() + 1
    return index, index + 1, position - low, counts


_deform_conv2d = _registration.differentiable(
    "deform_conv2d",
    "input [B, O, HO, WO]",
    layouts={"input": "[B, C, H, W]", "offset": "[B, K, HO, WO]", "weight": "[O, I, KH, KW]"},
    reference=deform_conv2d_reference,
    computed_with={"mask": "offset"},
    elsewhere=deform_conv2d_reference,
    needs_library=False,
)
