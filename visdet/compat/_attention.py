"""Multi-scale deformable attention in the forms that other packages call, and the conditions for visdet's operator."""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from visdet import ops
from visdet.ops.devices import is_loaded

from ._bridge import CompatWarning
from ._counts import CALLS

__all__ = ["attend", "attend_ragged", "disagreement", "is_recorded", "level_tables", "note", "takes"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_EXAMPLE_SHAPES = ((3, 5), (2, 2))


def takes(value: Any) -> bool:
    """Return whether visdet's operator can compute a call with these values.

    It can for tensors on CPUs and CUDA GPUs, in eager mode and under ``torch.compile``. The package's own
    implementation is needed if the call is recorded in order to run elsewhere (traces, scripts, exports), under
    ``torch.func`` and forward-mode differentiation, for subclasses of tensors, and for other devices and dtypes.
    """
    if type(value) is not Tensor or value.dtype not in _DTYPES or is_recorded():
        return False
    if value.device.type == "cuda" and not is_loaded("cuda"):
        _warn_of_missing_cuda()
        return False
    return value.device.type in ("cpu", "cuda")


def is_recorded() -> bool:
    """Return whether an export, a trace, ``torch.func`` or forward-mode differentiation needs plain torch."""
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


def note(operator: str) -> None:
    """Count a call of an operator."""
    if not torch.compiler.is_compiling():
        CALLS[operator] += 1


def attend(
    value: Tensor,  # [B, S, G, C]
    level_shapes: Any,  # [L, 2] (height, width): pairs of integers, or a tensor
    locations: Tensor,  # [B, Q, G, L, P, 2] (x, y) in 0..1
    weights: Tensor,  # [B, Q, G, L, P]
) -> Tensor:  # [B, Q, G * C]
    """Return ``visdet.ops.ms_deform_attn`` for a pyramid without gaps."""
    note("ms_deform_attn")
    return ops.ms_deform_attn(value, *level_tables(level_shapes), locations, weights)


def attend_ragged(
    value: Tensor,  # [B, S, G, C]
    level_shapes: Any,  # [L, 2] (height, width)
    locations: Tensor,  # [B, Q, G, K, 2] (x, y) in 0..1, level after level
    weights: Tensor,  # [B, Q, G, K]
    num_points: Sequence[int],  # [L], whose sum is K
) -> Tensor:  # [B, Q, G * C]
    """Return ``attend`` for levels with different numbers of samples. Shorter levels are padded with zero weights."""
    L, P = len(num_points), max(num_points)
    if min(num_points) == P:
        return attend(value, level_shapes, locations.unflatten(3, (L, P)), weights.unflatten(3, (L, P)))
    counts = list(num_points)
    padded_locations = [F.pad(x, (0, 0, 0, P - x.shape[3])) for x in locations.split(counts, 3)]
    padded_weights = [F.pad(x, (0, P - x.shape[3])) for x in weights.split(counts, 3)]
    return attend(value, level_shapes, torch.stack(padded_locations, 3), torch.stack(padded_weights, 3))


def level_tables(level_shapes: Any) -> tuple[Any, Tensor | None]:
    """Return the shapes [L, 2] and the starts [L] of the levels for visdet's operators.

    A tensor is returned as it is, and so is everything under ``torch.compile``. The starts are then None, and the
    operator computes them. For other shapes, both tables are tensors on the CPU, which are made once for all calls with
    the same shapes.
    """
    if isinstance(level_shapes, Tensor) or torch.compiler.is_compiling():
        return level_shapes, None
    return _tables_of(tuple((int(height), int(width)) for height, width in level_shapes))


@functools.lru_cache(maxsize=256)
def _tables_of(level_shapes: tuple[tuple[int, int], ...]) -> tuple[Tensor, Tensor]:
    areas = [height * width for height, width in level_shapes]
    starts = [sum(areas[:level]) for level in range(len(areas))]
    with torch.inference_mode(False):  # An inference tensor could not be saved for a later backward pass.
        shapes = torch.tensor(level_shapes, dtype=torch.int64, device="cpu").view(-1, 2)
        return shapes, torch.tensor(starts, dtype=torch.int64, device="cpu")


@functools.cache
def _warn_of_missing_cuda() -> None:
    warnings.warn(
        "visdet.compat: the package's own implementation is used for CUDA tensors, because visdet's CUDA library is "
        "not loaded. `python -m visdet.doctor` tells the reason",
        CompatWarning,
        stacklevel=4,
    )


def disagreement(candidate: Callable[..., Tensor], original: Callable[..., Tensor], kind: str) -> str | None:
    """Return None if two implementations of the operator agree on a small example, and otherwise how they differ.

    The locations of the example lie beyond every border, too, so that other conventions for coordinates or borders are
    noticed.

    Args:
        candidate: visdet's function of (value, level_shapes, locations, weights).
        original: the package's function of the same arguments.
        kind: the layout of the locations. It is "levels" for [B, Q, G, L, P, 2] and "folded" for [B, Q, G, L * P, 2].
            "ragged" has the layout of "folded", and the fifth argument is the number of points of each level.
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
