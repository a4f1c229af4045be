"""Multilayer perceptrons of ReLU and layer normalisation, all layers in one operator."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ._gpu_rows import check_floating, check_like, has_kernel
from ._library import differentiable_once
from .tracing import is_traced

__all__ = ["PerceptronLayer", "perceptrons", "perceptrons_reference"]

RELU, NORM, SCALE, FIRST = 1, 2, 4, 8  # the bits of a kind
MAX_WIDTH, MAX_LAYERS, MAX_PERCEPTRONS = 256, 24, 8


class PerceptronLayer(NamedTuple):
    """A linear layer and what follows it: a ReLU, and then a layer normalisation or a factor for each channel.

    Attributes:
        weight: [O, I]. bias: [O].
        relu: Whether ReLU follows.
        factor: [O], the scale of the normalisation, or the factor if there is no normalisation. None without both.
        offset: [O], the shift of the normalisation. None without a normalisation.
    """

    weight: Tensor
    bias: Tensor
    relu: bool = False
    factor: Tensor | None = None
    offset: Tensor | None = None

    @property
    def kind(self) -> int:
        """What follows the linear layer, as the kernels know it."""
        if self.offset is not None:
            return RELU * self.relu | NORM
        return RELU * self.relu | (0 if self.factor is None else SCALE)

    @property
    def parameters(self) -> list[Tensor]:
        """The tensors of the layer, in the order in which the kernels take them."""
        return [tensor for tensor in (self.weight, self.bias, self.factor, self.offset) if tensor is not None]


def perceptrons(
    input: Tensor,  # [..., D]
    layers: Sequence[Sequence[PerceptronLayer]],
    first_columns: Sequence[int] = (0,),
    eps: float = 1e-5,
) -> Tensor:  # [..., sum of the last O]
    """Return the results of perceptrons side by side, each of which reads some columns of the input.

    Perceptron p reads the columns from ``first_columns[p]`` on, as many as its first layer takes. No two perceptrons
    read the same column. On a GPU, one kernel computes all layers of all perceptrons, and three kernels their
    gradients. A row stays in shared memory from the first layer to the last. This saves most of the time of small
    perceptrons, whose layers take a GPU less time than a host needs to launch them. All arithmetic is in float32,
    without tensor cores, and all sums have an order that is always the same.

    Args:
        input: The rows, float32.
        layers: The layers of each perceptron. A layer takes as many channels as the one before it gives.
        first_columns: The column of ``input`` with which each perceptron begins.
        eps: The number that is added to the variance in all normalisations.

    Returns:
        The results of the first perceptron, then those of the second one, and so on.

    The kernels serve float32 tensors, layers of 1 to 256 channels, at most 8 perceptrons and at most 24 layers in all,
    on CUDA. Elsewhere, and under ``torch.compile`` and exports, torch's operators compute the same. It is
    differentiable once on a GPU.

    Raises:
        ValueError: A shape does not fit, or two perceptrons read the same column. The message names the argument.
        TypeError: A tensor has no floating-point type.
    """
    if not _serves(input, layers):
        _check(input, layers, first_columns)
        return perceptrons_reference(input, layers, first_columns, eps)
    kinds = [
        layer.kind | (FIRST if index == 0 else 0) for of_one in layers for index, layer in enumerate(of_one)
    ]
    tensors = [tensor.contiguous() for of_one in layers for layer in of_one for tensor in layer.parameters]
    return run_kernels(input, tensors, kinds, first_columns, eps)


def perceptrons_reference(
    input: Tensor,  # [..., D]
    layers: Sequence[Sequence[PerceptronLayer]],
    first_columns: Sequence[int] = (0,),
    eps: float = 1e-5,
) -> Tensor:  # [..., sum of the last O]
    """Return what ``perceptrons`` returns, in plain torch: the definition for the kernels. Any float type will do."""
    results = []
    for of_one, first in zip(layers, first_columns, strict=True):
        x = input[..., first : first + of_one[0].weight.shape[1]]
        for layer in of_one:
            x = F.linear(x, layer.weight, layer.bias)
            x = F.relu(x) if layer.relu else x
            if layer.offset is not None:
                x = F.layer_norm(x, layer.offset.shape, layer.factor, layer.offset, eps)
            elif layer.factor is not None:
                x = x * layer.factor
        results.append(x)
    return results[0] if len(results) == 1 else torch.cat(results, dim=-1)


def _serves(input: Tensor, layers: Sequence[Sequence[PerceptronLayer]]) -> bool:
    if input.dtype != torch.float32 or not has_kernel("perceptrons", input):
        return False
    if len(layers) > MAX_PERCEPTRONS or sum(map(len, layers)) > MAX_LAYERS:
        return False
    weights = [layer.weight for of_one in layers for layer in of_one]
    return all(
        weight.dtype == torch.float32
        and weight.dim() == 2
        and min(weight.shape) > 0
        and max(weight.shape) <= MAX_WIDTH
        for weight in weights
    )


def _check(input: Tensor, layers: Sequence[Sequence[PerceptronLayer]], first_columns: Sequence[int]) -> None:
    op = "perceptrons"
    if is_traced():
        return
    check_floating(op, "input", input)
    if input.dim() == 0:
        raise ValueError(f"{op}: input must be [..., D], got {list(input.shape)}")
    if not layers or not all(layers) or len(first_columns) != len(layers):
        raise ValueError(
            f"{op}: layers must have a layer or more for each of the columns in first_columns, got "
            f"{[len(of_one) for of_one in layers]} layers for the columns {list(first_columns)}"
        )
    reach = []
    for of_one, first in zip(layers, first_columns, strict=True):
        inputs = of_one[0].weight.shape[-1] if of_one[0].weight.dim() == 2 else 0
        if first < 0 or first + inputs > input.shape[-1]:
            raise ValueError(
                f"{op}: a perceptron reads columns {first} to {first + inputs} of an input of {input.shape[-1]}"
            )
        reach.append((first, first + inputs))
        for layer in of_one:
            _check_layer(layer, inputs, input)
            inputs = len(layer.weight)
    reach.sort()
    for (_, end), (start, _) in itertools.pairwise(reach):
        if start < end:
            raise ValueError(f"{op}: first_columns must be such that no two perceptrons read the same column")


def _check_layer(layer: PerceptronLayer, inputs: int, input: Tensor) -> None:
    op, outputs = "perceptrons", layer.weight.shape[:1]
    check_like(op, "weight", layer.weight, (*outputs, inputs), "[outputs, inputs]", input)
    for name, vector in (("bias", layer.bias), ("factor", layer.factor), ("offset", layer.offset)):
        if vector is not None:
            check_like(op, name, vector, outputs, "[outputs]", input)
    if layer.offset is not None and (layer.factor is None or outputs[0] == 0):
        raise ValueError(f"{op}: a layer with a normalisation must have a factor and at least one output")


def run_kernels(
    input: Tensor, tensors: Sequence[Tensor], kinds: Sequence[int], first_columns: Sequence[int], eps: float
) -> Tensor:
    """Return what ``perceptrons`` returns, for float32 tensors that its kernels serve.

    Args:
        tensors: The parameters of all layers in the order of ``PerceptronLayer.parameters``.
        kinds: The kind of each layer, plus FIRST for the first layer of a perceptron.
    """
    rows = input if input.dim() == 2 else input.reshape(-1, input.shape[-1])
    if torch.is_grad_enabled():
        output = _Perceptrons.apply(rows, first_columns, kinds, eps, *tensors)
    else:
        operator = torch.ops.visdet.perceptrons.default
        output, _ = operator(rows.contiguous(), tensors, first_columns, kinds, eps, False)
    return output if input.dim() == 2 else output.view(*input.shape[:-1], -1)


class _Perceptrons(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        first_columns: Sequence[int],
        kinds: Sequence[int],
        eps: float,
        *parameters: Tensor,
    ) -> Tensor:
        input = input.contiguous()
        saves = any(ctx.needs_input_grad)
        output, saved = torch.ops.visdet.perceptrons.default(
            input, parameters, first_columns, kinds, eps, saves
        )
        ctx.save_for_backward(input, saved, *parameters)
        ctx.layout = first_columns, kinds
        return output

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        input, saved, *parameters = ctx.saved_tensors
        grad_input, grads = torch.ops.visdet.perceptrons_backward.default(
            grad_output.contiguous(), input, saved, parameters, *ctx.layout, ctx.needs_input_grad[0]
        )
        grad_parameters = [
            grad.view_as(parameter) if parameter.dim() > 1 else grad
            for grad, parameter in zip(
                grads.split([parameter.numel() for parameter in parameters]), parameters, strict=True
            )
        ]
        return grad_input if ctx.needs_input_grad[0] else None, None, None, None, *grad_parameters
