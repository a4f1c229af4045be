"""Loading of weights into a model, with a report if they do not fit."""

import re
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from mmengine.logging import print_log
from torch import Tensor, nn

from .errors import CheckpointError

__all__ = ["load_weights", "revised", "weights_of"]

_SHOWN = 4


def weights_of(checkpoint: dict[str, Any], source: str) -> dict[str, Tensor]:
    """Return the state dict of a checkpoint.

    The state dict is the value of 'state_dict' or of 'model', or the checkpoint itself if it has neither key.

    Args:
        checkpoint: the content of the checkpoint.
        source: the path or the address of the checkpoint, for the error message.

    Raises:
        CheckpointError: the state dict holds no tensor.
    """
    found = checkpoint
    for key in ("state_dict", "model"):
        if isinstance(checkpoint, dict) and isinstance(checkpoint.get(key), dict):
            found = checkpoint[key]
            break
    if not isinstance(found, dict) or not any(isinstance(value, Tensor) for value in found.values()):
        kind = (
            f"the keys {', '.join(map(str, list(found)[:6]))}"
            if isinstance(found, dict)
            else f"a {type(found).__name__}"
        )
        raise CheckpointError(f"checkpoint {source} holds no weights; it holds {kind}")
    return found


def revised(state_dict: dict[str, Tensor], revise_keys: Sequence[tuple[str, str]]) -> dict[str, Tensor]:
    """Return the weights with other keys: each regular expression is replaced in all keys, in turn."""
    weights: Any = state_dict
    for pattern, replacement in revise_keys:
        weights = OrderedDict((re.sub(pattern, replacement, key), value) for key, value in weights.items())
    if hasattr(state_dict, "_metadata"):
        weights._metadata = state_dict._metadata
    return weights


def load_weights(
    model: nn.Module,
    state_dict: dict[str, Tensor],
    source: str,
    strict: bool = True,
    revise_keys: Sequence[tuple[str, str]] = ((r"^module\.", ""),),
) -> None:
    """Load ``state_dict`` into ``model``. If the weights are refused, the model stays as it was.

    The buffers ``num_batches_tracked`` of normalisation layers may be missing.

    Args:
        model: the model.
        state_dict: the weights by their keys.
        source: the path or the address of the checkpoint, for messages.
        strict: whether to refuse weights that do not all fit. If False, those that fit are loaded, and a warning in
            the log names the others.
        revise_keys: pairs of a regular expression and its replacement, which are applied to the keys in turn.

    Raises:
        CheckpointError: ``strict`` is True, and a key is missing or unexpected or a tensor has another shape. With
            ``strict=False``, this is raised only if no weight fits.
    """
    weights = revised(state_dict, revise_keys)
    expected = model.state_dict()
    differing = {
        key: f"{key} {list(value.shape)} for {list(expected[key].shape)}"
        for key, value in weights.items()
        if key in expected and value.shape != expected[key].shape
    }
    fitting: Any = OrderedDict((key, value) for key, value in weights.items() if key not in differing)
    if hasattr(weights, "_metadata"):
        # The metadata has the versions by which modules migrate old weights.
        fitting._metadata = weights._metadata
    before = {key: value.detach().clone() for key, value in expected.items() if isinstance(value, Tensor)}
    missing, unexpected = model.load_state_dict(fitting, strict=False)
    missing = [key for key in missing if key not in differing and not key.endswith("num_batches_tracked")]
    if not (missing or unexpected or differing):
        return
    report = f"checkpoint {source} does not fit {type(model).__name__}: " + "; ".join(
        _counted(what, keys)
        for what, keys in (
            ("missing", missing),
            ("unexpected", list(unexpected)),
            ("of another shape", list(differing.values())),
        )
        if keys
    )
    if strict or len(unexpected) == len(fitting):
        with torch.no_grad():
            for key, value in model.state_dict().items():
                if key in before:
                    value.copy_(before[key])
        raise CheckpointError(
            f"{report}.\nTo load only the weights that fit, use `--cfg-options strict_load=False`."
        )
    print_log(f"{report}. The other weights were loaded", logger="current", level=30)


def _counted(what: str, keys: list[str]) -> str:
    more = f", and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return f"{len(keys)} {what} ({', '.join(keys[:_SHOWN])}{more})"
