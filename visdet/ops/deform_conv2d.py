"""Deformable convolution: each tap of the kernel reads at a learnt offset from its place."""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import _library, _torchvision
from ._deform_places import off_the_border, places, within_reach
from ._offset_layers import rename_offset_layer
from ._renamed import renamed_arguments
from ._roi_sampling import pair

__all__ = ["DeformConv2d", "DeformConv2dPack", "deform_conv2d", "deform_conv2d_reference"]

Pair = int | tuple[int, int]


def output_shape(
    input: Tensor, weight: Tensor, stride: Pair, padding: Pair, dilation: Pair
) -> tuple[int, int]:
    """Return (height, width) of the result."""
    settings = zip(
        input.shape[2:], weight.shape[2:], pair(stride), pair(padding), pair(dilation), strict=True
    )
    height, width = ((size + 2 * pad - dil * (k - 1) - 1) // step + 1 for size, k, step, pad, dil in settings)
    return height, width


def check(
    op: str,
    input: Tensor,
    offset: Tensor,
    weight: Tensor,
    deform_groups: int,
    groups: int,
    size: tuple[int, int],
) -> None:
    """Raise ValueError where a shape does not fit."""
    if input.dim() != 4:
        raise ValueError(f"{op}: input must be [B, C, H, W], got {list(input.shape)}")
    if min(size) <= 0:
        raise ValueError(
            f"{op}: input {list(input.shape[2:])} is too small, the output would be {list(size)}"
        )
    if input.shape[1] != weight.shape[1] * groups:
        raise ValueError(f"{op}: input must have {weight.shape[1] * groups} channels, got {input.shape[1]}")
    if input.shape[1] % deform_groups:
        raise ValueError(f"{op}: deform_groups must divide {input.shape[1]} channels, got {deform_groups}")
    if weight.shape[0] % groups:
        raise ValueError(
            f"{op}: weight must have a multiple of {groups} output channels, got {weight.shape[0]}"
        )
    expected = [input.shape[0], deform_groups * 2 * weight.shape[2] * weight.shape[3], *size]
    if list(offset.shape) != expected:
        raise ValueError(f"{op}: offset must be {expected}, got {list(offset.shape)}")


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
    """Return the convolution whose taps read ``input`` bilinearly at their place plus ``offset`` pixels.

    Args:
        offset: one field for each of ``deform_groups`` (G) groups of channels; its type is that of the result.
        bias: must be False, as in mmcv.
        im2col_step: images whose columns are held at a time, at most, on CUDA; B need not divide by it.

    Positions outside count as zeros, those within one pixel of the border as a blend with zero. Differentiable
    with respect to input, offset and weight; at exactly -1, where zero offsets put the taps of a padding of 1, the
    offset's gradient is 0, as in mmcv (torchvision's is that of a sample inside). Saved for the backward are the
    inputs.

    Served by visdet's kernels, differentiable once; places, interpolation and sums are float32 (float64 for float64).
    On the CPU so are the operands of the product, and results are the same bits for any number of threads. On CUDA
    the other tensors are rounded to the type of ``offset``, in which torch multiplies, and the gradient of ``input``
    adds in no fixed order: plain torch serves gradients there under ``torch.use_deterministic_algorithms(True)``.
    Where the library of a device is missing, torchvision serves, in float32 for 16-bit types, or plain torch.

    An offset that is not finite, or leads out of the map, counts nothing and has no gradient.

    Raises:
        ValueError: a shape does not fit, or ``bias`` is asked for.

    Source: Deformable Convolutional Networks, ICCV 2017; the signature is mmcv's.
    """
    if bias:
        raise ValueError(
            "deform_conv2d: bias must be False; add it to the result, or take modulated_deform_conv2d"
        )
    if input.dim() == 4:
        size = output_shape(input, weight, stride, padding, dilation)
        check("deform_conv2d", input, offset, weight, deform_groups, groups, size)
    else:
        raise ValueError(f"deform_conv2d: input must be [B, C, H, W], got {list(input.shape)}")
    return convolve(input, offset, None, weight, None, stride, padding, dilation, deform_groups, im2col_step)


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
    """Return the convolution of checked arguments in the type of ``offset``."""
    settings = (pair(stride), pair(padding), pair(dilation))
    if _serves(input, offset, mask, weight):
        dtype = (
            offset.dtype if _library.kernel_device(input) == "cuda" else _widest(input, offset, mask, weight)
        )
        output = _deform_conv2d(
            *(None if t is None else t.to(dtype) for t in (input, offset, mask, weight)),
            *settings,
            deform_groups,
            im2col_step,
        )
        output = output if bias is None else output + bias.to(dtype)[:, None, None]
        return output.to(offset.dtype)
    return _convolve_elsewhere(input, offset, mask, weight, bias, settings, deform_groups)


def _serves(input: Tensor, *others: Tensor | None) -> bool:
    """Return whether visdet's kernels may run, with their backward."""
    device = _library.kernel_device(input)
    if device not in ("cpu", "cuda") or not _library.is_loaded(device):
        return False
    return device == "cpu" or not _must_be_ordered(input, *others)


def _widest(*tensors: Tensor | None) -> torch.dtype:
    """Return the type that holds all tensors' numbers."""
    return functools.reduce(torch.promote_types, (t.dtype for t in tensors if t is not None))


def _must_be_ordered(*tensors: Tensor | None) -> bool:
    has_gradients = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    return has_gradients and torch.are_deterministic_algorithms_enabled()


def _convolve_elsewhere(
    input: Tensor,
    offset: Tensor,
    mask: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    settings: tuple[tuple[int, int], tuple[int, int], tuple[int, int]],
    deform_groups: int,
) -> Tensor:
    """Return the same by torchvision, or by plain torch; in float32 where the type has 16 bits."""
    dtype = offset.dtype if offset.dtype == torch.float64 else torch.float32
    tensors = [None if t is None else t.to(dtype) for t in (input, offset, mask, weight, bias)]
    x, shift, factor, kernel, shift_of_output = tensors
    assert x is not None and shift is not None and kernel is not None
    if x.shape[0] == 0 or not _torchvision.serves_gradients(x, shift, factor, kernel):
        return deform_conv2d_reference(
            x, shift, factor, kernel, shift_of_output, *settings, deform_groups
        ).to(offset.dtype)
    from torchvision.ops import deform_conv2d as torchvision_deform_conv2d

    shift = within_reach(shift, x.shape[2:], settings[1])
    if shift.requires_grad and torch.is_grad_enabled():
        shift = off_the_border(shift, kernel.shape[2:], *settings)
    stride, padding, dilation = settings
    return torchvision_deform_conv2d(
        x, shift, kernel, shift_of_output, stride=stride, padding=padding, dilation=dilation, mask=factor
    ).to(offset.dtype)


def _bilinear(maps: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """Return [M, c, K] samples of maps [M, c, H, W] at y, x [M, K]; corners outside are 0.

    A place at or beyond -1, H or W counts nothing, its gradient included.
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
            inside = counts & (row >= 0) & (row < H) & (column >= 0) & (column < W)
            index = torch.where(inside, row.long() * W + column.long(), 0)  # whole numbers: beyond 2^24 too
            index = index[:, None].expand(-1, flat.shape[1], -1)
            factor = torch.where(inside, wy * wx, 0)
            total = total + flat.gather(2, index) * factor[:, None]
    return total


def deform_conv2d_reference(
    input: Tensor,
    offset: Tensor,
    mask: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    deform_groups: int,
) -> Tensor:
    """Plain torch: gather the columns of im2col at the moved places, then multiply by the weight.

    Computed in float32 at least, since 16 bits hold no place in a map; the result has the type of ``input``.
    """
    dtype, wide = (
        input.dtype,
        torch.promote_types(offset.dtype, torch.promote_types(input.dtype, torch.float32)),
    )
    input, offset, weight = input.to(wide), offset.to(wide), weight.to(wide)
    B, C, H, W = input.shape
    KH, KW = weight.shape[2:]
    height, width = output_shape(input, weight, stride, padding, dilation)
    G = deform_groups
    tap_y, tap_x = places(offset, (KH, KW), stride, padding, dilation)
    moves = offset.reshape(B * G, KH, KW, 2, height, width)
    y, x = (moves[:, :, :, 0] + tap_y).flatten(1), (moves[:, :, :, 1] + tap_x).flatten(1)
    columns = _bilinear(input.reshape(B * G, C // G, H, W), y, x).view(B, G, C // G, KH * KW, height * width)
    if mask is not None:
        columns = columns * mask.to(wide).reshape(B, G, 1, KH * KW, height * width)
    groups = C // weight.shape[1]
    columns = columns.reshape(B, groups, C // groups * KH * KW, height * width)
    kernel = weight.reshape(groups, weight.shape[0] // groups, -1)
    output = torch.matmul(kernel, columns).reshape(B, weight.shape[0], height, width)
    return (output if bias is None else output + bias.to(wide)[:, None, None]).to(dtype)


def _fake(input: Tensor, offset: Tensor, mask: Tensor | None, weight: Tensor, *_: Any) -> Tensor:
    return input.new_empty(input.shape[0], weight.shape[0], *offset.shape[2:])


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


_deform_conv2d = _library.differentiable(
    "deform_conv2d",
    fake=_fake,
    fake_backward=_fake_backward,
    setup_context=_setup_context,
    backward=_backward,
)


class DeformConv2d(nn.Module):
    """Deformable convolution with a weight and no bias; the offset is an input."""

    @renamed_arguments(deformable_groups="deform_groups")
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Pair,
        stride: Pair = 1,
        padding: Pair = 0,
        dilation: Pair = 1,
        groups: int = 1,
        deform_groups: int = 1,
        bias: bool = False,
        im2col_step: int = 32,
    ) -> None:
        super().__init__()
        if bias:
            raise ValueError(f"DeformConv2d: bias must be False, got {bias!r}")
        for name, channels in (("in_channels", in_channels), ("out_channels", out_channels)):
            if channels % groups:
                raise ValueError(f"DeformConv2d: {name} must divide by groups {groups}, got {channels}")
        self.in_channels, self.out_channels = in_channels, out_channels
        self.kernel_size = pair(kernel_size)
        self.stride, self.padding, self.dilation = pair(stride), pair(padding), pair(dilation)
        self.groups, self.deform_groups, self.im2col_step = groups, deform_groups, im2col_step
        self.transposed, self.output_padding = False, (0,)  # what code for nn.Conv2d looks at
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels // groups, *self.kernel_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.kaiming_uniform_(self.weight, nonlinearity="relu")

    def forward(self, x: Tensor, offset: Tensor) -> Tensor:
        """Return the convolution; a map smaller than the kernel is padded to it, and the result cut back."""
        pad_h = max(self.kernel_size[0] - x.shape[2], 0)
        pad_w = max(self.kernel_size[1] - x.shape[3], 0)
        if pad_h or pad_w:
            x, offset = (F.pad(tensor, (0, pad_w, 0, pad_h)) for tensor in (x, offset))
        output = self._convolve(x, offset)
        return (
            output[:, :, : output.shape[2] - pad_h, : output.shape[3] - pad_w].contiguous()
            if pad_h or pad_w
            else output
        )

    def _convolve(self, x: Tensor, offset: Tensor) -> Tensor:
        return deform_conv2d(
            x,
            offset,
            self.weight,
            self.stride,
            self.padding,
            self.dilation,
            self.groups,
            self.deform_groups,
            im2col_step=self.im2col_step,
        )

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}, "
            f"padding={self.padding}, dilation={self.dilation}, groups={self.groups}, "
            f"deform_groups={self.deform_groups}, bias={getattr(self, 'bias', None) is not None}"
        )


class DeformConv2dPack(DeformConv2d):
    """Deformable convolution that computes its own offsets by a convolution, 'DCN' in configs. Offsets start at 0.

    Its state dicts are of version 2; in those of version 1, ``<name>_offset`` is renamed to ``<name>.conv_offset``.
    """

    _version = 2
    has_offset_layer = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conv_offset = nn.Conv2d(
            self.in_channels,
            self.deform_groups * 2 * self.kernel_size[0] * self.kernel_size[1],
            kernel_size=self.kernel_size,
            stride=self.stride,
            padding=self.padding,
            dilation=self.dilation,
        )
        self.init_offset()

    def init_offset(self) -> None:
        nn.init.zeros_(self.conv_offset.weight)
        if self.conv_offset.bias is not None:
            nn.init.zeros_(self.conv_offset.bias)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self._convolve(x, self.conv_offset(x))

    def _load_from_state_dict(self, state_dict: dict, prefix: str, local_metadata: dict, *args: Any) -> None:
        rename_offset_layer(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
