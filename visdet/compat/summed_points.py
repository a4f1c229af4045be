"""Sums over points within the operator for models that write every point of deformable aggregation before they sum.

SparseDriveV2 and its descendants call ``deformable_aggregation_func``, which returns [B, Q * P, C], and then
``.reshape(B, Q, P, C).sum(dim=2)``. After ``install(model)`` that function returns an object that does both at once
when the sum is taken, so that [B, Q * P, C] is never written. The sources stay as they are, and so do results but for
the order of additions. Any other use of the object computes the points as before.
"""

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from visdet import ops

from .aggregation_ext import tables_of_cameras

__all__ = ["install", "uninstall"]

_replaced: dict[tuple[str, str], Callable[..., Any]] = {}


def install(model: nn.Module) -> list[str]:
    """Replace the function in every module whose classes are part of ``model``, and return the functions' names.

    A function is found by the names of its parameters, which are those of SparseDriveV2's
    ``deformable_aggregation_func``, whatever it is called. A second call changes nothing.

    Raises:
        ValueError: no module of the model's classes has such a function.
    """
    names, parameters = [], tuple(inspect.signature(_points).parameters)
    for module in sorted({type(part).__module__ for part in model.modules()}):
        space = vars(sys.modules[module]) if module in sys.modules else {}
        for name, value in list(space.items()):
            if value is not _points:
                if not inspect.isfunction(value) or tuple(inspect.signature(value).parameters) != parameters:
                    continue
                _replaced[module, name] = value
                space[name] = _points
            names.append(f"{module}.{name}")
    if not names:
        raise ValueError(
            f"summed_points: no module of {type(model).__name__} has a function of ({', '.join(parameters)})"
        )
    return names


def uninstall() -> None:
    """Put the functions back."""
    while _replaced:
        (module, name), value = _replaced.popitem()
        if module in sys.modules:
            setattr(sys.modules[module], name, value)


def _points(
    mc_ms_feat: Tensor,
    spatial_shape: Tensor,
    scale_start_index: Tensor,
    sampling_location: Tensor,
    weights: Tensor,
    depth_prob: Tensor | None = None,
    depth: Tensor | None = None,
) -> "_Points":
    """Return the samples of all points, which are computed when they are used."""
    columns = [mc_ms_feat]
    if depth_prob is not None and depth is not None:
        columns.append(depth_prob)
        sampling_location = torch.cat([sampling_location, depth], -1)
    tables = tables_of_cameras(mc_ms_feat, spatial_shape, scale_start_index)
    flat = [column.flatten(1, 2).float() for column in columns]
    return _Points([*flat, *tables, sampling_location.float(), weights.float()])


class _Points:
    """The samples of points [B, Q * P, C], or reshaped to [B, Q, P, C], whose sum over P is the operator's result."""

    def __init__(self, tensors: list[Tensor], points: int | None = None) -> None:
        self._tensors, self._P = tensors, points

    def _aggregate(self, points: int) -> Tensor:
        """Return the sums over runs of neighbouring points."""
        *inputs, locations, weights = self._tensors
        run = ops.deformable_aggregation if len(inputs) == 3 else ops.deformable_aggregation_with_depth
        return run(*inputs, locations.unflatten(1, (-1, points)), weights.unflatten(1, (-1, points)))

    def _tensor(self) -> Tensor:
        points = self._aggregate(1)
        return points if self._P is None else points.unflatten(1, (-1, self._P))

    def reshape(self, *shape: Any) -> Any:
        (B, _, C), N = self._tensors[0].shape, self._tensors[-1].shape[1]
        is_split = self._P is None and len(shape) == 4 and (shape[0], shape[3]) == (B, C)
        if is_split and shape[2] > 0 and shape[1] * shape[2] == N:
            return _Points(self._tensors, shape[2])
        return self._tensor().reshape(*shape)

    view = reshape

    def sum(self, *arguments: Any, **named: Any) -> Tensor:
        if self._P is not None and (arguments, named) in (((2,), {}), ((), {"dim": 2})):
            return self._aggregate(self._P)
        return self._tensor().sum(*arguments, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor(), name)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, arguments: tuple[Any, ...] = (), named: Any = None
    ) -> Any:
        def known(one: Any) -> Any:
            return one._tensor() if isinstance(one, cls) else one

        lists = (
            tuple(map(known, one)) if isinstance(one, (list, tuple)) else known(one) for one in arguments
        )
        return function(*lists, **{name: known(one) for name, one in (named or {}).items()})


def _operator(name: str) -> Callable[..., Any]:
    return lambda self, *others: getattr(self._tensor(), name)(*others)


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "matmul", "neg", "getitem", "len"):
    setattr(_Points, f"__{_name}__", _operator(f"__{_name}__"))
