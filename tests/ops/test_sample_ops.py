"""sample_sum and sample_dot: by hand, against plain torch and golden vectors, and their promises."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from calls import assert_matches, assert_near, gradients, in_order, relative_error
from golden import golden, under
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from tests.fuzz import sizes
from tests.fuzz.images import draw_images, near_pixels, sample_sizes
from tests.fuzz.problem import (
    HALVES,
    Draw,
    Operator,
    Problem,
    Seeded,
    generator_of,
    gradient_sum,
    largest,
    rand,
    row_sum,
    wide_of,
)
from visdet.ops import sample_dot, sample_dot_reference, sample_sum, sample_sum_reference
from visdet.ops.explain import choose_only


def _samples(draw: Draw, images: Tensor, Q: int, D: int) -> Tensor:
    B, _, H, W = images.shape
    kind = draw.random.random()
    if kind < 0.6:
        samples = draw.uniform(-1.2, 1.2, B, Q, D, 2)
    elif kind < 0.75:
        size = torch.tensor([max(W, 1), max(H, 1)], dtype=torch.float64)
        samples = (draw.uniform(-1.3, 1.3, B, Q, D, 2) * size).round() / size  # borders and centres of pixels
    elif kind < 0.85:
        samples = draw.uniform(-1, 1, 1, 1, 1, 2) + draw.uniform(0, 1e-3, B, Q, D, 2)
    else:
        samples = draw.numbers(B, Q, D, 2)
    wide = wide_of(images.dtype)
    types = (wide, wide, torch.float64, *HALVES)
    samples = draw.place(samples, draw.dtype(*types), not draw.has_bad_numbers, bad=0.5)
    draw.leave_out(samples, near_pixels(images, samples))
    return samples


def _problem(arguments: dict, constants: dict, may_refuse: str = "") -> Problem:
    images, samples = arguments["images"], arguments["samples"]
    is_empty = images.shape[2] * images.shape[3] == 0
    return Problem(
        {**arguments, **constants},
        differentiable=tuple(arguments),
        positions=("samples",),
        wide=wide_of(images.dtype),
        error_factor=64.0 + 16 * max(images.shape[2:]) + 0.5 * samples.shape[1] * samples.shape[2],
        skip={"samples": near_pixels(images, samples)},
        may_refuse="images have no pixels" if is_empty else may_refuse,
    )


def _draw_sum(draw: Draw) -> Problem:
    big = draw.is_big
    C, G, Q, D = sample_sizes(draw, big)
    images = draw_images(draw, C, big)
    samples = _samples(draw, images, Q, D)
    wide = wide_of(images.dtype)
    weights = draw.values(len(images), G, Q, D, dtype=draw.dtype(wide, wide, *HALVES))
    return _problem({"images": images, "samples": samples, "weights": weights}, {})


def _draw_dot(draw: Draw) -> Problem:
    big = draw.is_big
    C, G, Q, D = sample_sizes(draw, big)
    octaves = draw.pick(0, 0, 1, 2, 6, 12, 28, 30)
    octaves = octaves if draw.chance(0.1) else min(octaves, C // 2)
    images = draw_images(draw, C, big)
    samples = _samples(draw, images, Q, D)
    wide, B = wide_of(images.dtype), len(images)
    types = wide, wide, *HALVES
    queries = draw.numbers(B, G, Q, max(C - 2 * octaves, 0))
    queries = draw.place(queries, draw.dtype(*types), bad=0.5)
    depths = draw.place(draw.uniform(-4, 4, B, Q, D), draw.dtype(*types), bad=0.5)
    return _problem(
        {"images": images, "samples": samples, "queries": queries, "depths": depths},
        {"num_octaves": octaves},
        may_refuse="the octaves take more channels than there are" if 2 * octaves > C else "",
    )


def _sum_bounds(problem: Problem, bounds: dict[str, float]) -> None:
    images, weights = problem.arguments["images"], problem.arguments["weights"]
    peak = largest(images)
    bounds["output"] = peak * row_sum(weights, 1)
    groups = max(1, weights.shape[1])
    if "images" in bounds:  # All of the gradient of a pixel at the border may come from rounding.
        bounds["images"] += groups * largest(weights) * bounds.get("grad_peak", 0.0)
    if "weights" in bounds:
        bounds["weights"] = peak * gradient_sum(bounds)
    if "samples" in bounds:
        bounds["samples"] = (
            4 * max(images.shape[2:]) * peak * largest(weights) * gradient_sum(bounds) * groups
        )


def _dot_bounds(problem: Problem, bounds: dict[str, float]) -> None:
    given = problem.arguments
    images, queries = given["images"], given["queries"]
    octaves = given["num_octaves"]
    peak, groups = largest(images), max(1, queries.shape[1])
    # The error of the reference's angles, in float64, is its epsilon times their size.
    angle = 2 * math.pi * 2**octaves * largest(given["depths"])
    angle *= torch.finfo(torch.float64).eps / torch.finfo(problem.wide).eps
    row = row_sum(queries, 1) + 2 * octaves * (1 + angle)  # of a query and its encoding
    bounds["output"] = peak * row
    gradient = bounds.get("grad_output", 0.0)
    for name, bound in (
        ("images", bounds.get("images", 0.0) + (1 + angle) * gradient * groups * max(1, queries.shape[2])),
        ("queries", peak * gradient),
        ("samples", 4 * max(images.shape[2:]) * peak * row * gradient * groups),
        ("depths", 4 * math.pi * 2**octaves * (1 + angle) * peak * gradient * groups * max(1, octaves)),
    ):
        if name in bounds:
            bounds[name] = bound


@st.composite
def _launches_of_sample_dot(draw: st.DrawFn) -> dict[str, Any]:
    empty = sizes.empty
    B, C, H, W = draw(st.integers(0, 3)), draw(sizes.channels), draw(sizes.side), draw(sizes.side)
    Q, D, G, dtype = draw(sizes.count), draw(sizes.count), draw(st.integers(0, 9)), draw(sizes.value_types)
    octaves = draw(st.one_of(st.integers(0, 6), st.sampled_from([12, 28, 40, 100]))) if C else 0
    octaves, wide = min(octaves, C // 2), wide_of(dtype)
    return {
        "images": empty(B, C, H, W, dtype=dtype),
        "samples": empty(B, Q, D, 2, dtype=wide),
        "queries": empty(B, G, Q, C - 2 * octaves, dtype=wide),
        "depths": empty(B, Q, D, dtype=wide),
        "num_octaves": octaves,
    }


OPERATORS = (
    Operator(
        "sample_sum",
        sample_sum,
        _draw_sum,
        sample_sum_reference,
        _sum_bounds,
        reads_beside=("images",),
        spoiled={"images": ("rank", 0), "samples": ("rank", 0, 1, 2, 3), "weights": ("rank", 0, 2, 3)},
        of_size=(
            lambda n: Problem(
                {"images": rand(2, 4, 5, 6), "samples": rand(2, n, 3, 2), "weights": rand(2, 2, n, 3)},
                ("images", "samples", "weights"),
            ),
        ),
        launches=sizes.arguments(images="B C H W", samples="B Q D 2 wide", weights="B G Q D wide"),
    ),
    Operator(
        "sample_dot",
        sample_dot,
        _draw_dot,
        sample_dot_reference,
        _dot_bounds,
        reads_beside=("images",),
        spoiled={
            "images": ("rank", 0, 1),
            "samples": ("rank", 0, 1, 2, 3),
            "queries": ("rank", 0, 2, 3),
            "depths": ("rank", 0, 1, 2),
        },
        of_size=(
            lambda n: Problem(
                {
                    "images": rand(2, 4, 5, 6),
                    "samples": rand(2, n, 3, 2),
                    "queries": rand(2, 2, n, 2),
                    "depths": rand(2, n, 3),
                    "num_octaves": 1,
                },
                ("images", "samples", "queries", "depths"),
            ),
        ),
        launches=_launches_of_sample_dot(),
    ),
)


TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SIZES = {  # B C H W Q D G octaves
    "plain": (2, 12, 5, 7, 4, 6, 2, 2),
    "odd": (1, 31, 9, 4, 3, 5, 3, 0),
    "wide": (2, 140, 16, 20, 5, 150, 4, 6),
    "one-group": (1, 1025, 3, 4, 2, 3, 1, 1),
    "many-groups": (1, 24, 6, 6, 3, 4, 11, 4),
    "two-packs": (2, 200, 6, 8, 3, 40, 3, 2),  # of channels a lane, on CUDA
    "rows-read-again": (2, 324, 4, 6, 3, 9, 2, 3),  # for every sample: too many channels for registers
}
OPS = {"sum": sample_sum, "dot": sample_dot}


def make_case(name, B, C, H, W, Q, D, G, octaves, dtype=torch.float64, device="cpu", channels_last=False):
    """Return (tensors, other arguments); a part of the samples is outside, none within 0.1 px of a pixel's centre."""
    draw, wide = Seeded(), wide_of(dtype)
    size = torch.tensor([W, H], dtype=torch.float64)
    pixels = (draw.uniform(B, Q, D, 2) * 1.4 - 0.2) * size
    pixels = pixels.floor() + 0.1 + 0.8 * draw.uniform(*pixels.shape)
    samples = (pixels + 0.5) / size * 2 - 1
    images = draw.normal(B, C, H, W).to(device, dtype)
    if channels_last:
        images = images.to(memory_format=torch.channels_last)
    if name == "sum":
        others = [draw.normal(B, G, Q, D)]
        rest = ()
    else:
        others = [draw.normal(B, G, Q, C - 2 * octaves), draw.uniform(B, Q, D)]
        rest = (octaves,)
    return [images, *(x.to(device, wide) for x in (samples, *others))], rest


@pytest.mark.parametrize("case", ["random", "num_octaves_0", "border"])
def test_golden_vectors(case, device):
    arrays = under(golden("fused_sample_ops"), case)
    given = {key.removeprefix("input/"): value for key, value in arrays.items() if key.startswith("input/")}
    octaves = (given["images"].shape[1] - given["queries"].shape[-1]) // 2
    is_defined = given["sample_gradient_defined"][..., None]
    for name, names, rest in (
        ("sum", ("images", "samples", "weights"), ()),
        ("dot", ("images", "samples", "queries", "depths"), (octaves,)),
    ):
        tensors = [given[key].to(device) for key in names]
        output, grads = gradients(OPS[name], [*tensors, *rest], given[f"grad_{name}"])
        grads[1].mul_(is_defined.to(device))  # of the samples
        wanted = {key: arrays[f"output/sample_{name}/grad_{key}"] for key in names}
        wanted["samples"] *= is_defined
        assert_near((output, *grads), (arrays[f"output/sample_{name}"], *wanted.values()), 1e-11)


ARGUMENTS = {
    "sum": ("images", "samples", "weights"),
    "dot": ("images", "samples", "queries", "depths", "num_octaves"),
}
REFUSED = [
    (partial(OPS[name], **given[name] | changes), f"^sample_{name}: .*{message}")
    for given in [
        {
            name: dict(zip(names, (*tensors, *rest), strict=True))
            for name, names in ARGUMENTS.items()
            for tensors, rest in [make_case(name, *SIZES["plain"], dtype=torch.float32)]
        }
    ]
    for name, changes, message in (
        (
            "sum",
            dict(images=torch.zeros(2, 12, 0, 7)),
            "images must have a positive height and width",
        ),
        (
            "dot",
            dict(num_octaves=7),
            "num_octaves must be from 0 to 30, twice it at most the channels C = 12",
        ),
    )
]


@pytest.mark.cuda
def test_more_than_two_to_the_31_elements():
    # The image has 2^31 + 2^20 elements in bfloat16 (4.3 GB); its last pixel is sampled and gets a gradient.
    C, H, W = 1024, 1024, 2050
    images = torch.zeros(1, H, W, C, dtype=torch.bfloat16, device="cuda").permute(0, 3, 1, 2)
    images[:, :, -1, -1] = 3
    samples = torch.tensor([1 - 1 / W, 1 - 1 / H], device="cuda").reshape(1, 1, 1, 2)
    weights = torch.ones(1, 1, 1, 1, device="cuda")
    out = sample_sum(images.requires_grad_(), samples, weights)
    assert_close(out, torch.full_like(out, 3), rtol=1e-2, atol=0)
    (grad,) = torch.autograd.grad(out.sum(), images)
    last = grad[0, :, -1, -1]
    assert_close(last, torch.ones_like(last), rtol=1e-2, atol=0)
    assert not grad[0, :, :-1].any()


@pytest.mark.parametrize("octaves", [11, 12, 27, 28, 30])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_sample_dot_with_every_number_of_octaves(dtype, octaves, device):
    # With 12 octaves in float64, 28 in float32, static and dynamic shared memory together pass 48 KB.
    tensors, rest = make_case("dot", 2, 64, 5, 7, 3, 200, 2, octaves, dtype=dtype, device=device)
    # The encoding of a depth d turns 2^octaves d times: float64's own rounding of its angle is 2^octaves eps.
    tolerance = {torch.float64: 1e-11 + 2.0**octaves * 1e-15, torch.float32: 5e-5, torch.bfloat16: 8e-3}[
        dtype
    ]
    assert_matches(sample_dot, sample_dot_reference, [*tensors, *rest], tolerance)


@pytest.mark.cuda
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", OPS)
def test_sample_ops_give_the_same_by_every_path(name, sizes):
    tensors, rest = make_case(name, *SIZES[sizes], dtype=torch.float32, device="cuda")
    with choose_only(f"sample_{name}", "copy_first"):
        expected = OPS[name](*tensors, *rest)
    with choose_only(f"sample_{name}", "in_place"):
        tensors[0] = tensors[0].to(memory_format=torch.channels_last)
        assert torch.equal(OPS[name](*tensors, *rest), expected)


@pytest.mark.cuda
@pytest.mark.parametrize("Q, D", [(40, 60), (300, 400), (600, 800)], ids=["2400", "120000", "480000"])
def test_all_samples_in_one_cell(Q, D):
    # Deterministic mode orders the records of a cell: here one cell has all of them.
    images = torch.randn(1, 4, 6, 7, dtype=torch.float64)
    pixels = torch.tensor([2.0, 3.0]) + 0.1 + 0.8 * torch.rand(1, Q, D, 2)
    samples = ((pixels + 0.5) / torch.tensor([7.0, 6.0]) * 2 - 1).double()
    weights = torch.rand(1, 1, Q, D).double()
    _, expected = gradients(sample_sum_reference, [images, samples, weights])
    tensors = [tensor.float().cuda() for tensor in (images, samples, weights)]
    with in_order():
        runs = [gradients(sample_sum, tensors)[1] for _ in range(3)]
    for grads in runs:
        assert_close(grads, runs[0], rtol=0, atol=0)
        assert relative_error(grads[0], expected[0]) < 1e-3


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("C", [3, 20, 31])
def test_an_infinite_channel_of_queries_leaves_depths_alone(C, dtype, device):
    images = torch.randn(1, C, 4, 5, generator=generator_of(0)).to(device, dtype)
    images[:, 0] = torch.inf
    wide = wide_of(dtype)
    samples = torch.full((1, 2, 3, 2), 0.3, dtype=wide, device=device)
    queries = torch.ones(1, 2, 2, C - 2, dtype=wide, device=device)
    depths = torch.full((1, 2, 3), 0.2, dtype=wide, device=device, requires_grad=True)
    dots = sample_dot(images, samples, queries, depths, 1)
    (gradient,) = torch.autograd.grad(dots, depths, torch.ones_like(dots))
    assert gradient.isfinite().all()
    assert gradient.all()


def test_depths_that_are_not_read_have_no_gradient(device):
    images = torch.randn(1, 3, 4, 5, device=device)
    samples = torch.zeros(1, 2, 3, 2, device=device)
    depths = torch.zeros(1, 2, 3, device=device, requires_grad=True)
    dots = sample_dot(images, samples, torch.ones(1, 2, 2, 3, device=device), depths)
    (gradient,) = torch.autograd.grad(dots, depths, torch.full_like(dots, torch.nan), allow_unused=True)
    assert gradient is None or not gradient.any()
