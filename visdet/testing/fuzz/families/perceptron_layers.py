"""Problems of perceptrons."""

import math
from typing import Any

import torch
from torch import Tensor

from visdet.ops.perceptrons import PerceptronLayer, perceptrons

from ..problem import FLOATING, Draw, Family, Problem
from .attention import HALVES, wide_of
from .rounding import EXACT_STEPS, Steps, bounds_of, epsilon_of, near_zero_of

__all__ = ["FAMILIES"]

# One (relu, follows) for each layer, and a list of them for each perceptron. "follows" is "", "norm" or "scale".
Structure = list[list[tuple[bool, str]]]


def _draw_perceptrons(draw: Draw) -> Problem:
    dtype, limit = draw.dtype(torch.float32, torch.float32, *FLOATING), draw.pick(8, 40, 130)
    structure: Structure = []
    arguments: dict[str, Any] = {"input": None}
    first_columns, column, must_refuse = [], 0, ""
    for p in range(draw.pick(1, 1, 2, 3, 4)):
        column += draw.pick(0, 0, 1, 3)
        first_columns.append(column)
        inputs = draw.size(limit)
        column += inputs
        # The sums of several layers would not fit into float16.
        depth = 1 if dtype == torch.float16 else draw.pick(1, 2, 2, 3, 4)
        layers = [(draw.chance(0.6), draw.pick("", "norm", "norm", "scale")) for _ in range(depth)]
        for index, (_, follows) in enumerate(layers):
            outputs = draw.pick(257, 300) if draw.is_big else draw.size(limit, 0.005)
            if follows == "norm" and outputs == 1 and len(layers) > 1:
                outputs = 2  # Layers around one that is constant multiply nothing but rounding errors.
            vectors = {"bias": draw.numbers(outputs)}
            if follows:
                vectors["factor"] = draw.numbers(outputs)
            if follows == "norm":
                vectors["offset"] = draw.numbers(outputs)
                must_refuse = must_refuse if outputs else "a layer with a normalisation has no outputs"
            weight = draw.numbers(outputs, inputs) / max(inputs, 1) ** 0.5
            for name, tensor in {"weight": weight, **vectors}.items():
                if dtype == torch.float16:
                    tensor = tensor.clamp(-8, 8)
                arguments[f"{name}_{p}_{index}"] = draw.place(draw.with_bad_numbers(tensor, 0.1), dtype)
            inputs = outputs
        structure.append(layers)
    is_read = [len(arguments[f"weight_{p}_0"].T) > 0 for p in range(len(structure))]
    if len(structure) > 1 and draw.chance(0.02) and all(is_read[-2:]):
        first_columns[-2] = first_columns[-1]
        column += limit
        must_refuse = "two perceptrons read the same columns"
    rows = [draw.size(20) for _ in range(draw.pick(0, 1, 1, 2))]
    if draw.is_big:
        rows = [draw.pick(900, 2500)]
    if (
        dtype in HALVES
    ):  # torch adds up the gradients of biases in 16 bits, which gets no further than 256 ones.
        rows = rows[:1] if math.prod(rows) < 100 else [draw.size(20)]
    x = draw.numbers(*rows, column + draw.pick(0, 0, 2))
    x = draw.with_bad_numbers(x.clamp(-8, 8) if dtype == torch.float16 else x)
    arguments["input"] = draw.place(x, dtype)
    tensors = tuple(arguments)
    return Problem(
        {
            **arguments,
            "structure": structure,
            "first_columns": first_columns,
            "eps": draw.pick(1e-5, 1e-3),
            "near_zero": near_zero_of(dtype),
        },
        differentiable=tensors,
        wide=wide_of(dtype),
        epsilon=epsilon_of(dtype),
        error_factor=512.0 + math.prod(rows),
        must_refuse=must_refuse,
    )


def _layers(structure: Structure, parameters: dict[str, Tensor]) -> list[list[PerceptronLayer]]:
    return [
        [
            PerceptronLayer(
                parameters[f"weight_{p}_{index}"],
                parameters[f"bias_{p}_{index}"],
                relu,
                parameters.get(f"factor_{p}_{index}"),
                parameters.get(f"offset_{p}_{index}"),
            )
            for index, (relu, _) in enumerate(layers)
        ]
        for p, layers in enumerate(structure)
    ]


def _perceptrons(
    input: Tensor,
    structure: Structure,
    first_columns: list[int],
    eps: float,
    near_zero: float,
    **parameters: Tensor,
) -> Tensor:
    return perceptrons(input, _layers(structure, parameters), first_columns, eps)


def _perceptrons_reference(
    input: Tensor,
    structure: Structure,
    first_columns: list[int],
    eps: float,
    near_zero: float,
    steps: Steps = EXACT_STEPS,
    **parameters: Tensor,
) -> Tensor:
    results = []
    for layers, first in zip(_layers(structure, parameters), first_columns, strict=True):
        x = input[..., first : first + layers[0].weight.shape[1]]
        for layer in layers:
            x = steps.linear(x, layer.weight, layer.bias)
            x = steps.relu(x, near_zero) if layer.relu else x
            if layer.offset is not None and layer.factor is not None:
                x = steps.disturbed(steps.normalised(x, (-1,), eps) * layer.factor) + layer.offset
            elif layer.factor is not None:
                x = x * layer.factor
            x = steps.disturbed(x)
        results.append(x)
    return torch.cat(results, -1)


FAMILIES = (
    Family(
        "perceptrons",
        _perceptrons,
        _draw_perceptrons,
        _perceptrons_reference,
        bounds_of(_perceptrons_reference),
        spoiled={
            "input": ("type",),
            "weight_0_0": ("rank", "type", "device"),
            "bias_0_0": ("rank", "type", "device", 0),
            "factor_0_0": ("rank", "type", "device", 0),
            "offset_0_0": ("rank", "type", "device", 0),
        },
    ),
)
