"""Problems of psa_mask, correlation and tin_shift."""

import itertools

import torch
from torch import Tensor

from tests.fuzz.problem import Draw, Operator, Problem, wide_of
from visdet.ops.mmcv.map_correlation import correlation, psa_mask, tin_shift

__all__ = ["OPERATORS"]


def _draw_masks(draw: Draw) -> Problem:
    B, H, W, mask_size = draw.size(3), draw.size(6), draw.size(6), (draw.size(7, 0), draw.size(7, 0))
    masks = draw.place(
        draw.with_bad_numbers(draw.numbers(B, mask_size[0] * mask_size[1], H, W)), draw.dtype()
    )
    given = {"input": masks, "psa_type": draw.pick("collect", "distribute"), "mask_size": mask_size}
    problem = Problem(given, ("input",), wide=wide_of(masks.dtype))
    if draw.chance(0.03):
        given["mask_size"], problem.must_refuse = tuple(-size for size in mask_size), "mask_size is negative"
    return problem


def _masks(input: Tensor, psa_type: str, mask_size: tuple[int, int]) -> Tensor:
    (B, _, H, W), (MH, MW) = input.shape, mask_size
    result = input.new_zeros(B, H * W, H, W) + 0 * input[:0].sum()
    for h, w, i, j in itertools.product(*map(range, (H, W, MH, MW))):
        row, column = h + i - (MH - 1) // 2, w + j - (MW - 1) // 2
        if 0 <= row < H and 0 <= column < W:
            place = (row * W + column, h, w) if psa_type == "collect" else (h * W + w, row, column)
            result[:, place[0], place[1], place[2]] = input[:, i * MW + j, h, w]
    return result


def _draw_maps(draw: Draw) -> Problem:
    B, C, H, W = draw.size(2), draw.size(4), draw.size(8), draw.size(8)
    settings = {name: (draw.size(3, 0), draw.size(3, 0)) for name in ("kernel_size", "patch_size", "stride")}
    settings["padding"] = draw.size(3, 0.4), draw.size(3, 0.4)
    settings |= {name: (draw.size(3, 0), draw.size(3, 0)) for name in ("dilation", "dilation_patch")}
    dtype = draw.dtype()
    given = {
        name: draw.place(draw.with_bad_numbers(draw.numbers(B, C, H, W)), dtype)
        for name in ("input1", "input2")
    }
    sizes = _window_counts((H, W), settings)
    refused = "" if min(sizes) > 0 else "no window fits"
    if draw.chance(0.03):
        name = draw.pick(*settings)
        settings[name], refused = (1, -1), f"{name} is negative"
    return Problem(
        given | settings,
        tuple(given),
        wide=wide_of(dtype),
        error_factor=200.0,
        # A pixel that is displaced from outside the map, or has no gradient, is 0 times the other one.
        skip=dict.fromkeys(("output", *given), draw.has_bad_numbers),
        must_refuse=refused,
    )


def _window_counts(sides: tuple[int, ...], settings: dict) -> list[int]:
    names = ("padding", "dilation", "kernel_size", "stride")
    rows = zip(sides, *(settings[name] for name in names), strict=True)
    return [
        (side + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
        for side, padding, dilation, kernel, stride in rows
    ]


def _correlation(
    input1: Tensor, input2: Tensor, kernel_size, patch_size, stride, padding, dilation, dilation_patch
) -> Tensor:
    B, _, H, W = input1.shape
    settings = dict(kernel_size=kernel_size, stride=stride, padding=padding, dilation=dilation)
    OH, OW = _window_counts((H, W), settings)
    rows = []
    for i, j, y, x in itertools.product(*map(range, (*patch_size, OH, OW))):
        total = (input1[:, :, :0].sum() + input2[:, :, :0].sum()).expand(B)
        for k, m in itertools.product(*map(range, kernel_size)):
            one = (y * stride[0] - padding[0] + k * dilation[0], x * stride[1] - padding[1] + m * dilation[1])
            other = [
                place + distance * number - distance * (count - 1) // 2
                for place, distance, number, count in zip(
                    one, dilation_patch, (i, j), patch_size, strict=True
                )
            ]
            if all(
                0 <= place < side for pair in (one, other) for place, side in zip(pair, (H, W), strict=True)
            ):
                total = total + (input1[:, :, one[0], one[1]] * input2[:, :, other[0], other[1]]).sum(1)
        rows.append(total)
    return torch.stack(rows, 1).view(B, *patch_size, OH, OW)


def _draw_shifts(draw: Draw) -> Problem:
    B, T, G, S = draw.size(3), draw.size(8), draw.size(4, 0), draw.size(9)
    maps = draw.place(draw.with_bad_numbers(draw.numbers(B, T, G * draw.size(3), S)), draw.dtype())
    kind = draw.pick(torch.int32, torch.int64)
    shift = draw.place(draw.whole(-5, 6, B, G), kind, can_expand=False)
    return Problem({"input": maps, "shift": shift}, ("input",), wide=wide_of(maps.dtype))


def _shifted(input: Tensor, shift: Tensor) -> Tensor:
    B, T, C, _ = input.shape
    result = torch.zeros_like(input) + 0 * input[:0].sum()
    for b, t, c in itertools.product(range(B), range(T), range(C)):
        frame = t - int(shift[b, c // (C // shift.shape[1])])
        if 0 <= frame < T:
            result[b, t, c] = input[b, frame, c]
    return result


OPERATORS = (
    Operator("psa_mask", psa_mask, _draw_masks, _masks, spoiled={"input": ("rank", 1)}),
    Operator(
        "correlation",
        correlation,
        _draw_maps,
        _correlation,
        spoiled={"input1": ("rank", "type", 0, 1, 2, 3), "input2": ("rank", "type", "device", 0, 1, 2, 3)},
    ),
    Operator(
        "tin_shift",
        tin_shift,
        _draw_shifts,
        _shifted,
        spoiled={"input": ("rank", 0), "shift": ("rank", "device", 0)},
    ),
)
