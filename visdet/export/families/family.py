"""What every family of exported models has."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.export import Dim

from visdet.models.transfer import device_of

from ..program import BATCH, Program

Tensors = dict[str, Tensor]


def seeded(seed: int = 0) -> torch.Generator:
    """Return a generator on the CPU with a seed."""
    return torch.Generator().manual_seed(seed)


class Family(nn.Module, ABC):
    """A model as a function of named tensors, which computes what the model's own ``prediction_batch`` and
    ``detections`` do.

    Attributes:
        model: the model, in evaluation and without gradients. It is the caller's own, whose mode changes.
        shape: the (height, width) of the images, or None for any. batch: the number of images, or None for any.
        input_names, output_names: the names of the tensors, in order.
        rows: groups of outputs [B, K, ...] whose rows K are a set without an order, by the name of the score that
            chooses them.
        states: the outputs that are inputs of the next call, by the name of the input.
    """

    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    rows: Mapping[str, tuple[str, ...]] = {}
    states: Mapping[str, str] = {}
    about: ClassVar[Mapping[str, str]] = {}

    def __init__(self, model: Any, shape: tuple[int, int] | None, batch: int | None) -> None:
        super().__init__()
        self.model = model.eval().requires_grad_(False)
        self.shape = shape
        self.batch = batch
        self.device = device_of(model)

    @torch.no_grad()
    def run(self, inputs: Tensors) -> Tensors:
        """Return the outputs by name."""
        return dict(zip(self.output_names, self(*inputs.values()), strict=True))

    def program(self) -> Program:
        """Return the program of this model."""
        example = next(self.cases())[0]
        return Program(self, example, self.output_names, self.dynamic())

    def dynamic(self) -> dict[str, dict[int, Dim]]:
        """Return the axes that may change, for each input."""
        return {} if self.batch else {name: {0: BATCH} for name in self.input_names}

    def state_after(self, outputs: Tensors) -> Tensors:
        """Return the inputs of the next call that outputs of this one are."""
        return {name: outputs[output] for name, output in self.states.items()}

    @abstractmethod
    def cases(self) -> Iterator[list[Tensors]]:
        """Yield the inputs of several checks. Each is a sequence of calls, of which each continues the one before."""

    @abstractmethod
    def inputs_of(self, inputs: Tensor, data_samples: Sequence[Any]) -> Tensors:
        """Return the inputs for a batch of data, without the state."""

    @abstractmethod
    def samples_of(self, outputs: Tensors, data_samples: Sequence[Any]) -> list[Any]:
        """Return the samples with the outputs as their predictions."""
