"""A linear layer under autocast, against torch's."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from tests.fuzz.problem import HALVES, Draw, Operator, Problem, generator_of
from tests.fuzz.rounding import EXACT_STEPS, Steps, bounds_of, epsilon_of
from visdet.ops.fused import autocast_linear, suits_autocast_linear


def _draw(draw: Draw) -> Problem:
    C, D = draw.size(40), draw.pick(1, 2, 4, 7, 8, 33, 64, 80)
    rows = [draw.size(20) for _ in range(draw.pick(1, 1, 2, 3))]
    if draw.is_big:
        rows, C, D = [draw.pick(900, 2500)], draw.pick(256, 1024), draw.pick(256, 4, 91)
    dtype = draw.pick(*HALVES)
    return Problem(
        {
            "input": draw.values(*rows, C, dtype=draw.pick(dtype, torch.float32)),
            "weight": draw.values(D, C, dtype=torch.float32, bad=0.2),
            "bias": draw.values(D, dtype=torch.float32, bad=0.2),
            "dtype": dtype,
        },
        differentiable=("input", "weight", "bias"),
        epsilon=epsilon_of(dtype),
    )


def _reference(
    input: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype, steps: Steps = EXACT_STEPS
) -> Tensor:
    return steps.linear(steps.disturbed(input), steps.disturbed(weight), steps.disturbed(bias))


OPERATORS = (
    Operator(
        "autocast_linear",
        autocast_linear,
        _draw,
        _reference,
        bounds_of(_reference),
    ),
)


def problem(shape, columns, device, dtype=torch.float32):
    generator = generator_of(sum(shape) + columns)
    input = torch.randn(shape, generator=generator).to(device, dtype)
    weight = torch.randn(columns, shape[-1], generator=generator) * shape[-1] ** -0.5
    return input, weight.to(device), torch.randn(columns, generator=generator).to(device)


def under_autocast(input, weight, bias, dtype):
    with torch.autocast(input.device.type, dtype):
        return F.linear(input, weight, bias)


def random_gradient(output):
    return torch.randn(output.shape, generator=generator_of(1)).to(output)


def results(function, input, weight, bias, dtype):
    """Return the output and all gradients."""
    leaves = [tensor.detach().requires_grad_() for tensor in (input, weight, bias)]
    output = function(*leaves, dtype)
    return [output.detach(), *torch.autograd.grad(output, leaves, random_gradient(output))]


def test_the_output_may_be_changed_in_place(device):
    input, weight, bias = problem((2, 5, 16), 4, device)

    def changed(function):
        def run(*arguments):
            output = function(*arguments)
            output[..., :2] += 1
            return output.sigmoid()

        return run

    found = results(changed(autocast_linear), input, weight, bias, torch.bfloat16)
    expected = results(changed(under_autocast), input, weight, bias, torch.bfloat16)
    assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_the_input_without_a_gradient_gets_none():
    input, weight, bias = problem((5, 16), 4, "cpu")
    weight.requires_grad_(), bias.requires_grad_()
    autocast_linear(input, weight, bias, torch.bfloat16).sum().backward()
    assert input.grad is None and weight.grad.dtype == bias.grad.dtype == torch.float32


@pytest.mark.parametrize("dtype", HALVES)
def test_a_backward_under_autocast_is_the_same(device, dtype):
    """Autocast of another type would round the products of the backward to it."""
    given = [tensor.requires_grad_() for tensor in problem((5, 16), 4, device)]
    grads = []
    for other in (None, torch.float16, torch.bfloat16):
        output = autocast_linear(*given, dtype)
        with torch.autocast(device, other or dtype, enabled=other is not None):
            grads.append(torch.autograd.grad(output, given, torch.full_like(output, 300.0)))
    for outside, *under in zip(*grads, strict=True):
        for one in under:
            assert_close(one, outside, rtol=0, atol=0)


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("dtype", HALVES)
def test_relu_and_dropout_after_the_layer(device, p, dtype):
    given = [tensor.requires_grad_() for tensor in problem((7, 30, 16), 24, device)]
    torch.manual_seed(0)
    output = autocast_linear(*given, dtype, p)
    linear = under_autocast(*given, dtype)
    kept = output != 0
    share = float(kept.sum() / (linear > 0).sum())
    assert (p == 0) == (share == 1) and abs(share - (1 - p)) < 0.05
    expected = torch.where(kept, linear.relu() / (1 - p), 0)
    assert_close(output, expected, rtol=2e-2, atol=2e-2)
    gradient = random_gradient(output)
    found, right = (torch.autograd.grad(one, given, gradient) for one in (output, expected))
    for a, b in zip(found, right, strict=True):
        assert a.dtype == torch.float32
        assert_close(a, b, rtol=2e-2, atol=2e-2 * float(b.abs().max()))


def half(tensor):
    return torch.nn.Parameter(tensor.detach().bfloat16())


def own(tensor):
    return tensor.detach().as_subclass(type("Own", (torch.Tensor,), {})).requires_grad_()


UNSUITED = {
    "a row less": lambda x, weight, bias: (x[1:], weight, bias),
    "no bias": lambda x, weight, bias: (x, weight, None),
    "frozen bias": lambda x, weight, bias: (x, weight, bias.requires_grad_(False)),
    "weight in halves": lambda x, weight, bias: (x, half(weight), bias),
    "weight of another width": lambda x, weight, bias: (x, weight[:, 1:], bias),
    "a subclass": lambda x, weight, bias: (x, own(weight), bias),
    "on the CPU": lambda x, weight, bias: (x.cpu(), weight, bias),
    "a vector": lambda x, weight, bias: (x[0], weight, bias),
}


@pytest.mark.cuda
@pytest.mark.parametrize("change", UNSUITED)
def test_what_suits(change):
    layer, x = torch.nn.Linear(16, 8, device="cuda"), torch.ones(8192, 16, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        assert all(suits_autocast_linear(given, layer.weight, layer.bias) for given in (x, x.bfloat16()))
        assert not suits_autocast_linear(*UNSUITED[change](x, layer.weight, layer.bias))
        with torch.no_grad():
            assert not suits_autocast_linear(x, layer.weight, layer.bias)
    assert not suits_autocast_linear(x, layer.weight, layer.bias)


HAS_AMX = "amx_bf16" in Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else False


@pytest.mark.xfail(
    HAS_AMX, reason="torch's product of bfloat16 reads beyond a row on CPUs with AMX", strict=False
)
def test_a_product_of_torch_reads_its_rows_alone():
    """Linear layers under autocast use it; autocast_linear does not on CPUs."""
    memory = torch.full((17 * 80 + 64,), float("nan"), dtype=torch.bfloat16)
    rows, weight = memory[: 17 * 80].view(17, 80), torch.ones(22, 80, dtype=torch.bfloat16)
    rows[:-1] = 1
    assert torch.mm(rows, weight.T)[:-1].isfinite().all()


def test_a_product_of_autocast_linear_reads_its_rows_alone():
    rows, weight = torch.ones(17, 80), torch.ones(22, 80)
    rows[-1] = float("nan")
    assert autocast_linear(rows, weight, torch.zeros(22), torch.bfloat16)[:-1].isfinite().all()
