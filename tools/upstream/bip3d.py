"""The function of RoboOrchardLab that BIP3D calls, with and without depth, on random tensors."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn


class Function(nn.Module):
    """A module whose weights are the arguments of ``deformable_aggregation_func``."""

    shapes = ((8, 12), (4, 6))
    cameras, points, groups, channels, depths = 2, 40, 4, 32, 16

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        texels = sum(height * width for height, width in self.shapes)
        self.features = nn.Parameter(torch.randn(1, self.cameras, texels, self.channels))
        self.depth_logits = nn.Parameter(torch.randn(1, self.cameras, texels, self.depths))
        self.locations = nn.Parameter(torch.rand(1, self.points, self.cameras, 2))
        self.depth = nn.Parameter(torch.rand(1, self.points, self.cameras, 1) * (self.depths - 1))
        self.weights = nn.Parameter(torch.rand(1, self.points, self.cameras, len(self.shapes), self.groups))

    def forward(self) -> list[Tensor]:
        shapes = torch.tensor(self.shapes, dtype=torch.int32, device=self.features.device)
        starts = torch.nn.functional.pad(shapes.prod(1).cumsum(0), (1, -1)).int()
        arguments = self.features, shapes, starts, self.locations, self.weights
        return [
            self.function(*arguments),
            self.function(*arguments, self.depth_logits.softmax(-1), self.depth),
        ]


class BIP3D:
    """The function, which imports ``deformable_aggregation_ext`` and ``deformable_aggregation_with_depth_ext``."""

    def __init__(self, config: str) -> None:
        pass

    def imports(self) -> None:
        # The installation of the package writes this module.
        version = ModuleType("robo_orchard_lab.version")
        vars(version).update(__version__="0", __full_version__="0", __git_hash__="")
        sys.modules[version.__name__] = version
        self.module = importlib.import_module("robo_orchard_lab.ops.deformable_aggregation")

    def build(self, work: Path, device: str, scale: float) -> nn.Module:
        self.model = Function(self.module.deformable_aggregation_func).to(device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        return self.model

    def batches(self, work: Path, training: bool) -> Iterator[None]:
        yield from (None, None)

    def train_step(self, batch: None) -> Tensor:
        return sum(out.square().mean() for out in self.model())

    def predict(self, batch: None) -> Any:
        return self.model()
