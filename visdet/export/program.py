"""A model as a graph of named tensors, with visdet's operators or with torch's alone."""

import functools
import operator
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from .plain_operators import in_plain_operators
from .standard_operators import standard_operators

BATCH = Dim("batch", min=1, max=64)


@dataclass(frozen=True)
class Program:
    """A model to write.

    Attributes:
        module: the model as a function of tensors, in the order of ``inputs``. It returns a tuple in the order of
            ``outputs``.
        inputs: the names and examples of the inputs.
        outputs: the names of the outputs.
        dynamic: for each input, the axes whose size may change, with the name, the least and the greatest size of each.
        calibration: inputs from data, by which a format quantises the image features, or None not to do so.
        custom_op: the runtime for which ``standard`` has nodes of visdet's operators, or None.
    """

    module: nn.Module
    inputs: dict[str, Tensor]
    outputs: tuple[str, ...]
    dynamic: Mapping[str, Mapping[int, Dim]] = field(default_factory=dict)
    calibration: Iterable[dict[str, Tensor]] | None = None
    custom_op: str | None = None

    @functools.cached_property
    def exported(self) -> ExportedProgram:
        """The graph with visdet's operators, for runtimes that load their library."""
        return self._traced()

    @functools.cached_property
    def standard(self) -> ExportedProgram:
        """The graph with torch's operators alone, for all other runtimes."""
        with standard_operators(self.module, self.custom_op):
            return in_plain_operators(self._traced())

    def _traced(self) -> ExportedProgram:
        axes = tuple(self.dynamic.get(name, {}) for name in self.inputs)
        with torch.no_grad(), _pooling_of_any_size():
            return torch.export.export(
                self.module, tuple(self.inputs.values()), dynamic_shapes=(axes,), strict=False
            )


@contextmanager
def _pooling_of_any_size() -> Iterator[None]:
    """Let torch compute the shape of a pooling's output within the block as torch 2.14 does.

    Older versions ask there whether a division is exact, by which ``torch.export`` thinks that the model takes either
    even or odd sizes.
    """
    shapes: Any = torch._meta_registrations
    before = getattr(shapes, "div_rtn", operator.floordiv)
    shapes.div_rtn = operator.floordiv
    try:
        yield
    finally:
        shapes.div_rtn = before
