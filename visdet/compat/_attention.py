"""Multi-scale deformable attention as other packages call it: when visdet's operator takes a call, and how."""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from visdet import ops
from visdet.ops import _library

from ._bridge import CompatWarning

__all__ = ["attend", "attend_ragged", "disagreement", "is_recorded", "level_tables", "takes"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_EXAMPLE_SHAPES = ((3, 5), (2, 2))


def takes(value: Any) -> bool:
    """Return whether visdet's operator takes a call with these values; otherwise the package's own path has to.

    It does for tensors on the CPU and on CUDA, eagerly and under ``torch.compile``. It does not where somebody records
    the call to run it elsewhere (traces, scripts, exports), under ``torch.func`` and forward-mode differentiation, for
    subclasses of tensors, other devices and other types.
    """
    if type(value) is not Tensor or value.dtype not in _DTYPES or is_recorded():
        return False
    if value.device.type == "cuda" and not _library.is_loaded("cuda"):
        _warn_of_missing_cuda()
        return False
    return value.device.type in ("cpu", "cuda")


def is_recorded() -> bool:
    """Return whether somebody needs plain torch: an export or a trace, ``torch.func``, forward-mode derivatives."""
    if torch.compiler.is_compiling():
        return torch.compiler.is_exporting()
    return (
        torch.jit.is_tracing()
        or torch.jit.is_scripting()
        or torch.onnx.is_in_onnx_export()
        or torch.compiler.is_exporting()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )


def attend(
    value: Tensor,  # [B, S, G, C]
    level_shapes: Any,  # [L, 2] (height, width): pairs of integers, or a tensor
    locations: Tensor,  # [B, Q, G, L, P, 2] (x, y) in 0..1
    weights: Tensor,  # [B, Q, G, L, P]
) -> Tensor:  # [B, Q, G * C]
    """Return ``visdet.ops.ms_deform_attn`` of a pyramid without gaps."""
    return ops.ms_deform_attn(value, *level_tables(level_shapes), locations, weights)


def attend_ragged(
    value: Tensor,  # [B, S, G, C]
    level_shapes: Any,  # [L, 2] (height, width)
    locations: Tensor,  # [B, Q, G, K, 2], level after level
    weights: Tensor,  # [B, Q, G, K]
    num_points: Sequence[int],  # [L], K = sum
) -> Tensor:  # [B, Q, G * C]
    """Return ``attend`` of levels with a number of samples each; shorter ones are filled up with zero weights."""
    L, P = len(num_points), max(num_points)
    if min(num_points) == P:
        return attend(value, level_shapes, locations.unflatten(3, (L, P)), weights.unflatten(3, (L, P)))
    counts = list(num_points)
    padded_locations = [F.pad(x, (0, 0, 0, P - x.shape[3])) for x in locations.split(counts, 3)]
    padded_weights = [F.pad(x, (0, P - x.shape[3])) for x in weights.split(counts, 3)]
    return attend(value, level_shapes, torch.stack(padded_locations, 3), torch.stack(padded_weights, 3))


def level_tables(level_shapes: Any) -> tuple[Any, Tensor | None]:
    """Return shapes and starts of the levels as visdet's operators take them; tables on the CPU are made once."""
    if isinstance(level_shapes, Tensor) or torch.compiler.is_compiling():
        return level_shapes, None
    return _tables_of(tuple((int(height), int(width)) for height, width in level_shapes))


@functools.lru_cache(maxsize=256)
def _tables_of(level_shapes: tuple[tuple[int, int], ...]) -> tuple[Tensor, Tensor]:
    areas = [height * width for height, width in level_shapes]
    starts = [sum(areas[:level]) for level in range(len(areas))]
    with torch.inference_mode(False):  # a tensor made in that mode could not be saved for a backward later
        shapes = torch.tensor(level_shapes, dtype=torch.int64, device="cpu").view(-1, 2)
        return shapes, torch.tensor(starts, dtype=torch.int64, device="cpu")


@functools.cache
def _warn_of_missing_cuda() -> None:
    warnings.warn(
        "visdet.compat: CUDA tensors keep the plain path of the package, for visdet's CUDA library is not loaded "
        "(python -m visdet.doctor says why)",
        CompatWarning,
        stacklevel=4,
    )


def disagreement(candidate: Callable[..., Tensor], original: Callable[..., Tensor], kind: str) -> str | None:
    """Return None where two implementations of the operator compute the same, or what is wrong with the original.

    They are functions of (value, level_shapes, locations, weights), by ``kind``: "levels" with locations
    [B, Q, G, L, P, 2], "folded" with [B, Q, G, L * P, 2], "ragged" with the points of each level as fifth argument.
    The small example reaches over every border, so that another convention for coordinates or borders shows.
    """
    generator = torch.Generator("cpu").manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device="cpu", dtype=torch.float64)

    value, locations, weights = (
        random(2, 19, 2, 4),
        random(2, 7, 2, 2, 3, 2) * 1.6 - 0.3,
        random(2, 7, 2, 2, 3),
    )
    shapes = torch.tensor(_EXAMPLE_SHAPES, device="cpu") if kind == "levels" else list(_EXAMPLE_SHAPES)
    if kind != "levels":
        locations, weights = locations.flatten(3, 4), weights.flatten(3, 4)
    arguments = (value, shapes, locations, weights, *([[2, 4]] if kind == "ragged" else []))
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            expected, found = original(*arguments), candidate(*arguments)
    except (AttributeError, NameError, TypeError, ValueError, RuntimeError, LookupError) as error:
        return f"fails on a small example ({type(error).__name__}: {error})"
    if expected.shape == found.shape and torch.allclose(expected, found, rtol=1e-9, atol=1e-9):
        return None
    return "computes something else than multi-scale deformable attention"
