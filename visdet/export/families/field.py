"""The Gaussian field."""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from .family import Family, Tensors


class Field(Family):
    """The input is ``points`` [M, 3], and the output is ``field`` [M]."""

    input_names = ("points",)
    output_names = ("field",)
    about: ClassVar[dict[str, str]] = {
        "points": "float32 [M, 3]: positions in the units of the volume",
        "field": "[M]: the sum of the Gaussians",
    }

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return (self.model.raw_outputs(tensors[0]),)

    def ranges(self) -> dict[str, tuple[int, int]]:
        return {} if self.batch else {"batch": (1, 1 << 24)}

    def cases(self) -> Iterator[list[Tensors]]:
        generator = torch.Generator().manual_seed(0)
        means = self.model.means
        low, high = means.amin(0), means.amax(0)
        for count in (self.batch or 257, self.batch or 1, self.batch or 1000):
            yield [{"points": low + torch.rand(count, 3, generator=generator).to(means) * (high - low)}]

    def inputs_of(self, inputs: Tensor, data_samples: Sequence[Any]) -> Tensors:
        return {"points": inputs}

    def samples_of(self, outputs: Tensors, data_samples: Sequence[Any]) -> list[Any]:
        parts = outputs["field"].split([len(sample.gt_field) for sample in data_samples])
        for sample, values in zip(data_samples, parts, strict=True):
            sample.set_field(values, "pred_field")
        return list(data_samples)
