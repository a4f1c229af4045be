"""Loading of weights into a model, with a report if they do not fit."""

import logging
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from mmengine.logging import print_log
from torch import Tensor, nn

from visdet.checks.state_dicts import common_prefix, is_dense, nonfinite_names
from visdet.errors import listed

from ..errors import CheckpointError
from .published import converted


def weights_of(checkpoint: dict[str, Any], source: str) -> dict[str, Tensor]:
    """Return the state dict of a checkpoint.

    The state dict is the value of 'state_dict' or of 'model', or the checkpoint itself if it has neither key. It may be
    nested, such as in {'model': {'state_dict': ...}}.

    Args:
        checkpoint: the content of the checkpoint.
        source: the path or the address of the checkpoint, for the error message.

    Raises:
        CheckpointError: the state dict holds no tensor.
    """
    found = checkpoint
    while inner := [found[key] for key in ("state_dict", "model") if isinstance(found.get(key), dict)]:
        found = inner[0]
    if not any(isinstance(value, Tensor) for value in found.values()) or not all(
        isinstance(key, str) for key in found
    ):
        held = f"the keys {listed(found, 6)}" if found else "an empty dict"
        raise CheckpointError(f"checkpoint {source} holds no weights; it holds {held}")
    return found


def tensors_of(state: Any, name: str) -> dict[str, Tensor]:
    """Return the tensors in nested dicts and lists, by their places, such as ``optimizer.state.0.exp_avg``."""
    if isinstance(state, Tensor):
        return {name: state}
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    return {
        place: tensor
        for key, item in items
        for place, tensor in tensors_of(item, f"{name}.{key}".lstrip(".")).items()
    }


def check_finite(weights: Mapping[str, Any], source: str, allow: bool = False) -> None:
    """Refuse weights that hold NaN or an infinite number, as a run that has diverged writes them.

    Args:
        weights: the weights by their keys.
        source: the path or the address of the checkpoint, for messages.
        allow: whether to warn only.

    Raises:
        CheckpointError: a weight is not finite, and ``allow`` is False.
    """
    if not (names := nonfinite_names(weights)):
        return
    report = f"checkpoint {source} has NaN or infinite numbers in {len(names)} tensors ({listed(names, 4)})"
    if not allow:
        raise CheckpointError(
            f"{report}. Use another checkpoint, or load this one by `--cfg-options allow_nonfinite_weights=True`."
        )
    print_log(report, logger="current", level=logging.WARNING)


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
    allow_nonfinite: bool = False,
) -> None:
    """Load ``state_dict`` into ``model``.

    The buffers ``num_batches_tracked`` of normalisation layers may be missing. A prefix that the names of the model's
    weights have in the file alone, such as ``model.`` of a wrapper, is removed.

    Args:
        model: the model.
        state_dict: the weights by their keys.
        source: the path or the address of the checkpoint, for messages.
        strict: whether to refuse weights that do not all fit. If False, those that fit are loaded, and a warning in
            the log names all others, which keep their values in the model.
        revise_keys: pairs of a regular expression and its replacement, which are applied to the keys in turn.
        allow_nonfinite: see :func:`check_finite`, which is called for the weights that fit.

    Raises:
        CheckpointError: ``strict`` is True, and a key is missing or unexpected or a tensor has another shape. With
            ``strict=False``, this is raised only if no weight fits.
    """
    weights = converted(revised(state_dict, revise_keys), model)
    expected = model.state_dict()
    weights = revised(weights, [("^" + re.escape(common_prefix(weights, expected)), "")])
    differing = {
        key: f"{key} {list(value.shape) if is_dense(value) else type(value).__name__} for {list(expected[key].shape)}"
        for key, value in weights.items()
        if isinstance(expected.get(key), Tensor)
        and not (is_dense(value) and value.shape == expected[key].shape)
    }
    fitting: Any = OrderedDict((key, value) for key, value in weights.items() if key not in differing)
    metadata = getattr(weights, "_metadata", None)
    if isinstance(metadata, dict) and all(isinstance(item, dict) for item in metadata.values()):
        # The metadata has the versions by which modules migrate old weights.
        fitting._metadata = metadata
    masks = nonfinite_names(expected)  # such as buffers of minus infinity, which the model itself has made
    used = {key: value for key, value in fitting.items() if key in expected and key not in masks}
    check_finite(used, source, allow_nonfinite)
    missing, unexpected = model.load_state_dict(fitting, strict=False)
    missing = [key for key in missing if key not in differing and not key.endswith("num_batches_tracked")]
    if not (missing or unexpected or differing):
        return
    others = {"missing": missing, "unexpected": unexpected, "of another shape": list(differing.values())}

    def told(shown: int) -> str:
        return "; ".join(
            f"{len(keys)} {what} ({listed(keys, shown)})" for what, keys in others.items() if keys
        )

    report = f"checkpoint {source} does not fit {type(model).__name__}: {told(4)}"
    none_fits = len(unexpected) == len(fitting)
    if strict or none_fits:
        if not none_fits:
            report += (
                ".\nTo train from the weights that fit, use `visdet train CONFIG --from FILE`. Other commands load "
                "them with `--cfg-options strict_load=False`"
            )
        raise CheckpointError(f"{report}.")
    loaded = len(expected) - len(missing) - len(differing)
    print_log(
        f"{loaded} of the {len(expected)} weights of {type(model).__name__} are those of {source}. The others begin "
        f"anew: {told(200)}",
        logger="current",
        level=logging.WARNING,
    )
