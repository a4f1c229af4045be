"""Problems of batch_norm_add_relu and dropout_add_layer_norm."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.fuzz.problem import HALVES, Draw, Operator, Problem, wide_of
from tests.fuzz.rounding import EXACT_STEPS, Steps, bounds_of, epsilon_of, greatest, near_zero_of
from visdet.ops.fused import batch_norm_add_relu, dropout_add_layer_norm

__all__ = ["OPERATORS"]


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
        "weight": draw.place(draw.with_bad_numbers(draw.numbers(C), 0.2), parameter_type),
        "bias": draw.place(draw.with_bad_numbers(draw.numbers(C), 0.2), parameter_type),
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


def _draw_layer_norm(draw: Draw) -> Problem:
    C = draw.pick(1, 2, 3, 8, 8, 16, 40, 64, 264, 512, 520)
    C = 0 if draw.chance(0.01) else C
    rows = [draw.size(20) for _ in range(draw.pick(0, 1, 1, 2))]
    if draw.is_big:
        rows, C = [draw.pick(900, 2500)], draw.pick(256, 32)
    dtype, p, relu = draw.dtype(), draw.pick(0.0, 0.0, 0.1, 0.5, 1.0), draw.chance(0.4)
    is_autocast = draw.device == "cuda" and dtype in HALVES and draw.chance(0.7)
    parameter_type = torch.float32 if is_autocast else dtype
    x = draw.place(draw.with_bad_numbers(draw.numbers(*rows, C)), dtype)
    residual = None
    if draw.chance(0.6):
        residual = draw.with_bad_numbers(draw.numbers(*rows, C))
        residual = draw.place(residual, draw.pick(dtype, torch.float32) if is_autocast else dtype)
    arguments = {
        "input": x,
        "residual": residual,
        "weight": draw.place(draw.with_bad_numbers(draw.numbers(C), 0.2), parameter_type),
        "bias": draw.place(draw.with_bad_numbers(draw.numbers(C), 0.2), parameter_type),
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
        "batch_norm_add_relu",
        _batch_norm,
        _draw_batch_norm,
        _batch_norm_reference,
        bounds_of(_batch_norm_reference),
        spoiled={
            "input": ("rank", "type", 1),
            "residual": ("rank", "type", "device", 0, 1, 2, 3),
            "weight": ("rank", "type", "device", 0),
            "bias": ("rank", "type", "device", 0),
            "running_mean": ("rank", "type", "device", 0),
            "running_var": ("rank", "type", "device", 0),
        },
    ),
    Operator(
        "dropout_add_layer_norm",
        _layer_norm,
        _draw_layer_norm,
        _layer_norm_reference,
        bounds_of(_layer_norm_reference),
        spoiled={
            "input": ("type", -1),
            "residual": ("rank", "type", "device", 0, -1),
            "weight": ("rank", "type", "device", 0),
            "bias": ("rank", "type", "device", 0),
        },
    ),
)
