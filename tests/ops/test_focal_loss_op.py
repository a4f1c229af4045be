"""sigmoid_focal_loss and softmax_focal_loss."""

import math
from functools import partial

import pytest
import torch
from calls import refusals
from torch import Tensor
from torch.testing import assert_close

from tests.fuzz import sizes
from tests.fuzz.problem import WIDE_TYPES, Draw, Operator, Problem, largest, rand, wide_of
from visdet.ops import SigmoidFocalLoss, SoftmaxFocalLoss, corner_pool, sigmoid_focal_loss, softmax_focal_loss
from visdet.ops.focal_loss import sigmoid_focal_loss_reference


def _loss(draw: Draw, lowest: int, highest: int) -> Problem:
    N, C = draw.size(50), draw.pick(1, 2, 3, 7, 20, 80, 81)
    if draw.is_big:
        N, C = draw.pick(3000, 20000), 80
    dtype = draw.dtype()
    target = draw.whole(lowest, C + highest, N)
    weight = draw.place(draw.uniform(0, 2, C), dtype, bad=0.2) if draw.chance(0.3) else None
    arguments = {
        "input": draw.place(draw.numbers(N, C) * draw.pick(1.0, 1.0, 20.0), dtype, bad=0.5),
        "target": draw.place(target, can_expand=False),
        "gamma": draw.pick(2.0, 2.0, 0.0, 1.0, 1.5),
        "alpha": draw.pick(0.25, 0.5, 1.0),
        "weight": weight,
        "reduction": draw.pick("none", "mean", "sum"),
    }
    outside = bool(((target < lowest) | (target >= C)).any()) and highest == 1 and lowest < 0
    return Problem(
        arguments,
        differentiable=("input",),
        wide=wide_of(dtype),
        error_factor=256.0 + (N if arguments["reduction"] != "none" else 0),
        may_refuse="a target is no class" if outside else "",
    )


def _draw_sigmoid(draw: Draw) -> Problem:
    return _loss(draw, -2 if draw.chance(0.1) else 0, 3 if draw.chance(0.1) else 1)


def _draw_softmax(draw: Draw) -> Problem:
    return _loss(draw, -1, 1 if draw.chance(0.01) else 0)


def _reduced(loss: Tensor, rows: int, reduction: str) -> Tensor:
    if reduction == "none":
        return loss
    return loss.sum() / rows if reduction == "mean" else loss.sum()


def _sigmoid(
    input: Tensor, target: Tensor, gamma: float, alpha: float, weight: Tensor | None, reduction: str
) -> Tensor:
    weight = input.new_empty(0) if weight is None else weight
    return _reduced(sigmoid_focal_loss_reference(input, target, weight, gamma, alpha), len(input), reduction)


def _softmax(
    input: Tensor, target: Tensor, gamma: float, alpha: float, weight: Tensor | None, reduction: str
) -> Tensor:
    is_class = (target >= 0) & (target < input.shape[1])
    index = torch.where(is_class, target, 0)
    log_p = input.log_softmax(1).gather(1, index[:, None]).squeeze(1)
    loss = -alpha * (-log_p.expm1()).pow(gamma) * log_p
    if weight is not None:
        loss = loss * weight[index]
    loss = torch.where(is_class, loss, torch.where(target < 0, 0.0, torch.nan))
    return _reduced(loss, len(input), reduction)


def _loss_bounds(problem: Problem, bounds: dict[str, float]) -> None:
    given = problem.arguments
    input, weight, reduction = given["input"], given["weight"], given["reduction"]
    factor = 1.0 if weight is None else max(1.0, largest(weight))
    scale = (1 + largest(input)) * factor
    bounds["output"] = 2 * scale
    if reduction == "sum":
        bounds["output"] *= max(1, input.numel())
    elif reduction == "mean":
        bounds["output"] *= max(1, input.shape[1])
    if "input" in bounds:
        share = 1 / max(1, len(input)) if reduction == "mean" else 1.0
        bounds["input"] = 8 * scale * share * bounds.get("grad_peak", 0.0)


def _draw_corners(draw: Draw) -> Problem:
    x = draw.numbers(draw.size(3), draw.size(8), draw.size(20), draw.size(20))
    x = draw.place(x, draw.dtype(), bad=0.5)
    return Problem(
        {"x": x, "mode": draw.pick("top", "bottom", "left", "right")},
        differentiable=("x",),
        positions=("x",),  # Numbers are only compared with each other, so that bad numbers are defined, too.
        wide=x.dtype,
        error_factor=40.0,
    )


OPERATORS = (
    Operator(
        "sigmoid_focal_loss",
        sigmoid_focal_loss,
        _draw_sigmoid,
        _sigmoid,
        _loss_bounds,
        of_size=(
            lambda n: Problem(
                {"input": rand(n, 4), "target": torch.arange(n) % 4, "weight": rand(4)}, ("input",)
            ),
        ),
        launches=sizes.arguments(input="N C", target="N int64"),
    ),
    Operator(
        "softmax_focal_loss",
        softmax_focal_loss,
        _draw_softmax,
        _softmax,
        _loss_bounds,
    ),
    Operator("corner_pool", corner_pool, _draw_corners, corner_pool),
)


def test_sigmoid_by_hand():
    # p = 1/2 for every class: target -0.25 * 0.25 * log 0.5, others -0.75 * 0.25 * log 0.5
    target, other = 0.0625 * math.log(2), 0.1875 * math.log(2)
    loss = sigmoid_focal_loss(torch.zeros(2, 3), torch.tensor([1, 3]), reduction="none")
    assert_close(loss, torch.tensor([[other, target, other], [other] * 3]))
    mean = sigmoid_focal_loss(torch.zeros(2, 3), torch.tensor([1, 3]))
    assert mean.item() == pytest.approx((target + 5 * other) / 2)  # by rows, not by elements


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_softmax_ignores_whatever_stands_in_an_ignored_row(bad):
    logits = torch.tensor([[0.0, 1.0], [bad, 1.0]], requires_grad=True)
    weight = torch.tensor([bad, 1.0])  # of class 0, which no row has
    loss = softmax_focal_loss(logits, torch.tensor([1, -1]), weight=weight, reduction="none")
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    assert loss[1] == 0
    assert gradient[0].isfinite().all()
    assert gradient[0].all()
    assert not gradient[1].any()


@pytest.mark.parametrize("function", [sigmoid_focal_loss, softmax_focal_loss])
@pytest.mark.parametrize("gamma", [0.0, 0.01, 0.5, 1.0, 1.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_certain_rows_have_finite_gradients(function, gamma, dtype):
    logits = torch.tensor(
        [[200.0, -200.0], [40.0, 0.0], [17.0, 0.0], [0.0, 0.0]], dtype=dtype, requires_grad=True
    )
    loss = function(logits, torch.zeros(4).long(), gamma, reduction="none")
    assert loss.isfinite().all()
    loss.sum().backward()
    assert logits.grad.isfinite().all()
    assert logits.grad[0].abs().max() < 1e-6 < logits.grad[3].abs().max()


def test_modules_and_empty_input():
    assert SigmoidFocalLoss(2.0, 0.25, reduction="sum")(torch.zeros(0, 3), torch.zeros(0).long()) == 0
    module = SoftmaxFocalLoss(2.0, 0.25, weight=torch.tensor([1.0, 2.0]))
    assert list(module.state_dict()) == ["weight"]
    assert module(torch.zeros(2, 2), torch.tensor([0, 1])).item() == pytest.approx(0.0625 * math.log(2) * 1.5)


kernels = torch.ops.visdet
INPUT, CLASSES, WEIGHT = torch.zeros(13, 7), torch.zeros(13).long(), torch.ones(7)
REFUSED = [
    *refusals(
        kernels.sigmoid_focal_loss,
        (INPUT, CLASSES, WEIGHT, 2.0, 0.25),
        (0, INPUT[0], r"sigmoid_focal_loss: input must be \[N, C\], got \[7\]"),
        (0, INPUT.int(), "input must be float64, float32, float16 or bfloat16, got Int"),
        (1, CLASSES[1:], r"target must be \[13\], got \[12\]"),
        (1, CLASSES.int(), "target must be int64, got Int"),
        (2, WEIGHT[1:], r"weight must be \[7\] or empty, got \[6\]"),
        (2, WEIGHT.double(), "weight must be Float for input of type Float, got Double"),
    ),
    (
        partial(softmax_focal_loss, INPUT[:, :0], CLASSES),
        r"softmax_focal_loss: input must have at least one class, got \[13, 0\]",
    ),
]


@pytest.mark.parametrize("dtype", WIDE_TYPES, ids=str)
def test_losses_of_extreme_logits(dtype, device):
    logits = torch.tensor(
        [[0.0, 1e-8, -1e-8, 30.0, -30.0, 87.5, -87.5, 700.0, -700.0, 1e30, -1e30]], dtype=dtype, device=device
    )
    for target in (11, 3, 4, 9):
        arguments = (logits, torch.tensor([target], device=device), logits.new_empty(0), 2.0, 0.25)
        found = kernels.sigmoid_focal_loss(*arguments)
        expected = sigmoid_focal_loss_reference(
            logits.double(), *arguments[1:2], logits.double().new_empty(0), 2.0, 0.25
        )
        rtol = 1e-12 if dtype == torch.float64 else 1e-5 if device == "cpu" else 5e-5  # __expf
        assert_close(found.double(), expected, rtol=rtol, atol=1e-37)
        grad = kernels.sigmoid_focal_loss_backward(torch.ones_like(logits), *arguments)
        assert grad.isfinite().all()
    nan = torch.full((1, 20), float("nan"), device=device, dtype=dtype)
    arguments = (nan, torch.tensor([0], device=device), logits.new_empty(0), 2.0, 0.25)
    assert kernels.sigmoid_focal_loss(*arguments).isnan().all()
    assert kernels.sigmoid_focal_loss_backward(torch.ones_like(nan), *arguments).isnan().all()


@pytest.mark.cuda
def test_more_logits_than_32_bits_count():
    rows = (1 << 31) // 1024 + 3
    logits = torch.zeros(rows, 1024, dtype=torch.bfloat16, device="cuda")
    target = torch.full((rows,), 1024, device="cuda")
    target[-1] = 1023
    logits[-1, 1023] = 3
    loss = kernels.sigmoid_focal_loss(logits, target, torch.empty(0, device="cuda"), 2.0, 0.25)
    expected = sigmoid_focal_loss(logits[-1:].float().cpu(), torch.tensor([1023]), reduction="none")
    assert_close(loss[-1:].float().cpu(), expected, rtol=1e-2, atol=1e-3)
