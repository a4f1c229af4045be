"""visdet's operators in torch's own ones, which every format has.

Within :func:`standard_operators`, calls of ``torch.ops.visdet`` are those of ``_FORMULAS``. They read the sizes of the
levels from the neck's maps, because a runtime could only read them from a tensor of numbers, and then would not know
the shapes of what follows.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from visdet.ops.box_key_points import box_key_points_reference

from .custom_operators import deformable_aggregation_node, ms_deform_attn_node
from .errors import ExportError

_MIN_DEPTH = 1e-5  # the least depth of a point before a camera, in metres
Sizes = Sequence[tuple[int, int]]


@contextmanager
def standard_operators(model: nn.Module, custom_op: str | None = None) -> Iterator[None]:
    """Compute visdet's operators by torch's own ones within the block. The model has at most one neck.

    ``custom_op``: the runtime for which some operators become nodes of :mod:`.custom_operators`, or None.
    """
    sizes: list[tuple[int, int]] = []

    def note(_: nn.Module, __: Any, maps: Sequence[Tensor]) -> None:
        sizes[:] = [(level.shape[-2], level.shape[-1]) for level in maps]

    necks = [part for name, part in model.named_modules() if name.rpartition(".")[2] in ("neck", "img_neck")]
    hooks = [neck.register_forward_hook(note) for neck in necks]
    try:
        with _Standard(sizes, custom_op):
            yield
    finally:
        for hook in hooks:
            hook.remove()


class _Standard(TorchFunctionMode):
    def __init__(self, sizes: Sizes, custom_op: str | None) -> None:
        super().__init__()
        self.sizes, self.custom_op = sizes, custom_op

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.argsort:
            return _argsort(*args, **(kwargs or {}))
        if getattr(func, "namespace", "") != "visdet":
            return func(*args, **(kwargs or {}))
        name = func.__name__.partition(".")[0]
        if name not in _FORMULAS:
            raise ExportError(
                f"the operator visdet::{name} has no formula in standard operators, so that the model can only be "
                "exported as pt2 or aoti, or after a formula has been added to visdet/export/standard_operators.py"
            )
        if self.custom_op and name.startswith("ms_deform_attn"):
            samples = _attention_samples(self.sizes, *args[3:]) if name.endswith("fused") else args[3:]
            return ms_deform_attn_node(self.custom_op, *args[:3], *samples)
        if self.custom_op == "openvino" and name.startswith("deformable_aggregation"):
            samples = _projected(*args[3:]) if name.endswith("fused") else args[3:]
            return deformable_aggregation_node(*args[:3], *samples)
        return _FORMULAS[name](self.sizes, *args, **(kwargs or {}))


def _argsort(tensor: Tensor, dim: int = -1, descending: bool = False, stable: bool = False) -> Tensor:
    """ONNX's TopK puts the first of equal numbers first. It has no other stable sorting."""
    return tensor.topk(tensor.shape[dim], dim, largest=descending).indices


def _sampled(maps: Tensor, locations: Tensor, counts: Tensor | None = None) -> Tensor:
    """Return the bilinear samples [N, C, Q, P] of maps [N, C, H, W] at locations [N, Q, P, 2] (x, y) in 0..1.

    Samples that do not count are zero. Coordinates beyond half a map outside are limited, because runtimes convert them
    to integers.
    """
    grid = 2 * locations.to(maps.dtype) - 1
    if counts is not None:
        grid = torch.where(counts.unsqueeze(-1), grid, -2.0)
    return F.grid_sample(maps, grid.clamp(-2.0, 2.0), align_corners=False)


def _ms_deform_attn(
    sizes: Sizes, value: Tensor, _: Tensor, __: Tensor, locations: Tensor, weights: Tensor
) -> Tensor:
    per_level = [(locations[:, :, :, level], weights[:, :, :, level]) for level in range(locations.shape[3])]
    return _attended(sizes, value, per_level)


def _attended(sizes: Sizes, value: Tensor, per_level: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return [B, Q, G * C] from values [B, S, G, C], with [B, Q, G, P, 2] and [B, Q, G, P] of each level."""
    _, _, G, C = value.shape
    Q, start, total = per_level[0][0].shape[1], 0, None
    maps = value.float().permute(0, 2, 3, 1).flatten(0, 1)  # [B * G, C, S]
    for (height, width), (location, weight) in zip(sizes, per_level, strict=True):
        level = maps[:, :, start : start + height * width].unflatten(2, (height, width))
        start = start + height * width
        samples = _sampled(level, location.transpose(1, 2).flatten(0, 1))  # [B * G, C, Q, P]
        summed = (samples * weight.transpose(1, 2).flatten(0, 1).unsqueeze(1)).sum(-1)
        total = summed if total is None else total + summed
    assert total is not None
    return total.view(-1, G * C, Q).transpose(1, 2).to(value.dtype)


def _ms_deform_attn_fused(
    sizes: Sizes,
    value: Tensor,
    _: Tensor,
    __: Tensor,
    *predicted: Any,
) -> Tensor:
    return _attended(sizes, value, list(zip(*_levels_of(sizes, *predicted), strict=True)))


def _attention_samples(sizes: Sizes, *predicted: Any) -> tuple[Tensor, Tensor]:
    """Return locations [B, Q, G, L, P, 2] and weights [B, Q, G, L, P]. All levels have as many points."""
    locations, weights = _levels_of(sizes, *predicted)
    return torch.stack(locations, 3), torch.stack(list(weights), 3)


def _levels_of(
    sizes: Sizes, references: Tensor, offsets: Tensor, logits: Tensor, num_points: Sequence[int]
) -> tuple[list[Tensor], Sequence[Tensor]]:
    """Return the locations [B, Q, G, P, 2] and the weights [B, Q, G, P] of each level."""
    weights = logits.float().softmax(-1).split(list(num_points), 3)
    locations = []
    for level, offset in enumerate(offsets.float().split(list(num_points), 3)):
        reference = references[:, :, level, None, None]  # [B, Q, 1, 1, 2 or 4]
        if references.shape[-1] == 4:
            scale = reference[..., 2:] * (0.5 / num_points[level])
            location = reference[..., :2] + offset * scale
        else:
            height, width = sizes[level]
            x = reference[..., 0] + offset[..., 0] / width
            location = torch.stack((x, reference[..., 1] + offset[..., 1] / height), -1)
        locations.append(location)
    return locations, weights


def _deformable_aggregation(
    sizes: Sizes, features: Tensor, level_shapes: Tensor, __: Tensor, locations: Tensor, weights: Tensor
) -> Tensor:
    """The cameras have levels of the same sizes, as those of one neck."""
    S, C = features.shape[1:]
    Q, _, V, L, G = weights.shape[1:]
    maps = features.float().unflatten(1, (V, S // V)).flatten(0, 1).transpose(1, 2)  # [B * V, C, S / V]
    locations = locations.permute(0, 3, 1, 2, 4).flatten(0, 1)  # [B * V, Q, P, 2]
    counts = ((locations > 0) & (locations < 1)).all(-1)
    weights = weights.permute(0, 3, 4, 5, 1, 2).flatten(0, 1)  # [B * V, L, G, Q, P]
    start, total = 0, None
    for level, (height, width) in zip(range(L), sizes, strict=True):
        level_maps = maps[:, :, start : start + height * width].unflatten(2, (height, width))
        start = start + height * width
        samples = _sampled(level_maps, locations, counts).unflatten(1, (G, C // G))
        summed = (samples * weights[:, level].unsqueeze(2)).sum(-1)  # [B * V, G, C / G, Q]
        total = summed if total is None else total + summed
    assert total is not None
    return total.view(-1, V, C, Q).sum(1).transpose(1, 2).to(features.dtype)


def _deformable_aggregation_fused(
    sizes: Sizes,
    features: Tensor,
    level_shapes: Tensor,
    level_starts: Tensor,
    *predicted: Any,
) -> Tensor:
    return _deformable_aggregation(sizes, features, level_shapes, level_starts, *_projected(*predicted))


def _projected(
    key_points: Tensor,
    projection: Tensor,
    image_wh: Tensor,
    logits: Tensor,
    camera_logits: Tensor,
    keep: Tensor,
    keep_scale: float,
) -> tuple[Tensor, Tensor]:
    """Return locations [B, Q, P, V, 2] and weights [B, Q, P, V, L, G]."""
    pixels = (projection[:, :, None, None, :3, :3] * key_points[:, None, :, :, None, :]).sum(-1)
    pixels = pixels + projection[:, :, None, None, :3, 3]  # [B, V, Q, P, 3]
    locations = pixels[..., :2] / pixels[..., 2:].clamp(min=_MIN_DEPTH) / image_wh[:, :, None, None]
    summed = logits.float()
    if camera_logits.dim() == 5:
        summed = summed.unsqueeze(2) + camera_logits.float().unsqueeze(1)  # [B, Q, V, L, P, G]
    # The softmax runs over the last axis, which some runtimes need.
    ordered = summed.movedim(-1, 2)  # [B, Q, G, V, L, P]
    weights = ordered.flatten(3).softmax(-1).view(ordered.shape)
    return locations.permute(0, 2, 3, 1, 4), weights.permute(0, 1, 5, 3, 4, 2)


def _gaussian_field(
    _: Sizes, points: Tensor, means: Tensor, cholesky: Tensor, weights: Tensor, *orders: Any
) -> Tensor:
    """Every pair counts, whatever the tolerance."""
    x, y, z = (points.unsqueeze(1) - means).unbind(-1)  # [B, N]
    a = x / cholesky[:, 0, 0]
    b = (y - cholesky[:, 1, 0] * a) / cholesky[:, 1, 1]
    c = (z - cholesky[:, 2, 0] * a - cholesky[:, 2, 1] * b) / cholesky[:, 2, 2]
    return torch.exp(-0.5 * (a * a + b * b + c * c)) @ weights


def _order_in_space(_: Sizes, positions: Tensor) -> Tensor:
    """No formula reads an order."""
    return torch.zeros_like(positions[:, 0], dtype=torch.int64)


def _box_key_points(_: Sizes, *arguments: Any) -> Tensor:
    return box_key_points_reference(*arguments)


_FORMULAS: dict[str, Callable[..., Any]] = {
    "ms_deform_attn": _ms_deform_attn,
    "ms_deform_attn_fused": _ms_deform_attn_fused,
    "deformable_aggregation": _deformable_aggregation,
    "deformable_aggregation_fused": _deformable_aggregation_fused,
    "gaussian_field": _gaussian_field,
    "order_in_space": _order_in_space,
    "box_key_points": _box_key_points,
}
