"""Layer normalisation of a residual sum, and ReLU, with dropout in the same kernel."""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from tests.fuzz.problem import HALVES, Draw, Operator, Problem, generator_of, wide_of
from tests.fuzz.rounding import EXACT_STEPS, Steps, bounds_of, epsilon_of
from visdet.ops.fused import dropout_add_layer_norm, give_rows, in_autocast_type, sum_in_autocast_type


def _draw_layer_norm(draw: Draw) -> Problem:
    C = draw.pick(1, 2, 3, 8, 8, 16, 40, 64, 264, 512, 520)
    C = 0 if draw.chance(0.01) else C
    rows = [draw.size(20) for _ in range(draw.pick(0, 1, 1, 2))]
    if draw.is_big:
        rows, C = [draw.pick(900, 2500)], draw.pick(256, 32)
    dtype, p, relu = draw.dtype(), draw.pick(0.0, 0.0, 0.1, 0.5, 1.0), draw.chance(0.4)
    is_autocast = draw.device == "cuda" and dtype in HALVES and draw.chance(0.7)
    parameter_type = torch.float32 if is_autocast else dtype
    x = draw.values(*rows, C, dtype=dtype)
    residual = None
    if draw.chance(0.6):
        residual = draw.with_bad_numbers(draw.numbers(*rows, C))
        residual = draw.place(residual, draw.pick(dtype, torch.float32) if is_autocast else dtype)
    arguments = {
        "input": x,
        "residual": residual,
        "weight": draw.values(C, dtype=parameter_type, bad=0.2),
        "bias": draw.values(C, dtype=parameter_type, bad=0.2),
    }
    seed = draw.random.getrandbits(40)
    settings: dict[str, Any] = {
        "p": p,
        "relu": relu,
        "autocast": dtype if is_autocast else None,
        "seed": seed,
    }
    vector = torch.ones(C, dtype=parameter_type, device=draw.device)

    def run(ones: Tensor) -> Tensor:
        return _layer_norm(ones, None, vector, vector, **settings, eps=1.0, kept=None)

    kept = _kept(draw, x, p, run)
    if C == 1:  # The normalisation of a single channel has no gradient that would tell, and it is always 0.
        kept.fill_(True)
    return Problem(
        # The last argument makes the results of the reference those of the same mask.
        {**arguments, **settings, "eps": draw.pick(1e-5, 1e-3), "kept": kept},
        differentiable=("input", "residual", "weight", "bias"),
        wide=wide_of(dtype),
        epsilon=epsilon_of(dtype),
        error_factor=64.0 + x.numel() / max(C, 1),
        # The gradient of a constant row may overflow before it is dropped.
        skip={"input": True} if dtype == torch.float16 and p == 1 else {},
        must_refuse="there are no channels" if C == 0 else "",
    )


def _kept(draw: Draw, input: Tensor, p: float, run: Callable[[Tensor], Tensor]) -> Tensor:
    """Return which elements dropout keeps, of an input in this memory layout: those whose gradient is not zero."""
    if p in (0.0, 1.0) or input.numel() == 0:
        return torch.full(input.shape, p < 1, device=input.device)
    storage = torch.ones(
        input.untyped_storage().nbytes() // input.itemsize, dtype=input.dtype, device=input.device
    )
    ones = storage.as_strided(input.shape, input.stride(), input.storage_offset()).requires_grad_()
    output = run(ones)
    grad_output = torch.randn(output.shape, generator=draw.generator, dtype=torch.float64)
    (gradient,) = torch.autograd.grad(output, ones, grad_output.to(output))
    return gradient != 0


def _layer_norm(
    input: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    p: float,
    relu: bool,
    autocast: torch.dtype | None,
    seed: int,
    eps: float,
    kept: Tensor | None,
) -> Tensor:
    torch.manual_seed(seed)
    with torch.autocast("cuda", autocast, enabled=autocast is not None):
        return dropout_add_layer_norm(input, residual, weight, bias, p, eps, relu)


def _layer_norm_reference(
    input: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    p: float,
    relu: bool,
    autocast: torch.dtype | None,
    seed: int,
    eps: float,
    kept: Tensor,
    steps: Steps = EXACT_STEPS,
) -> Tensor:
    x = steps.relu(input, None) if relu else input
    x = steps.disturbed(_dropped(x, p, kept))
    x = x if residual is None else steps.disturbed(x + residual)
    x = steps.normalised(x, (-1,), eps) if x.numel() else x
    return steps.disturbed(steps.disturbed(steps.disturbed(x) * weight) + bias)


def _dropped(x: Tensor, p: float, kept: Tensor) -> Tensor:
    return x * kept if p in (0.0, 1.0) else x * (kept.double() / (1 - p))


OPERATORS = (
    Operator(
        "dropout_add_layer_norm",
        _layer_norm,
        _draw_layer_norm,
        _layer_norm_reference,
        bounds_of(_layer_norm_reference),
        spoiled={"residual": (0,)},
    ),
)


def rows(shape, dtype, residual_dtype, device):
    """Return input, residual (None without a type), weight and bias, that require gradients."""
    generator = generator_of(sum(shape))

    def draw(*size):
        return torch.randn(*size, generator=generator)

    tensors = [draw(*shape).to(dtype), None, draw(shape[-1]) + 1, draw(shape[-1])]
    if residual_dtype is not None:
        tensors[1] = (3 * draw(*shape) + 1).to(residual_dtype)
    return [None if x is None else x.to(device).requires_grad_() for x in tensors]


def autocast(dtype):
    return torch.autocast("cuda", dtype) if dtype in HALVES else contextlib.nullcontext()


@pytest.mark.cuda
@pytest.mark.parametrize("shape", [(1, 8), (3, 5, 32), (2, 901, 256), (33, 512), (4000, 40)])
@pytest.mark.parametrize(
    ("dtype", "residual_dtype"),
    [(torch.float32, None), (torch.float32, torch.float32)]
    + [(half, residual) for half in HALVES for residual in (None, half, torch.float32)],
)
@pytest.mark.parametrize("relu", [False, True])
def test_kernels_serve_and_repeat_every_bit(shape, dtype, residual_dtype, relu):
    """Random calls compare their numbers with float64."""
    tensors = rows(shape, dtype, residual_dtype, "cuda")
    leaves = [x for x in tensors if x is not None]
    with autocast(dtype):
        output, again = (dropout_add_layer_norm(*tensors, relu=relu) for _ in range(2))
        with torch.no_grad():
            predicted = dropout_add_layer_norm(*tensors, relu=relu)
    assert output.dtype == torch.float32 and type(output.grad_fn).__name__ == "_DropoutAddLayerNormBackward"
    assert torch.equal(predicted, output) and predicted.grad_fn is None
    grads, grads_again = (torch.autograd.grad(one.square().sum(), leaves) for one in (output, again))
    assert [grad.dtype for grad in grads] == [leaf.dtype for leaf in leaves]
    assert_close((again, grads_again), (output, grads), rtol=0, atol=0)


def draws(function):
    """Return results of a function after the same seed twice, and then without a new one."""
    torch.manual_seed(1)
    first = function()
    torch.manual_seed(1)
    return first, function(), function()


def test_the_seed_of_torch_governs_dropout(device):
    x, residual, weight, bias = rows((64, 256), torch.float32, torch.float32, device)
    first, same, other = draws(lambda: dropout_add_layer_norm(x, residual, weight, bias, 0.5))
    assert torch.equal(first, same) and not torch.equal(first, other)


@pytest.mark.cuda
def test_replays_of_a_graph_draw_anew():
    x, residual, weight, bias = (
        leaf.detach() for leaf in rows((64, 256), torch.float32, torch.float32, "cuda")
    )

    def run():
        return dropout_add_layer_norm(x, residual, weight, bias, 0.5)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run()
    replays = []
    for _ in range(2):
        graph.replay()
        replays.append(output.clone())
    assert not torch.equal(*replays)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.75])
def test_each_element_is_dropped_independently_with_the_probability(p, device):
    ones = torch.ones(2**12, 256, device=device)
    kept = (dropout_add_layer_norm(ones, None, ones[0], 0 * ones[0], p) > 0).float().flatten() - (1 - p)
    assert abs(kept.mean()) < 6e-3
    for distance in (1, 2, 3, 4, 8, 32, 256, 4096):
        correlation = (kept[:-distance] * kept[distance:]).mean() / (p * (1 - p))
        assert abs(correlation) < 6e-3, distance


@pytest.mark.cuda
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_relu_before_the_norm_keeps_nan_and_stops_gradients(p):
    x, residual, weight, bias = rows((32, 64), torch.float32, torch.float32, "cuda")
    negative = (-x.detach().abs()).requires_grad_()
    output = dropout_add_layer_norm(negative, residual, weight, bias, p, relu=True)
    assert_close(output, F.layer_norm(residual, (64,), weight, bias), rtol=1e-5, atol=1e-5)
    grads = torch.autograd.grad(output.square().sum(), (negative, residual))
    assert not grads[0].any() and grads[1].any()
    bad = x.detach().clone()
    bad[3, 5] = torch.nan
    found = dropout_add_layer_norm(bad, None, weight, bias, relu=True).isnan()
    assert found[3].all() and found.sum() == 64


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", HALVES)
def test_the_gradient_of_a_copy_is_added_to_that_of_the_output(dtype):
    tensors = rows((8192, 64), dtype, torch.float32, "cuda")
    with autocast(dtype):
        output = dropout_add_layer_norm(*tensors)
    copy = in_autocast_type(output, dtype)
    assert torch.equal(copy, output.to(dtype)) and copy.dtype == dtype
    of_output, of_copy = torch.randn_like(output), torch.randn_like(copy)
    widened = of_copy.float()
    for given, of_given, same in (
        ((output, copy), (of_output, of_copy), of_output + widened),
        (copy, of_copy, widened),
    ):
        found, expected = (
            torch.autograd.grad(one, tensors, gradient, retain_graph=True)
            for one, gradient in ((given, of_given), (output, same))
        )
        assert_close(found, expected, rtol=0, atol=0)
    with torch.no_grad():
        output += 1
    assert in_autocast_type(output, dtype) is output


@pytest.mark.cuda
@pytest.mark.parametrize("images", [1, 2])
@pytest.mark.parametrize("dtype", HALVES)
def test_the_sum_with_what_the_next_layer_adds(dtype, images):
    """The gradient for a table whose rows are added is that of the sum over all rows."""
    tensors = rows((2, 5000, 64), dtype, torch.float32, "cuda")
    generator = torch.Generator("cuda").manual_seed(1)
    table = torch.randn(4, 64, generator=generator, device="cuda", requires_grad=True)
    index = torch.randint(4, (5000,), generator=generator, device="cuda")
    added = torch.randn(images, 5000, 64, generator=generator, device="cuda") + table[index]
    with autocast(dtype):
        alone = dropout_add_layer_norm(*tensors, next_pos=added)
        assert sum_in_autocast_type(alone, added).dtype == torch.float32  # nothing is known of its gradient
        give_rows(added, table, index)
        output = dropout_add_layer_norm(*tensors, next_pos=added)
    total = sum_in_autocast_type(output, added)
    assert torch.equal(output, alone) and total.dtype == dtype
    assert torch.equal(total, (output + added).to(dtype))
    gradient = torch.randn(total.shape, generator=generator, device="cuda").to(dtype)
    leaves = [*tensors, table]
    found = torch.autograd.grad((output, total), leaves, (output.detach(), gradient), retain_graph=True)
    plain = dropout_add_layer_norm_alone(*tensors, dtype)
    expected = torch.autograd.grad(
        (plain, plain + added), leaves, (output.detach(), gradient.float()), retain_graph=True
    )
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, rtol=2e-2, atol=1e-2 * float(other.abs().max()))
    with torch.no_grad():
        added += 1
    assert sum_in_autocast_type(output, added).dtype == torch.float32


def dropout_add_layer_norm_alone(input, residual, weight, bias, dtype):
    with autocast(dtype):
        return F.layer_norm(residual + input, weight.shape, weight, bias)


REFUSED = [
    (
        partial(dropout_add_layer_norm, torch.ones(3, 0), None, torch.ones(0), torch.ones(0)),
        "dropout_add_layer_norm: input must have .* 1 channel",
    )
]
