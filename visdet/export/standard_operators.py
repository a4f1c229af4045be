"""visdet's operators in torch's own ones, which every format has.

Within :func:`standard_operators`, calls of ``torch.ops.visdet`` are those of ``_FORMULAS``. They read the sizes of the
levels from the neck's maps, because a runtime could only read them from a tensor of numbers, and then would not know
the shapes of what follows.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from visdet.ops.box_key_points import box_key_points_reference
from visdet.ops.deformable_aggregation_fused import locations_and_weights as aggregation_samples
from visdet.ops.gaussian_field import gaussian_field_reference
from visdet.ops.ms_deform_attn_fused import locations_and_weights as attention_samples

from .custom_operators import NODES
from .errors import ExportError

Sizes = Sequence[tuple[int, int]]


@contextmanager
def standard_operators(model: nn.Module, custom_op: str | None = None) -> Iterator[None]:
    """Compute visdet's operators by torch's own ones within the block. The model has at most one neck.

    ``custom_op``: the runtime for which some operators become nodes of :mod:`.custom_operators`, or None.
    """
    sizes: list[Any] = []

    def note(_: nn.Module, __: Any, maps: Sequence[Tensor]) -> None:
        sizes[:] = [tuple(level.shape[-2:]) for level in maps]

    with ExitStack() as hooks, _Standard(sizes, custom_op):
        for name, part in model.named_modules():
            if name.rpartition(".")[2] in ("neck", "img_neck"):
                hooks.enter_context(part.register_forward_hook(note))
        yield


class _Standard(TorchFunctionMode):
    def __init__(self, sizes: Sizes, custom_op: str | None) -> None:
        super().__init__()
        self.sizes = sizes
        self.nodes = NODES.get(custom_op, {})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        nodes = self.nodes
        named = kwargs or {}
        if func is F.layer_norm:
            # onnxruntime's kernel of a sum with its normalisation is slower than the two. It needs three axes.
            return func(args[0].unsqueeze(0), *args[1:], **named).squeeze(0)
        if getattr(func, "namespace", "") != "visdet":
            return func(*args, **named)
        name = func.__name__.partition(".")[0]
        maps = args[:3]
        samples = args[3:]
        if name == "ms_deform_attn_fused" and "ms_deform_attn" in nodes:
            name = "ms_deform_attn"
            args = (*maps, *attention_samples(args[1], *samples))
        elif name == "deformable_aggregation_fused":
            name = "deformable_aggregation"
            args = (*maps, *aggregation_samples(*samples))
        if name in nodes:
            return nodes[name](*args)
        if name not in _FORMULAS:
            raise ExportError(
                f"the operator visdet::{name} has no formula in standard operators, so that the model can only be "
                "exported as pt2 or aoti, or after a formula has been added to visdet/export/standard_operators.py"
            )
        return _FORMULAS[name](self.sizes, *args)


_RING = 2  # pixels


def _summed(
    sizes: Sizes,
    level_shapes: Tensor,
    maps: Tensor,
    grids: Sequence[Tensor],
    weights: Sequence[Tensor],
) -> Tensor:
    """Return weighted sums [N, C, Q] of the samples of maps [N, C, S] at the grids [N, P, Q, 2] of each level.

    The weights of a level are [N, G, P, Q]. Queries come last, and limits are repeated for them, because runtimes are
    slow in short rows.

    A ring of zeros around each map, and coordinates that end within it, leave nothing to what a runtime does beyond a
    map: some read a neighbouring row there, or convert far, infinite and NaN coordinates to any pixel.
    """
    levels = maps.split([height * width for height, width in sizes], 2)
    sums = []
    for level, (size, level_maps, grid, weight) in enumerate(zip(sizes, levels, grids, weights, strict=True)):
        extent = level_shapes[level].flip(-1).to(grid.dtype).expand(grid.shape[-2:]).flatten()
        outside = 1 + _RING / extent  # in the middle between two pixels of the ring
        flat = grid.flatten(-2)
        limited = torch.where(flat.abs() < outside, flat, outside) * (extent / (extent + 2 * _RING))
        ringed = F.pad(level_maps.unflatten(2, size), (_RING,) * 4)
        samples = F.grid_sample(ringed, limited.view_as(grid), align_corners=False)
        samples = samples.unflatten(1, (weight.shape[1], -1))
        sums.append((samples * weight.unsqueeze(2)).sum(3))  # [N, G, C / G, Q]
    return functools.reduce(torch.add, sums).flatten(1, 2)


def _ms_deform_attn_fused(
    sizes: Sizes,
    value: Tensor,
    level_shapes: Tensor,
    _: Tensor,
    references: Tensor,
    offsets: Tensor,
    logits: Tensor,
    num_points: Sequence[int],
) -> Tensor:
    B, Q, G, K = logits.shape
    maps = value.float().flatten(2).transpose(1, 2).unflatten(1, (G, -1)).flatten(0, 1)  # [B * G, C, S]
    levels = [level for level, count in enumerate(num_points) for _ in range(count)] * G
    references = references.transpose(1, 2)[:, levels]  # [B, G * K, Q, 2 or 4]
    if references.shape[-1] == 4:
        scales = (references[..., 2:] / references.new_tensor(num_points)[levels].view(-1, 1, 1)).transpose(
            1, 2
        )
    else:
        scales = 2 / level_shapes[levels].flip(-1)
    shifts = (offsets.float().flatten(2) * scales.flatten(-2)).view(B, Q, G * K, 2)
    grids = shifts.transpose(1, 2) + (2 * references[..., :2] - 1)  # [B, G * K, Q, 2]
    weights = logits.float().softmax(-1).flatten(2).transpose(1, 2)  # [B, G * K, Q]
    sums = _summed(
        sizes,
        level_shapes,
        maps,
        grids.reshape(B * G, K, Q, 2).split(num_points, 1),
        weights.reshape(B * G, 1, K, Q).split(num_points, 2),
    )
    return sums.view(B, -1, Q).transpose(1, 2).to(value.dtype)


def _deformable_aggregation(
    sizes: Sizes, features: Tensor, level_shapes: Tensor, _: Tensor, locations: Tensor, weights: Tensor
) -> Tensor:
    """The cameras have levels of the same sizes, as those of one neck."""
    V, L = weights.shape[3:5]
    maps = features.float().unflatten(1, (V, features.shape[1] // V)).flatten(0, 1).transpose(1, 2)
    locations = locations.permute(0, 3, 2, 1, 4).flatten(0, 1)  # [B * V, P, Q, 2]
    grid = 2 * torch.where(((locations > 0) & (locations < 1)).all(-1, keepdim=True), locations, -1.0) - 1
    weights = weights.permute(0, 3, 4, 5, 2, 1).flatten(0, 1)  # [B * V, L, G, P, Q]
    total = _summed(sizes, level_shapes[0], maps, [grid] * L, weights.unbind(1))
    return total.unflatten(0, (-1, V)).sum(1).transpose(1, 2).to(features.dtype)


def _box_key_points(_: Sizes, *arguments: Any) -> Tensor:
    return box_key_points_reference(*arguments)


def _gaussian_field(_: Sizes, *arguments: Any) -> Tensor:
    """Every pair counts, whatever the tolerance, which comes last."""
    return gaussian_field_reference(*arguments[:4])


def _order_in_space(_: Sizes, positions: Tensor) -> Tensor:
    """No formula reads an order."""
    return torch.zeros_like(positions[:, 0], dtype=torch.int64)


_FORMULAS: dict[str, Callable[..., Any]] = {
    "ms_deform_attn_fused": _ms_deform_attn_fused,
    "deformable_aggregation": _deformable_aggregation,
    "box_key_points": _box_key_points,
    "gaussian_field": _gaussian_field,
    "order_in_space": _order_in_space,
}
