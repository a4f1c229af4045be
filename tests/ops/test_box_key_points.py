"""box_key_points: by hand, against the plain-torch definition, and its promises."""

import math

import torch
from calls import assert_matches, refusals
from hypothesis import strategies as st
from torch.testing import assert_close

from tests.fuzz import sizes
from tests.fuzz.problem import EXTREME, HALVES, Operator, Problem, Seeded, largest, rand
from visdet.ops import box_key_points, box_key_points_reference


def make_case(B, Q, D, F, M, *, dtype=torch.float64, device="cpu"):
    """Return box_key_points' tensors, the yaws' sin and cos not normalised."""
    draw = Seeded()
    return tuple(draw.normal(*shape).to(device, dtype) for shape in ((B, Q, D), (F, 3), (B, Q, M * 3)))


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
        logits = draw.values(B, Q, M * 3, dtype=draw.dtype(dtype, *HALVES))
    arguments = {
        "anchors": draw.place(anchors, dtype, bad=0.5),
        "fixed": draw.values(F, 3, dtype=draw.dtype(dtype, *HALVES)),
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
    place = max(0.5, largest(given["fixed"])) * size * (1 + largest(anchors))
    bounds["output"] = largest(anchors) + 2 * place * max(1.0, largest(anchors))
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
        of_size=(
            lambda n: Problem(
                {"anchors": rand(2, n, 11), "fixed": rand(3, 3), "logits": rand(2, n, 6)},
                ("anchors", "logits"),
            ),
        ),
        launches=launches(),
    ),
)


def test_one_box_by_hand(device):
    # 4 x 2 x 1 m at (10, 20, 3), a quarter turn to the left: its length lies along +y, its width along -x.
    anchor = torch.tensor([10, 20, 3, math.log(4), math.log(2), 0, 1, 0, 99.0], device=device)
    fixed = torch.tensor([[0, 0, 0], [0.5, 0, 0], [0, 0.5, -0.5]], device=device)
    logits = torch.tensor([0.0, math.log(3), 0], device=device)  # sigmoid(log 3) = 3 / 4
    points = box_key_points(anchor[None, None], fixed, logits[None, None])
    expected = torch.tensor([[10.0, 20, 3], [10, 22, 3], [9, 20, 2.5], [9.5, 20, 3]], device=device)
    assert_close(points, expected[None, None])
    assert_close(box_key_points(anchor[None, None], fixed), expected[None, None, :3])


def test_size_above_the_limit_is_clamped_and_has_no_gradient(device):
    anchors, fixed, logits = make_case(1, 2, 11, 7, 6, device=device)
    anchors[0, 0, 3] = 300
    limited = anchors.clone()
    limited[0, 0, 3] = 1.5
    leaf = anchors.requires_grad_()
    out = box_key_points(leaf, fixed, logits, 1.5)
    assert_close(out, box_key_points(limited, fixed, logits, 1.5))
    (grad,) = torch.autograd.grad(out.sum(), leaf)
    assert grad[0, 0, 3] == 0 and (grad[0, :, :3] == 13).all() and (grad[0, :, 8:] == 0).all()


def test_fixed_points_may_learn(device):
    case = make_case(2, 3, 11, 7, 6, device=device)
    assert_matches(box_key_points, box_key_points_reference, case, 1e-11, of=(0, 1, 2))


CASE = make_case(2, 3, 11, 7, 6)
REFUSED = refusals(
    box_key_points,
    CASE,
    (0, CASE[0].bfloat16(), "anchors must be float64 or float32 .*got torch.bfloat16"),
)
