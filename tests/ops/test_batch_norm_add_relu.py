"""Batch normalisation in training, with a residual sum and ReLU in the same kernels."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from calls import refusals
from torch import Tensor
from torch.testing import assert_close

from tests.fuzz.problem import HALVES, Draw, Operator, Problem, Seeded, generator_of, wide_of
from tests.fuzz.rounding import EXACT_STEPS, Steps, bounds_of, epsilon_of, greatest, near_zero_of
from visdet.ops.fused import batch_norm_add_relu


def _draw_batch_norm(draw: Draw) -> Problem:
    B, C, H, W = draw.size(4), draw.pick(1, 2, 3, 8, 8, 16, 24, 64), draw.size(12), draw.size(12)
    if draw.chance(0.01):
        C = 0
    if draw.is_big:
        B, C, H, W = draw.pick((2, 264, 19, 23), (3, 64, 50, 41), (2, 2056, 3, 5))
    dtype, eps, relu = draw.dtype(), draw.pick(1e-5, 1e-3), draw.chance(0.6)
    parameter_type = draw.pick(dtype, torch.float32) if dtype in HALVES else dtype
    x = draw.with_bad_numbers(draw.numbers(B, C, H, W) + draw.pick(0.0, 0.0, 1.0, 50.0))
    arguments: dict[str, Any] = {
        "input": _image(draw, x, dtype),
        "residual": None,
        "weight": draw.values(C, dtype=parameter_type, bad=0.2),
        "bias": draw.values(C, dtype=parameter_type, bad=0.2),
        "running_mean": None,
        "running_var": None,
        "num_batches_tracked": None,
    }
    if draw.chance(0.6):
        arguments["running_mean"] = draw.place(draw.numbers(C), parameter_type, can_expand=False)
        arguments["running_var"] = draw.place(draw.uniform(0, 2, C), parameter_type, can_expand=False)
    if draw.chance(0.5):
        arguments["num_batches_tracked"] = draw.whole(0, 9).to(draw.device)
    settings = {
        "momentum": draw.pick(0.1, 0.0, 1.0),
        "eps": eps,
        "relu": relu,
        "near_zero": near_zero_of(dtype),
    }
    if draw.chance(0.5):
        residual = draw.with_bad_numbers(draw.numbers(B, C, H, W))
        if (
            relu and residual.numel() > C
        ):  # Where the sum is next to zero, rounding decides whether ReLU lets it through.
            given = {name: value.double().cpu() for name, value in arguments.items() if value is not None}
            norm = F.batch_norm(given["input"], None, None, given["weight"], given["bias"], True, eps=eps)
            margin = 2 * settings["near_zero"] * greatest(norm + residual)
            residual = torch.where((norm + residual).abs() < margin, residual + 2 * margin, residual)
        arguments["residual"] = _image(draw, residual, dtype)
    values = B * H * W
    must_refuse = "there is one value for each channel" if values == 1 else ""
    return Problem(
        {**arguments, **settings},
        differentiable=("input", "residual", "weight", "bias"),
        wide=wide_of(dtype),
        epsilon=epsilon_of(dtype),
        error_factor=64.0 + values,
        must_refuse="there are no channels" if C == 0 else must_refuse,
    )


def _image(draw: Draw, images: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the images in the channels-last format, which CUDA kernels serve, or in a random layout."""
    if draw.chance(0.4):
        return images.to(draw.device, dtype).contiguous(memory_format=torch.channels_last)
    return draw.place(images, dtype)


def _batch_norm(
    input: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    momentum: float,
    eps: float,
    relu: bool,
    near_zero: float,
) -> tuple[Tensor, ...]:
    """Return the result and the running statistics, which are copies, so that a second call begins with the same."""
    mean, var, count = (
        None if tensor is None else _copy(tensor)
        for tensor in (running_mean, running_var, num_batches_tracked)
    )
    output = batch_norm_add_relu(input, residual, weight, bias, mean, var, count, momentum, eps, relu)
    after = [tensor for tensor in (mean, var) if tensor is not None]
    return output, *after, *([] if count is None else [count.double()])


def _copy(tensor: Tensor) -> Tensor:
    """Return a copy in the same memory layout, with the same numbers around it."""
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return copy.set_(tensor.untyped_storage().clone(), tensor.storage_offset(), tensor.shape, tensor.stride())


def _batch_norm_reference(
    input: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    momentum: float,
    eps: float,
    relu: bool,
    near_zero: float,
    steps: Steps = EXACT_STEPS,
) -> tuple[Tensor, ...]:
    x, dims = input, (0, 2, 3)
    if x.numel():
        x = steps.disturbed(steps.normalised(x, dims, eps))
    x = steps.disturbed(steps.disturbed(x * weight[:, None, None]) + bias[:, None, None])
    x = x if residual is None else steps.disturbed(x + residual)
    after = []
    if running_mean is not None and running_var is not None:
        mean, var = running_mean, running_var
        if input.numel():
            largest = input.abs().amax(dims)
            mean = steps.disturbed(input.detach().mean(dims), largest)
            var = input.detach().var(dims)
        after = [
            steps.disturbed(old + momentum * (new - old), old.abs() + new.abs())
            for old, new in ((running_mean, mean), (running_var, var))
        ]
    if num_batches_tracked is not None:
        after.append(num_batches_tracked.double() + 1)
    return steps.relu(x, near_zero) if relu else x, *after


OPERATORS = (
    Operator(
        "batch_norm_add_relu",
        _batch_norm,
        _draw_batch_norm,
        _batch_norm_reference,
        bounds_of(_batch_norm_reference),
    ),
)


def draw(shape, dtype, device, has_residual=True, offset=0.0):
    """Return input, residual, weight and bias, that require gradients. The images have their channels last."""
    generator = generator_of(sum(shape))

    def images():
        drawn = torch.randn(shape, generator=generator) * 2 + offset
        return drawn.to(device, dtype).contiguous(memory_format=torch.channels_last).requires_grad_()

    def vector():
        return (torch.randn(shape[1], generator=generator) + 1).to(device).requires_grad_()

    return images(), images() if has_residual else None, vector(), vector()


def composed(x, weight, bias, relu=True):
    y = F.batch_norm(x, None, None, weight, bias, training=True)
    return F.relu(y) if relu else y


def is_ours(output):
    return type(output.grad_fn).__name__ == "_BatchNormAddReLUBackward"


@pytest.mark.cuda
@pytest.mark.parametrize("shape", [(4, 8, 1, 1), (1, 24, 3, 5), (2, 2056, 5, 3), (6, 64, 120, 160)])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize(("has_residual", "relu"), [*itertools.product([False, True], repeat=2)])
def test_kernels_serve_and_repeat_every_bit(shape, dtype, has_residual, relu):
    """Random calls compare their numbers with float64."""
    tensors = draw(shape, dtype, "cuda", has_residual)
    leaves = [x for x in tensors if x is not None]
    (output, grads), again = (
        (output, torch.autograd.grad(output, leaves, torch.ones_like(output)))
        for output in (batch_norm_add_relu(*tensors, relu=relu) for _ in range(2))
    )
    assert is_ours(output) and output.is_contiguous(memory_format=torch.channels_last)
    assert [x.dtype for x in (output, *grads)] == [dtype, *(x.dtype for x in leaves)]
    assert_close(again, (output, grads), rtol=0, atol=0)


@pytest.mark.cuda
@pytest.mark.parametrize("offset", [1e3, -3e4])
def test_the_variance_is_exact_beside_a_large_mean(offset):
    x, _, weight, bias = draw((4, 64, 50, 50), torch.float32, "cuda", has_residual=False, offset=offset)
    running = torch.zeros(64, device="cuda"), torch.zeros(64, device="cuda")
    output = batch_norm_add_relu(x, None, weight, bias, *running, relu=False, momentum=1.0)
    expected = composed(x.double(), weight.double(), bias.double(), relu=False)
    assert_close(running[1].double(), x.double().var((0, 2, 3)), rtol=1e-5, atol=0)
    # A mean in float32 is off by up to half a unit in its last place.
    assert (output - expected).abs().max() <= 5 * abs(offset) * 2**-24 + 1e-5


@pytest.mark.cuda
@pytest.mark.parametrize("has_residual", [False, True])
def test_nan_stays_in_its_channel(has_residual):
    x, residual, weight, bias = draw((2, 16, 5, 5), torch.float32, "cuda", has_residual)
    with torch.no_grad():
        x[1, 3, 2, 2] = torch.nan
    output = batch_norm_add_relu(x, residual, weight, bias)
    assert output[:, 3].isnan().all() and not output[:, [0, 1, 2, *range(4, 16)]].isnan().any()
    (grad,) = torch.autograd.grad(output.sum(), x)
    assert grad[:, 3].isnan().all() and not grad[:, 4:].isnan().any()


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


def test_a_result_without_a_gradient(device):
    x, _, weight, bias = draw((2, 16, 6, 4), torch.float32, device)
    NoGradient.apply(batch_norm_add_relu(x, None, weight, bias)).sum().backward()
    assert x.grad is None or not x.grad.any()


@pytest.mark.cuda
def test_the_result_may_be_changed_in_place():
    x, residual, weight, bias = draw((2, 16, 6, 4), torch.float32, "cuda")
    output = batch_norm_add_relu(x, None, weight, bias, relu=False)
    assert is_ours(output) and output.is_contiguous(memory_format=torch.channels_last)
    assert_close(output.relu_(), composed(x, weight, bias), rtol=1e-5, atol=1e-5)
    output.sum().backward()
    assert x.grad is not None
    # The gradient of this result is computed from the result itself.
    kept = batch_norm_add_relu(x, residual, weight, bias, relu=True)
    kept.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.sum().backward()


def test_gradients_without_a_kernel_have_gradients_and_transforms():
    draws = Seeded()
    tensors = [draws.normal(*size) for size in ((2, 3, 3, 2), (2, 3, 3, 2), (3,), (3,))]
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    assert torch.autograd.gradcheck(batch_norm_add_relu, leaves)
    assert torch.autograd.gradgradcheck(batch_norm_add_relu, leaves)
    by_function = torch.func.grad(lambda x: batch_norm_add_relu(x, *tensors[1:]).square().sum())(tensors[0])
    (by_graph,) = torch.autograd.grad(batch_norm_add_relu(*leaves).square().sum(), leaves[:1])
    assert_close(by_function, by_graph)


NORMALIZED = torch.ones(2, 8, 3, 3), None, torch.ones(8), torch.ones(8), None
REFUSED = refusals(
    batch_norm_add_relu,
    NORMALIZED,
    (1, NORMALIZED[0].double(), "residual must have the type of input torch.float32"),
    (4, torch.ones(8), "running_mean and running_var must be given together"),
)
