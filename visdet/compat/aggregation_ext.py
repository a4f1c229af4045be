"""The functions of ``deformable_aggregation_ext`` and ``deformable_aggregation_with_depth_ext``, under their names.

Two extensions have the first name. That of SparseDrive and Sparse4D has all cameras in one run of rows and sums over
the points of a query. That of SparseDriveV2, RIFT and BIP3D has each camera apart and leaves the sum to its caller. The
number of dimensions of ``mc_ms_feat`` says which one is meant::

                       all cameras in one run  each camera apart
    mc_ms_feat         [B, S, C]               [B, V, S, C]
    spatial_shape      [V, L, 2]               [L, 2]            (height, width)
    scale_start_index  [V, L]                  [L]
    sampling_location  [B, Q, P, V, 2]         [B, N, V, 2]      (x, y) in 0..1
    weights            [B, Q, P, V, L, G]      [B, N, V, L, G]
    result             [B, Q, C]               [B, N, C]

With depth, the last ``num_depths`` columns of ``mc_ms_feat`` are the depth distribution of each row, and locations have
the fractional index of their depth as a third coordinate. ``visdet.compat.extensions`` makes this module importable
under the names of the extensions, also within a package.
"""

import torch
from torch import Tensor

from visdet import ops
from visdet.ops.deformable_aggregation import as_tables

__all__ = [
    "deformable_aggregation_backward",
    "deformable_aggregation_forward",
    "deformable_aggregation_with_depth_backward",
    "deformable_aggregation_with_depth_forward",
]

_NAMES = ("mc_ms_feat", "spatial_shape", "scale_start_index", "sampling_location", "weights")
# By the number of dimensions of mc_ms_feat.
_LAYOUTS = {
    3: (
        "all cameras in one run",
        ("[B, S, C]", "[V, L, 2]", "[V, L]", "[B, Q, P, V, 2]", "[B, Q, P, V, L, G]"),
    ),
    4: ("each camera apart", ("[B, V, S, C]", "[L, 2]", "[L]", "[B, N, V, 2]", "[B, N, V, L, G]")),
}


def deformable_aggregation_forward(
    mc_ms_feat: Tensor,
    spatial_shape: Tensor,
    scale_start_index: Tensor,
    sampling_location: Tensor,
    weights: Tensor,
) -> Tensor:
    """Return the result of ``visdet.ops.deformable_aggregation``.

    Raises:
        RuntimeError: a shape, type, size or device does not fit. The message names the argument and the layout.
    """
    tensors = (mc_ms_feat, spatial_shape, scale_start_index, sampling_location, weights)
    return _Arguments("deformable_aggregation_forward", *tensors).forward()


def deformable_aggregation_backward(
    mc_ms_feat: Tensor,
    spatial_shape: Tensor,
    scale_start_index: Tensor,
    sampling_location: Tensor,
    weights: Tensor,
    grad_output: Tensor,
    grad_mc_ms_feat: Tensor,
    grad_sampling_location: Tensor,
    grad_weights: Tensor,
) -> None:
    """Add the gradients of the features, the locations and the weights to the last three tensors.

    The first arguments are those of ``deformable_aggregation_forward``. Each of the last three tensors has the shape of
    the tensor that its gradient belongs to.
    """
    tensors = (mc_ms_feat, spatial_shape, scale_start_index, sampling_location, weights)
    arguments = _Arguments("deformable_aggregation_backward", *tensors)
    arguments.backward(grad_output, grad_mc_ms_feat, grad_sampling_location, grad_weights)


def deformable_aggregation_with_depth_forward(
    mc_ms_feat: Tensor,  # C + num_depths columns
    spatial_shape: Tensor,
    scale_start_index: Tensor,
    sampling_location: Tensor,  # (x, y, depth)
    weights: Tensor,
    num_depths: int,
) -> Tensor:
    """Return the result of ``visdet.ops.deformable_aggregation_with_depth``.

    Raises:
        RuntimeError: a shape, type, size or device does not fit. The message names the argument and the layout.
    """
    tensors = (mc_ms_feat, spatial_shape, scale_start_index, sampling_location, weights)
    return _Arguments("deformable_aggregation_with_depth_forward", *tensors, num_depths).forward()


def deformable_aggregation_with_depth_backward(
    mc_ms_feat: Tensor,
    spatial_shape: Tensor,
    scale_start_index: Tensor,
    sampling_location: Tensor,
    weights: Tensor,
    num_depths: int,
    grad_output: Tensor,
    grad_mc_ms_feat: Tensor,
    grad_sampling_location: Tensor,
    grad_weights: Tensor,
) -> None:
    """Add the gradients of the features with their distributions, the locations and the weights to the last tensors."""
    tensors = (mc_ms_feat, spatial_shape, scale_start_index, sampling_location, weights)
    arguments = _Arguments("deformable_aggregation_with_depth_backward", *tensors, num_depths)
    arguments.backward(grad_output, grad_mc_ms_feat, grad_sampling_location, grad_weights)


def tables_of_cameras(
    features: Tensor,  # [B, V, S, C]
    level_shapes: Tensor,  # [L, 2]
    level_starts: Tensor,  # [L]
) -> tuple[Tensor, Tensor]:  # [V, L, 2], [V, L]
    """Return the level tables of ``features.flatten(1, 2)``."""
    V, S = features.shape[1:3]
    first_rows = S * torch.arange(V, device=level_starts.device)
    return level_shapes.expand(V, -1, -1), level_starts.to(torch.int64) + first_rows[:, None]


class _Arguments:
    """The arguments of a call in either layout, in the form that visdet's operators take. Features are not copied."""

    def __init__(
        self,
        name: str,
        mc_ms_feat: Tensor,
        spatial_shape: Tensor,
        scale_start_index: Tensor,
        sampling_location: Tensor,
        weights: Tensor,
        num_depths: int | None = None,
    ) -> None:
        if mc_ms_feat.dim() not in _LAYOUTS:
            either = " or ".join(f"{shapes[0]} ({layout})" for layout, shapes in _LAYOUTS.values())
            raise RuntimeError(f"{name}: mc_ms_feat must be {either}, got {list(mc_ms_feat.shape)}")
        layout, shapes = _LAYOUTS[mc_ms_feat.dim()]
        self.note = f"(mc_ms_feat {list(mc_ms_feat.shape)} was taken for {shapes[0]}: {layout})"
        tensors = (mc_ms_feat, spatial_shape, scale_start_index, sampling_location, weights)
        for argument, tensor, shape in zip(_NAMES, tensors, shapes, strict=True):
            if num_depths is not None and argument == "sampling_location":
                shape = shape.replace("2]", "3]")
            if tensor.dim() != shape.count(",") + 1:
                raise RuntimeError(
                    f"{name}: {argument} must be {shape}, got {list(tensor.shape)} {self.note}"
                )
        width = mc_ms_feat.shape[-1]
        if num_depths is not None and not 0 <= num_depths <= width:
            raise RuntimeError(
                f"{name}: num_depths must be 0 to the {width} columns of mc_ms_feat, got {num_depths}"
            )
        if mc_ms_feat.dim() == 4:
            spatial_shape, scale_start_index = tables_of_cameras(mc_ms_feat, spatial_shape, scale_start_index)
            mc_ms_feat = mc_ms_feat.flatten(1, 2)
            sampling_location, weights = sampling_location.unsqueeze(2), weights.unsqueeze(2)  # P = 1
        columns = (
            (mc_ms_feat,) if num_depths is None else mc_ms_feat.split([width - num_depths, num_depths], -1)
        )
        self.tensors = (*columns, spatial_shape, scale_start_index, sampling_location, weights)
        self.has_depth = num_depths is not None

    def forward(self) -> Tensor:
        run = ops.deformable_aggregation_with_depth if self.has_depth else ops.deformable_aggregation
        try:
            return run(*self.tensors)
        except RuntimeError as error:
            raise RuntimeError(f"{error} {self.note}") from error

    def backward(self, grad_output: Tensor, *outs: Tensor) -> None:
        """Add the gradients to ``outs``, which are those of mc_ms_feat, sampling_location and weights."""
        *columns, shapes, starts, locations, weights = self.tensors
        features = columns[0]
        wide = torch.float64 if features.dtype == torch.float64 else torch.float32
        operators = torch.ops.visdet
        run = (
            operators.deformable_aggregation_with_depth_backward
            if self.has_depth
            else operators.deformable_aggregation_backward
        )
        try:
            *of_columns, of_locations, of_weights = run.default(
                grad_output.to(features.dtype),
                *columns,
                *as_tables(features, shapes, starts),
                locations.to(wide),
                weights if weights.dtype == features.dtype else weights.to(wide),
                torch.are_deterministic_algorithms_enabled(),
            )
        except RuntimeError as error:
            raise RuntimeError(f"{error} {self.note}") from error
        first = 0
        for grad in of_columns:
            part = outs[0][..., first : first + grad.shape[-1]]
            part.add_(grad.view(part.shape))
            first += grad.shape[-1]
        for out, grad in zip(outs[1:], (of_locations, of_weights), strict=True):
            out.add_(grad.view(out.shape))
