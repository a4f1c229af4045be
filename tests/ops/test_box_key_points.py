"""box_key_points: by hand, against the plain-torch definition, and its promises."""

import math

import pytest
import torch
from hypothesis import strategies as st

from tests.fuzz import sizes
from tests.fuzz.problem import EXTREME, HALVES, Operator, Problem, largest, rand
from visdet.ops import _library, box_key_points, box_key_points_reference

DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda])]
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6}  # of the largest value
SIZES = {  # B, Q, D, F, M
    "B2-Q5-D11-F7-M6": (2, 5, 11, 7, 6),
    "B1-Q3-D8-F1-M0": (1, 3, 8, 1, 0),
    "B3-Q2-D9-F0-M5": (3, 2, 9, 0, 5),
    "B1-Q150-D40-F3-M37": (1, 150, 40, 3, 37),
}


def make_case(B, Q, D, F, M, *, dtype=torch.float64, device="cpu"):
    """Return box_key_points' tensors, the yaws' sin and cos not normalised."""
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).to(device)
        for shape in ((B, Q, D), (F, 3), (B, Q, M * 3))
    )


def gradients(function, case, grad_output):
    anchors, fixed, logits = case
    leaves = [anchors.detach().clone().requires_grad_(), logits.detach().clone().requires_grad_()]
    output = function(leaves[0], fixed, leaves[1])
    return [output, *torch.autograd.grad(output, leaves, grad_output.to(output))]


def draw_problem(draw):
    B, Q, F, M = draw.size(3), draw.size(20), draw.size(8), draw.size(7)
    if draw.is_big:
        B, Q = 2, 900
    dtype = draw.dtype(torch.float32, torch.float64)
    anchors = draw.uniform(-2, 2, B, Q, draw.pick(8, 8, 9, 11, 12, 7 if draw.chance(0.1) else 8))
    if draw.chance(0.3):
        anchors = anchors * 6
    if draw.chance(0.3):
        logits = None
    else:
        logits = draw.place(draw.with_bad_numbers(draw.numbers(B, Q, M * 3)), draw.dtype(dtype, *HALVES))
    arguments = {
        "anchors": draw.place(draw.with_bad_numbers(anchors), dtype),
        "fixed": draw.place(draw.with_bad_numbers(draw.numbers(F, 3)), draw.dtype(dtype, *HALVES)),
        "logits": logits,
        "max_log_size": draw.pick(10.0, 10.0, 1.0, 4.5),
    }
    return Problem(
        arguments,
        differentiable=("anchors", "logits"),
        wide=dtype,
        error_factor=256.0,
        skip={"anchors": ~(arguments["anchors"].abs() < EXTREME)},  # next to NaN, either side's gradient
        may_refuse="anchors have fewer than 8 numbers" if anchors.shape[-1] < 8 else "",
    )


def bounds_of(problem, bounds):
    given = problem.arguments
    anchors = given["anchors"].detach().double()
    sizes = torch.where(anchors.abs() < 1e4, anchors, 0.0)[..., 3:6].clamp(max=given["max_log_size"])
    size = math.exp(float(sizes.max())) if sizes.numel() else 1.0
    place = max(0.5, largest(given["fixed"])) * size * (1 + largest(given["anchors"]))
    bounds["output"] = largest(given["anchors"]) + 2 * place * max(1.0, largest(given["anchors"]))
    for name in ("anchors", "logits"):
        if name in bounds:
            bounds[name] = 4 * bounds.get("grad_total", 0.0) * max(1.0, bounds["output"])


@st.composite
def launches(draw):
    dtype, Q, F, M = draw(sizes.wide_types), draw(sizes.count), draw(sizes.small), draw(sizes.small)
    B = draw(st.integers(0, 3))
    return {
        "anchors": sizes.empty(B, Q, 11, dtype=dtype).requires_grad_(),
        "fixed": sizes.empty(F, 3, dtype=dtype),
        "logits": sizes.empty(B, Q, 3 * M, dtype=dtype) if M else None,
    }


OPERATORS = (
    Operator(
        "box_key_points",
        box_key_points,
        draw_problem,
        box_key_points_reference,
        bounds_of,
        spoiled={
            "anchors": ("rank", "type"),
            "fixed": ("rank", "device", 1),
            "logits": ("rank", "device", 0, 1, 2),
        },
        of_size=(
            lambda n: Problem(
                {"anchors": rand(2, n, 11), "fixed": rand(3, 3), "logits": rand(2, n, 6)},
                ("anchors", "logits"),
            ),
        ),
        launches=launches,
    ),
)


@pytest.mark.parametrize("device", DEVICES)
def test_one_box_by_hand(device):
    # 4 x 2 x 1 m at (10, 20, 3), a quarter turn to the left: its length lies along +y, its width along -x.
    anchor = torch.tensor([10, 20, 3, math.log(4), math.log(2), 0, 1, 0, 99.0], device=device)
    fixed = torch.tensor([[0, 0, 0], [0.5, 0, 0], [0, 0.5, -0.5]], device=device)
    logits = torch.tensor([0.0, math.log(3), 0], device=device)  # sigmoid(log 3) = 3 / 4
    points = box_key_points(anchor[None, None], fixed, logits[None, None])
    expected = torch.tensor([[10.0, 20, 3], [10, 22, 3], [9, 20, 2.5], [9.5, 20, 3]], device=device)
    torch.testing.assert_close(points, expected[None, None])
    torch.testing.assert_close(box_key_points(anchor[None, None], fixed), expected[None, None, :3])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", SIZES)
def test_matches_reference(name, dtype, device):
    B, Q, _, F, M = SIZES[name]
    case = make_case(*SIZES[name], dtype=dtype, device=device)
    grad_output = torch.randn(B, Q, F + M, 3, generator=torch.Generator().manual_seed(1)).to(device)
    actual = gradients(box_key_points, case, grad_output)
    expected = gradients(box_key_points_reference, [t.double() for t in case], grad_output)
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.dtype == dtype and ours.shape == theirs.shape
        if theirs.numel():
            error = (ours.double() - theirs).abs().max() / theirs.abs().max()
            assert theirs.abs().max() > 0 and error < TOLERANCE[dtype], f"{error:.1e}"


@pytest.mark.parametrize("device", DEVICES)
def test_gradcheck(device):
    anchors, fixed, logits = make_case(2, 2, 9, 2, 3, device=device)
    leaves = (anchors.requires_grad_(), logits.requires_grad_())
    assert torch.autograd.gradcheck(lambda a, x: box_key_points(a, fixed, x), leaves, nondet_tol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_size_above_the_limit_is_clamped_and_has_no_gradient(device):
    anchors, fixed, logits = make_case(1, 2, 11, 7, 6, device=device)
    anchors[0, 0, 3] = 300
    limited = anchors.clone()
    limited[0, 0, 3] = 1.5
    leaf = anchors.requires_grad_()
    out = box_key_points(leaf, fixed, logits, 1.5)
    torch.testing.assert_close(out, box_key_points(limited, fixed, logits, 1.5))
    (grad,) = torch.autograd.grad(out.sum(), leaf)
    assert grad[0, 0, 3] == 0 and (grad[0, :, :3] == 13).all() and (grad[0, :, 8:] == 0).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("column", [0, 3, 6])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_number_that_is_not_finite_goes_where_the_formula_takes_it(bad, column, device):
    anchors, fixed, logits = make_case(1, 3, 11, 7, 6, dtype=torch.float32, device=device)
    anchors[0, 1, column] = bad
    logits[0, 2] = bad
    actual = box_key_points(anchors, fixed, logits)
    expected = box_key_points_reference(anchors, fixed, logits)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert actual[0, 0].isfinite().all()


REJECTIONS = {
    "anchors": (
        0,
        lambda t: t[..., :7],
        r"anchors must be \[B, Q, D\] with D of at least 8, got \[2, 3, 7\]",
    ),
    "anchors' type": (0, lambda t: t.bfloat16(), "anchors must be float64 or float32, got BFloat16"),
    "fixed": (1, lambda t: t[:, :2], r"fixed must be \[F, 3\], got \[7, 2\]"),
    "logits": (2, lambda t: t[..., :4], r"logits must be \[2, 3, M \* 3\], got \[2, 3, 4\]"),
    "logits' size": (2, lambda t: t[:1], r"logits must be \[2, 3, M \* 3\], got \[1, 3, 18\]"),
    "fixed's gradient": (
        1,
        lambda t: t.requires_grad_(),
        "fixed is not differentiable, got one that requires",
    ),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", REJECTIONS)
def test_rejects(name, device):
    index, change, message = REJECTIONS[name]
    case = list(make_case(2, 3, 11, 7, 6, device=device))
    case[index] = change(case[index])
    with pytest.raises(RuntimeError, match=message):
        box_key_points(*case)


def test_without_a_library_plain_torch_computes_the_same(monkeypatch):
    case = make_case(2, 3, 11, 7, 6)
    expected = box_key_points(*case)
    monkeypatch.setattr(_library, "is_loaded", lambda name: False)
    monkeypatch.delattr(torch.ops, "visdet")  # nothing of it may be asked for
    torch.testing.assert_close(box_key_points(*case), expected)
