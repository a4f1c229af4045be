"""Batch normalisation by fixed statistics, against torch's operators."""

import pytest
import torch

from visdet.ops.frozen_batch_norm import frozen_batch_norm

HALVES = [torch.float16, torch.bfloat16]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
# Sizes whose planes, rows or ends are no multiple of the eight values that a thread owns.
SHAPES = [
    (2, 6, 5, 7),
    (1, 1, 1, 1),
    (1, 16, 8, 8),
    (3, 5, 1, 3),
    (2, 64, 25, 34),
    (0, 4, 3, 3),
    (1, 24, 1, 1),
]


def problem(shape, device, dtype):
    generator = torch.Generator().manual_seed(sum(shape))
    input = torch.randn(shape, generator=generator).to(device, dtype)
    weight, bias, mean, variance = torch.rand(4, shape[1], generator=generator).to(device)
    return input, (weight - 0.5, bias, mean, variance + 0.01)


def composed(input, weight, bias, mean, variance, eps=1e-5):
    """Compute what the packages of detectors write: scale and shift, and two passes over the input."""
    weight, bias, mean, variance = (vector.reshape(1, -1, 1, 1) for vector in (weight, bias, mean, variance))
    scale = weight * (variance + eps).rsqrt()
    return input * scale + (bias - mean * scale)


def one_image(images):
    """The stride of the batch is then not that of a tensor of one image."""
    return images.contiguous(memory_format=torch.channels_last)[0][None]


def tokens(images):
    return images.contiguous(memory_format=torch.channels_last).flatten(2)[..., None]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", [one_image, tokens])
def test_dimensions_of_size_one_may_have_any_stride(layout, device):
    input, statistics = problem((2, 64, 8, 8), device, torch.float16)
    input = layout(input)
    assert input.is_contiguous(memory_format=torch.channels_last)
    expected = composed(input, *statistics)
    torch.testing.assert_close(frozen_batch_norm(input, *statistics), expected, rtol=1e-5, atol=1e-5)
    leaf = input.detach().requires_grad_()
    (grad,) = torch.autograd.grad(
        frozen_batch_norm(leaf, *statistics), leaf, layout(torch.ones_like(expected))
    )
    (of_composed,) = torch.autograd.grad(composed(leaf, *statistics).sum(), leaf)
    torch.testing.assert_close(grad, of_composed, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", ["contiguous", "channels last", "strided", "not aligned"])
@pytest.mark.parametrize("dtype", HALVES)
def test_halves_give_the_numbers_of_torch_in_float32(shape, layout, dtype, device):
    input, statistics = problem(shape, device, dtype)
    if layout == "channels last":
        input = input.contiguous(memory_format=torch.channels_last)
    if layout == "strided":
        input = input.transpose(2, 3)
    if layout == "not aligned":
        input = torch.cat([input.flatten()[:1], input.flatten()])[1:].view(shape)
    results = []
    for function in (frozen_batch_norm, composed):
        leaf = input.detach().requires_grad_()
        output = function(leaf, *statistics)
        weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(device)
        results.append([output, *torch.autograd.grad((output * weights).sum(), leaf)])
    for found, expected in zip(*results, strict=True):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    with torch.no_grad():
        torch.testing.assert_close(frozen_batch_norm(input, *statistics), results[1][0], rtol=0, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_types_are_those_of_torch(dtype, device):
    input, statistics = problem((2, 6, 5, 7), device, dtype)
    statistics = [vector.to(dtype) for vector in statistics]
    found = frozen_batch_norm(input, *statistics, eps=1e-3)
    assert found.dtype == dtype
    torch.testing.assert_close(found, composed(input, *statistics, eps=1e-3), rtol=1e-5, atol=1e-5)


@pytest.mark.cuda
def test_gradients_may_have_another_layout_and_statistics_may_be_parts():
    input, statistics = problem((2, 8, 6, 10), "cuda", torch.bfloat16)
    input = input.requires_grad_()
    parts = [torch.stack([vector, vector], 1)[:, 0] for vector in statistics]
    grad = torch.randn(input.shape, device="cuda").transpose(2, 3).contiguous().transpose(2, 3)
    (found,) = torch.autograd.grad(frozen_batch_norm(input, *parts), input, grad)
    (expected,) = torch.autograd.grad(composed(input, *statistics), input, grad)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.cuda
def test_what_the_kernel_cannot_compute_is_refused():
    input, (weight, bias, mean, variance) = problem((2, 8, 4, 4), "cuda", torch.bfloat16)
    operator = torch.ops.visdet.frozen_batch_norm.default
    for arguments in (
        (input[0], weight, bias, mean, variance),
        (input, weight[:7], bias, mean, variance),
        (input, weight, bias.double(), mean, variance),
        (input, weight, bias, mean.cpu(), variance),
        (input.float(), weight, bias, mean, variance),
        (input[:, :, ::2], weight, bias, mean, variance),
    ):
        with pytest.raises(RuntimeError, match="frozen_batch_norm"):
            operator(*arguments, 1e-5)


@pytest.mark.cuda
def test_compiled_it_is_torchs_operators():
    input, statistics = problem((2, 8, 4, 4), "cuda", torch.bfloat16)
    found = torch.compile(frozen_batch_norm, fullgraph=True, backend="eager")(input, *statistics)
    torch.testing.assert_close(found, composed(input, *statistics), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_shapes_are_refused(dtype):
    """Statistics were broadcast along other dimensions of an input without rows or columns."""
    input, statistics = problem((5, 5, 3, 2), "cpu", dtype)
    for shape in [(5, 5, 6), (5, 5)]:
        with pytest.raises(ValueError, match=r"input must be \[B, C, H, W\], got \[5, 5"):
            frozen_batch_norm(torch.zeros(shape, dtype=dtype), *statistics)
    for index, name in enumerate(("weight", "bias", "running_mean", "running_var")):
        given = [vector[:1] if i == index else vector for i, vector in enumerate(statistics)]
        with pytest.raises(ValueError, match=rf"{name} must be \[C\] = \[5\], got \[1\]"):
            frozen_batch_norm(input, *given)
