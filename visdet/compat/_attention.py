"""Multi-scale deformable attention in the forms that other packages call, and the conditions for visdet's operator."""

import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from visdet import ops
from visdet.ops.devices import is_loaded

from ._bridge import Bridge, CompatWarning
from ._counts import counted

__all__ = ["attend", "attend_ragged", "is_known", "is_recorded", "takes"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_EXAMPLE_SHAPES = [(3, 5), (2, 2)]


def takes(value: Any) -> bool:
    """Return whether visdet's operator can compute a call with these values.

    It can for tensors on CPUs and CUDA GPUs, in eager mode and under ``torch.compile``. The package's own
    implementation is needed if the call is recorded in order to run elsewhere (traces, scripts, exports), under
    ``torch.func`` and forward-mode differentiation, for subclasses of tensors, and for other devices and dtypes.
    """
    if type(value) is not Tensor or value.dtype not in _DTYPES or is_recorded():
        return False
    device = value.device.type
    if device == "cuda" and not is_loaded("cuda"):
        _warn_of_missing_cuda()
        return False
    return device in ("cpu", "cuda")


def is_recorded() -> bool:
    """Return whether an export, a trace, ``torch.func`` or forward-mode differentiation needs plain torch."""
    is_exporting = torch.compiler.is_exporting()
    if torch.compiler.is_compiling() or is_exporting:
        return is_exporting
    return (
        torch.jit.is_tracing()
        or torch.jit.is_scripting()
        or torch.onnx.is_in_onnx_export()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )


def _attend(
    value: Tensor,  # [B, S, G, C]
    level_shapes: Any,  # [L, 2] (height, width): pairs of integers, or a tensor
    locations: Tensor,  # [B, Q, G, L, P, 2] (x, y) in 0..1
    weights: Tensor,  # [B, Q, G, L, P]
) -> Tensor:  # [B, Q, G * C]
    """Return ``visdet.ops.ms_deform_attn`` for a pyramid without gaps."""
    return ops.ms_deform_attn(value, level_shapes, None, locations, weights)


attend = counted("ms_deform_attn", _attend)


def attend_ragged(
    value: Tensor,  # [B, S, G, C]
    level_shapes: Any,  # [L, 2] (height, width)
    locations: Tensor,  # [B, Q, G, K, 2] (x, y) in 0..1, level after level
    weights: Tensor,  # [B, Q, G, K]
    num_points: Sequence[int],  # [L], whose sum is K
) -> Tensor:  # [B, Q, G * C]
    """Return ``attend`` for levels with different numbers of samples. Shorter levels are padded with zero weights."""
    L = len(num_points)
    P = max(num_points)
    if min(num_points) == P:
        return attend(value, level_shapes, locations.unflatten(3, (L, P)), weights.unflatten(3, (L, P)))
    padded_locations = [F.pad(x, (0, 0, 0, P - x.shape[3])) for x in locations.split(num_points, 3)]
    padded_weights = [F.pad(x, (0, P - x.shape[3])) for x in weights.split(num_points, 3)]
    return attend(value, level_shapes, torch.stack(padded_locations, 3), torch.stack(padded_weights, 3))


@functools.cache
def _warn_of_missing_cuda() -> None:
    warnings.warn(
        "visdet.compat: the package's own implementation is used for CUDA tensors, because visdet's CUDA library is "
        "not loaded. `python -m visdet.doctor` tells the reason",
        CompatWarning,
        stacklevel=4,
    )


def is_known(
    bridge: Bridge,
    module: ModuleType,
    name: str,
    original: Callable[..., Any] | None,
    replacement: Callable[..., Any],
    *layouts: str,
) -> bool:
    """Return whether a package's definition of the operator agrees with visdet's, and warn if it does not.

    It has to have the same arguments, beside those that the replacement takes as options, and to compute the same on a
    small example in one of the layouts. The locations of the example lie beyond every border, too, so that other
    conventions for coordinates or borders are noticed.

    Args:
        bridge, module, name: the bridge, and the module and the name of the definition.
        original: the package's function, or the forward of its class. None if the module lacks it.
        replacement: visdet's function.
        layouts: those of the arguments. "levels" has locations [B, Q, G, L, P, 2], and "folded" [B, Q, G, L * P, 2].
            "ragged" is "folded" with the number of points of each level as another argument, and "listed" the same with
            a list of values [B, G, C, H * W]. "class" is "levels" with
            the arguments of the class of transformers, and "channels first" has values [B, G, C, S].
    """
    parameters = inspect.signature(replacement, follow_wrapped=False).parameters
    expected = [name for name, one in parameters.items() if one.kind is not one.VAR_KEYWORD]
    found = [] if original is None else list(inspect.signature(original).parameters)
    has_options = len(expected) < len(parameters)
    if (found[: len(expected)] if has_options else found) != expected:
        bridge.warn(module, f"{name} takes {found}, where {expected} was expected")
        return False
    problems = [_disagreement(replacement, original, layout) for layout in layouts]
    if all(problems):
        bridge.warn(module, f"{name} {problems[0]}")
    return not all(problems)


def _disagreement(candidate: Callable[..., Tensor], original: Any, layout: str) -> str | None:
    """Return None if two implementations of the operator agree on a small example, and otherwise how they differ."""
    generator = torch.Generator("cpu").manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device="cpu", dtype=torch.float64)

    value = random(2, 19, 2, 4)
    shapes = torch.tensor(_EXAMPLE_SHAPES, device="cpu")
    samples = random(2, 7, 2, 2, 3, 2) * 1.6 - 0.3, random(2, 7, 2, 2, 3)
    folded = [x.flatten(3, 4) for x in samples]
    arguments = {
        "levels": (value, shapes, *samples),
        "folded": (value, _EXAMPLE_SHAPES, *folded),
        "ragged": (value, _EXAMPLE_SHAPES, *folded, [2, 4]),
        "listed": (
            [level.permute(0, 2, 3, 1) for level in value.split([15, 4], 1)],
            _EXAMPLE_SHAPES,
            *folded,
            [2, 4],
        ),
        "class": (None, value, shapes, _EXAMPLE_SHAPES, None, *samples, 64),
        "channels first": (value.permute(0, 2, 3, 1).contiguous(), shapes, *samples),
    }[layout]
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            expected = original(*arguments)
            found = candidate(*arguments)
    except (AttributeError, NameError, TypeError, ValueError, RuntimeError, LookupError) as error:
        return f"fails on a small example ({type(error).__name__}: {error})"
    if expected.shape == found.shape and torch.allclose(expected, found, rtol=1e-9, atol=1e-9):
        return None
    return "computes something else than multi-scale deformable attention"
