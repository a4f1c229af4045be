"""carafe, masked_conv2d, corner_pool and point_sample; the registration of all detection operators."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from calls import refusals
from torch import Tensor, nn
from torch.testing import assert_close

from tests.fuzz.images import draw_images, near_pixels, sample_sizes
from tests.fuzz.problem import HALVES, WIDE_TYPES, Draw, Operator, Problem, largest, rand, wide_of
from visdet.ops import (
    CARAFEPack,
    ConvAWS2d,
    CornerPool,
    MaskedConv2d,
    SimpleRoIAlign,
    bilinear_grid_sample,
    carafe,
    corner_pool,
    generate_grid,
    masked_conv2d,
    point_sample,
    rel_roi_point_to_abs_img_point,
    rel_roi_point_to_rel_img_point,
)
from visdet.ops.carafe import carafe_reference


def _draw_masked(draw: Draw) -> Problem:
    C, out_channels = draw.pick(1, 2, 3, 8, 13), draw.pick(1, 2, 5, 8)
    kernel = (draw.pick(1, 2, 3), draw.pick(1, 3, 5))
    padding = (draw.pick(0, kernel[0] // 2), draw.pick(0, kernel[1] // 2))
    H, W = draw.size(12, 0) + kernel[0] - 1, draw.size(12, 0) + kernel[1] - 1
    B, dtype = draw.size(3), draw.dtype()
    mask = draw.numbers(B, H, W)
    arguments: dict[str, Any] = {
        "features": draw.values(B, C, H, W, dtype=dtype),
        "mask": draw.place(mask, draw.dtype(dtype, torch.float32), can_expand=False, bad=0.5),
        "weight": draw.values(out_channels, C, *kernel, dtype=dtype),
        "bias": draw.place(draw.numbers(out_channels), dtype) if draw.chance(0.7) else None,
        "padding": padding,
    }
    return Problem(
        arguments,
        differentiable=("features", "weight", "bias"),
        positions=("mask",),
        wide=wide_of(dtype),
        epsilon=torch.finfo(dtype).eps if dtype in HALVES else None,
        error_factor=16.0 if dtype in HALVES else 64.0 + C * kernel[0] * kernel[1] + B * H * W,
    )


def _masked_reference(
    features: Tensor, mask: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, int]
) -> Tensor:
    output = F.conv2d(features.contiguous(), weight.contiguous(), bias, padding=padding)
    is_marked = mask[:, None, : output.shape[2], : output.shape[3]] > 0
    marked = torch.zeros_like(output[:, :1], dtype=torch.bool)
    marked[:, :, : is_marked.shape[2], : is_marked.shape[3]] = is_marked
    return torch.where(marked, output, 0.0)


def _draw_carafe(draw: Draw) -> Problem:
    K, G, s = draw.pick(1, 3, 5, 5, 7), draw.pick(1, 1, 2, 3, 4), draw.pick(1, 2, 2, 3)
    C, B = G * draw.pick(1, 2, 3, 5, 8, 30), draw.size(3)
    H, W = draw.size(9, 0.01), draw.size(9, 0.01)
    if draw.is_big:
        H, W, C = 20, 27, G * 32
    dtype = draw.dtype()
    masks = draw.numbers(B, K * K * G, H * s, W * s)
    masks = draw.place(masks, draw.dtype(dtype, dtype, torch.float32), bad=0.5)
    return Problem(
        {
            "features": draw.values(B, C, H, W, dtype=dtype),
            "masks": masks if dtype not in HALVES else masks.to(dtype),
            "kernel_size": K,
            "group_size": G,
            "scale_factor": s,
        },
        differentiable=("features", "masks"),
        wide=wide_of(dtype),
        error_factor=64.0 + K * K * s * s + C,
    )


def _draw_points(draw: Draw) -> Problem:
    C, _, Q, D = sample_sizes(draw, draw.is_big)
    images = draw_images(draw, C, False)
    shape = (len(images), Q, 2) if draw.chance(0.5) else (len(images), Q, D, 2)
    points = draw.with_bad_numbers(draw.uniform(-0.2, 1.2, *shape))
    points = draw.place(points, images.dtype, not draw.has_bad_numbers)
    draw.leave_out(points, near_pixels(images, points * 2 - 1), -9.0)
    settings = {
        "align_corners": draw.chance(0.3),
        "mode": draw.pick("bilinear", "bilinear", "bilinear", "nearest"),
        "padding_mode": draw.pick("zeros", "zeros", "border", "reflection"),
    }
    usual = settings["mode"] == "bilinear" and not settings["align_corners"]
    exact = images.dtype in WIDE_TYPES
    near = near_pixels(images, points * 2 - 1)
    has_bad = not bool((points.isfinite() & (points.abs() < 1e3)).all())
    unsure = has_bad or not usual or not exact or bool(near.any())
    takes_nearest = settings["mode"] == "nearest"
    if unsure and takes_nearest:
        exact = False
    has_no_gradient = takes_nearest or has_bad or not exact
    return Problem(
        {"input": images, "points": points, **settings},
        differentiable=("input", "points"),
        wide=images.dtype,
        error_factor=64.0 + 16 * max(images.shape[2:]) + 0.5 * points[..., 0].numel(),
        skip={
            "points": unsure or settings["padding_mode"] != "zeros",
            "output": has_no_gradient,
            "input": has_no_gradient,
        },
        may_refuse="images have no pixels" if images.numel() == 0 else "",
    )


def _points_reference(input: Tensor, points: Tensor, **settings: Any) -> Tensor:
    grid = torch.where(points.isfinite() & (points.abs() < 1e3), points, -9.0) * 2 - 1
    if 0 in input.shape[2:]:  # grid_sample refuses such an image.
        nothing = input.sum() + grid.flatten()[:0].sum()
        return input.new_zeros(*input.shape[:2], *points.shape[1:-1]) + nothing
    if grid.dim() == 3:
        return F.grid_sample(input, grid[:, :, None], **settings).squeeze(3)
    return F.grid_sample(input, grid, **settings)


def _points_bounds(problem: Problem, bounds: dict[str, float]) -> None:
    images = problem.arguments["input"]
    bounds["output"] = 2 * largest(images)
    if "points" in bounds:
        gradient = bounds.get("grad_output", 0.0) * max(1, images.shape[1])
        bounds["points"] = 8 * max(images.shape[2:]) * largest(images) * gradient
    if "input" in bounds:
        bounds["input"] = bounds.get("grad_output", 0.0) * problem.error_factor


OPERATORS = (
    Operator(
        "masked_conv2d",
        masked_conv2d,
        _draw_masked,
        _masked_reference,
    ),
    Operator(
        "carafe",
        carafe,
        _draw_carafe,
        carafe_reference,
        spoiled={"features": (0, 2, 3), "masks": ("rank", 0, 1, 2, 3)},
        of_size=(
            lambda n: Problem(
                {
                    "features": rand(n, 4, 4, 5),
                    "masks": rand(n, 9, 8, 10),
                    "kernel_size": 3,
                    "group_size": 1,
                    "scale_factor": 2,
                },
                ("features", "masks"),
            ),
        ),
    ),
    Operator("point_sample", point_sample, _draw_points, _points_reference, _points_bounds),
)


def test_carafe_pack_starts_as_a_mean():
    layer = CARAFEPack(8, 2)
    torch.nn.init.zeros_(layer.content_encoder.weight)
    x = torch.randn(1, 8, 4, 4)
    expected = F.avg_pool2d(x, 5, 1, 2).repeat_interleave(2, 2).repeat_interleave(2, 3)
    assert_close(layer(x), expected)
    assert {name.split(".")[0] for name in layer.state_dict()} == {"channel_compressor", "content_encoder"}


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_masked_convolution_is_the_convolution_where_marked(share):
    layer = MaskedConv2d(3, 4, (3, 5), padding=(1, 2)).double()
    x = torch.randn(2, 3, 6, 7, dtype=torch.float64)
    mask = (torch.rand(2, 6, 7) < share).float()
    assert_close(layer(x, mask), layer(x) * mask[:, None])


def test_gradients_of_a_masked_convolution_add_up_in_float32(device):
    """The second pixel's gradients from three taps are 4e4, 4e4 and -4e4: float16 does not hold their partial sums."""
    x = torch.zeros(1, 1, 1, 3, dtype=torch.float16, device=device, requires_grad=True)
    weight = torch.ones(1, 1, 1, 3, dtype=torch.float16, device=device, requires_grad=True)
    out = masked_conv2d(x, torch.ones(1, 1, 3, device=device), weight, None, (0, 1))
    assert out.dtype == torch.float16
    out.backward(torch.tensor([[[[4e4, 4e4, -4e4]]]], dtype=torch.float16, device=device))
    assert x.grad.flatten().tolist()[1:] == [4e4, 0] and x.grad.dtype == weight.grad.dtype == torch.float16


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("right", [[1, 3, 3], [2, 2, 5]]),
        ("left", [[3, 3, 2], [5, 5, 5]]),
        ("bottom", [[1, 3, 2], [2, 3, 5]]),
        ("top", [[2, 3, 5], [2, 0, 5]]),
    ],
)
def test_corner_pool_by_hand(mode, expected):
    x = torch.tensor([[[[1.0, 3, 2], [2, 0, 5]]]], requires_grad=True)
    out = CornerPool(mode)(x)
    assert out[0, 0].tolist() == expected
    out.sum().backward()
    assert x.grad.sum() == 6
    assert corner_pool(torch.zeros(1, 2, 0, 3), mode).shape == (1, 2, 0, 3)


def test_points():
    x = torch.arange(6.0).view(1, 1, 2, 3)
    centres = generate_grid(1, (2, 3), "cpu")
    assert point_sample(x, centres).flatten().tolist() == pytest.approx([0, 1, 2, 3, 4, 5], abs=1e-5)
    assert point_sample(x, centres.view(1, 2, 3, 2)).shape == (1, 1, 2, 3)
    rois = torch.tensor([[0.0, 1, 2, 5, 10]])
    points = torch.tensor([[[0.5, 0.25]]])
    assert rel_roi_point_to_abs_img_point(rois, points).tolist() == [[[3, 4]]]
    assert rel_roi_point_to_rel_img_point(rois, points, (8, 6)).tolist() == [[[0.5, 0.5]]]
    grid = torch.rand(1, 4, 4, 2) * 2 - 1
    assert_close(bilinear_grid_sample(x, grid), F.grid_sample(x, grid, align_corners=False))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("channels_last", [False, True])
def test_points_of_large_16_bit_maps(dtype, channels_last):
    """torch's CPU kernel counts the numbers of a map in 16 bits where they are of 16 bits."""
    x = (torch.arange(300.0) / 100).view(1, 1, 300, 1).expand(2, 4, 300, 200).to(dtype).contiguous()
    x = x.contiguous(memory_format=torch.channels_last) if channels_last else x
    x, points = x.requires_grad_(), torch.rand(2, 50, 2).to(dtype).requires_grad_()
    out = point_sample(x, points)
    expected = point_sample(x.detach().double(), points.detach().double())
    assert out.dtype == dtype
    assert_close(out.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-3)
    for grad in torch.autograd.grad(out.sum(), (x, points)):
        assert grad.dtype == dtype and grad.isfinite().all() and grad.any()


@pytest.mark.parametrize("shape", [(2, 3, 1, 0), (2, 3, 0, 4)], ids=str)
def test_points_of_a_map_without_pixels_are_outside(shape, device):
    x = torch.zeros(shape, device=device, requires_grad=True)
    for size in ((2, 5, 2), (2, 5, 1, 2)):
        points = torch.full(size, float("nan"), device=device, requires_grad=True)
        out = point_sample(x, points)
        assert out.shape == (2, 3, *size[1:-1]) and not out.any()
        grads = torch.autograd.grad(out.sum(), (x, points))
        assert grads[0].shape == shape and not grads[1].any()
        for mode in ("border", "reflection"):
            message = rf"point_sample: input must have pixels where padding_mode is '{mode}', got \[2, 3, "
            with pytest.raises(ValueError, match=message):
                point_sample(x, points, padding_mode=mode)
    assert not bilinear_grid_sample(x, torch.zeros(2, 5, 6, 2, device=device)).any()
    assert SimpleRoIAlign(2, 1.0)(x, torch.zeros(4, 5, device=device)).shape == (4, 3, 2, 2)


def test_simple_roi_align_keeps_the_order_of_regions():
    x = torch.stack([torch.zeros(1, 4, 4), torch.ones(1, 4, 4)])
    rois = torch.tensor([[1.0, 0, 0, 4, 4], [0, 0, 0, 4, 4], [1, 1, 1, 3, 3]])
    assert SimpleRoIAlign(1, 1.0)(x, rois).flatten().tolist() == [1, 0, 1]
    assert SimpleRoIAlign(2, 1.0)(x, rois[:0]).shape == (0, 1, 2, 2)


@pytest.mark.parametrize("dtype", HALVES)
def test_simple_roi_align_places_samples_in_float32(dtype):
    """The map counts columns from column 240, where positions in bfloat16 are off by up to half a pixel."""
    x = (torch.arange(256.0) - 240).expand(1, 1, 8, 256).to(dtype)
    rois = torch.tensor([[0, 229.4, 1, 249.4, 5], [0, 233.3, 1, 244.3, 7]])
    output = SimpleRoIAlign(7, 1.0)(x, rois)
    expected = SimpleRoIAlign(7, 1.0)(x.double(), rois.double())
    assert output.dtype == dtype
    assert_close(output, expected.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-4)


@pytest.mark.parametrize("images, regions", [(2, 0), (0, 3), (0, 0), (1, 3)])
def test_simple_roi_align_without_samples_has_a_gradient(images, regions):
    x = torch.full((images, 2, 4, 4), torch.inf, requires_grad=True)
    output = SimpleRoIAlign(2, 1.0)(x, torch.tensor([[5.0, 0, 0, 4, 4]]).repeat(regions, 1))
    assert output.shape == (regions, 2, 2, 2) and not output.any()
    output.sum().backward()
    assert torch.equal(x.grad, torch.zeros(images, 2, 4, 4))


def test_weights_of_a_plain_convolution_that_are_assigned_to_a_model_without_data():
    plain = nn.Conv2d(3, 4, 3)
    with torch.device("meta"):
        layer = ConvAWS2d(3, 4, 3)
    layer.load_state_dict(plain.state_dict(), assign=True)
    x = torch.rand(1, 3, 5, 5)
    assert_close(layer(x), plain(x), rtol=1e-4, atol=1e-4)


def test_a_checkpoint_of_other_layers_leaves_a_standardised_convolution_alone():
    layer = ConvAWS2d(3, 4, 3)
    with torch.no_grad():
        layer.weight.mul_(5)
    expected = copy.deepcopy(layer.state_dict())
    assert set(layer.load_state_dict({}, strict=False).missing_keys) == set(expected)
    assert_close(layer.state_dict(), expected, rtol=0, atol=0)


def test_names_in_the_registries():
    pytest.importorskip("mmengine")
    from visdet.registry import MODELS, OPS

    assert MODELS.build(dict(type="DCN", in_channels=4, out_channels=4, kernel_size=3)).kernel_size == (3, 3)
    assert type(MODELS.build(dict(type="RoIAlign", output_size=7, sampling_ratio=0))).__name__ == "RoIAlign"
    modules = [
        "DCNv2",
        "carafe",
        "SAC",
        "ConvAWS",
        "MaskedConv2d",
        "CornerPool",
        "RoIPool",
        "SigmoidFocalLoss",
    ]
    functions = ["nms", "batched_nms", "soft_nms", "roi_align", "deform_conv2d", "carafe", "point_sample"]
    assert [name for name in modules if name not in MODELS] == []
    assert [OPS.get(name).__name__ for name in functions] == functions


X, MASK, WEIGHT = torch.zeros(1, 4, 4, 4), torch.ones(1, 4, 4), torch.zeros(2, 4, 3, 3)
KERNELS, POINTS = torch.zeros(1, 9, 8, 8), torch.zeros(1, 5, 2)


MAPS, MASKS = torch.zeros(2, 6, 5, 7), torch.zeros(2, 18, 10, 14)
REFUSED = [
    *refusals(
        torch.ops.visdet.carafe,
        (MAPS, MASKS, 3, 2, 2),
        (0, MAPS[0], r"carafe: features must be \[B, C, H, W\], got \[6, 5, 7\]"),
        (0, MAPS.int(), "features must be float64, float32, float16 or bfloat16, got Int"),
        (1, MASKS[:, 1:], r"masks must be \[2, 18, 10, 14\], got \[2, 17, 10, 14\]"),
        (1, MASKS.double(), "masks must be Float, the type of features, got Double"),
        (2, 2, "kernel_size must be odd and below 256, got 2"),
        (3, 4, "features must have a multiple of 4 channels, got 6"),
        (4, 0, "scale_factor must be from 1 to 255, got 0"),
    ),
    (lambda: carafe(X, KERNELS, 4, 1, 2), "kernel_size must be odd .*got 4"),
    (lambda: carafe(X, KERNELS, 3, 3, 2), "multiple of 3 channels"),
    (lambda: masked_conv2d(X, MASK, WEIGHT, None, 1, 2), "stride must be at most 1, got 2"),
    (lambda: masked_conv2d(X, MASK, WEIGHT, torch.zeros(1)), r"bias must be \[2\], got \[1\]"),
    (lambda: MaskedConv2d(4, 4, 3, groups=2)(X, MASK), "groups and dilation must be 1"),
    (lambda: CornerPool("up")(X), "mode must be one of"),
    (lambda: point_sample(X, POINTS.expand(2, 5, 2)), "point_sample: points must be"),
    (lambda: point_sample(X, torch.zeros(1, 5, 3)), "point_sample: points must be"),
    (lambda: point_sample(X, torch.zeros(2, 3)), "point_sample: points must be"),
    (lambda: point_sample(X, torch.zeros(1, 1, 1, 1, 2)), "point_sample: points must be"),
    (lambda: point_sample(X[:, :, :0], POINTS.expand(2, 5, 2)), "point_sample: points must be"),
    (
        lambda: bilinear_grid_sample(X[..., :0], torch.zeros(1, 5, 5, 3)),
        "bilinear_grid_sample: .*expected grid",
    ),
    (lambda: rel_roi_point_to_abs_img_point(POINTS[0, :2, :1], POINTS.expand(2, 5, 2)), "rois must be"),
    (lambda: rel_roi_point_to_abs_img_point(torch.zeros(2, 5), POINTS), "_point: rel_roi_points must be"),
    (lambda: SimpleRoIAlign(2, 1.0)(X, torch.zeros(2, 4)), "SimpleRoIAlign: rois must be"),
    (lambda: SimpleRoIAlign(2, 1.0)(X[0], torch.zeros(2, 5)), "SimpleRoIAlign: features must be"),
]


@pytest.mark.cuda
def test_carafe_of_many_images():
    # More groups of channels of images than the second dimension of a grid has blocks.
    features = torch.randn(66000, 2, 2, 1, device="cuda", requires_grad=True)
    masks = torch.randn(66000, 1, 4, 2, device="cuda", requires_grad=True)
    output = carafe(features, masks, 1, 1, 2)
    wide = features.repeat_interleave(2, 2).repeat_interleave(2, 3)
    assert_close(output, wide * masks)
    grads = torch.autograd.grad(output.square().sum(), (features, masks))
    expected = torch.autograd.grad((wide * masks).square().sum(), (features, masks))
    assert_close(grads, expected)
