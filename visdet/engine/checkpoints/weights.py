"""Loading of weights into a model, with a report if they do not fit."""

import re
import warnings
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from mmengine.logging import print_log
from torch import Tensor, nn

from visdet.checks.state_dicts import common_prefix, differing, nonfinite_names
from visdet.errors import UserError, listed

from ..config.build_errors import build_model
from ..config.files import read_config
from ..config.packaged import packaged_configs
from ..errors import CheckpointError
from ..process.console import warn
from .published import converted, revised

MODULE_PREFIX = ((r"^module\.", ""),)  # what a wrapper of a model puts before the names of its weights


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
    has_weights = any(isinstance(value, Tensor) for value in found.values())
    if not has_weights or not all(isinstance(key, str) for key in found):
        held = f"the keys {listed(found, 6)}" if found else "an empty dict"
        raise CheckpointError(f"checkpoint {source} holds no weights; it holds {held}")
    return found


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
    warn(report)


def own_names(
    weights: dict[str, Tensor], model: nn.Module, revise_keys: Sequence[tuple[str, str]] = ()
) -> dict[str, Tensor]:
    """Return weights under the names that a model has for them.

    Names are revised first, then those of other projects are converted, and then a prefix that the names have in the
    file alone, such as ``model.`` of a wrapper, is removed.
    """
    weights = converted(revised(weights, revise_keys), model)
    return revised(weights, [("^" + re.escape(common_prefix(weights, model.state_dict())), "")])


def load_weights(
    model: nn.Module,
    state_dict: dict[str, Tensor],
    source: str,
    strict: bool = True,
    revise_keys: Sequence[tuple[str, str]] = MODULE_PREFIX,
    allow_nonfinite: bool = False,
    lists_all: bool = False,
) -> None:
    """Load ``state_dict`` into ``model``.

    The buffers ``num_batches_tracked`` of normalisation layers may be missing. A prefix that the names of the model's
    weights have in the file alone, such as ``model.`` of a wrapper, is removed.

    Args:
        model: the model.
        state_dict: the weights by their keys.
        source: the path or the address of the checkpoint, for messages.
        strict: whether to refuse weights that do not all fit. If False, those that fit are loaded, and a warning in
            the log names some of the others, which keep their values in the model.
        revise_keys: pairs of a regular expression and its replacement, which are applied to the keys in turn.
        allow_nonfinite: see :func:`check_finite`, which is called for the weights that fit.
        lists_all: whether the log names all others in a line of their own, which a terminal does not show.

    Raises:
        CheckpointError: ``strict`` is True, and a key is missing or unexpected, a tensor has another shape, or it has
            numbers of another kind, such as int8 in place of float32. With
            ``strict=False``, this is raised only if no weight fits.
    """
    weights = own_names(state_dict, model, revise_keys)
    expected = model.state_dict()
    of_other_shape, of_other_type = differing(weights, expected)
    unfit = {**of_other_shape, **of_other_type}
    fitting = _fitting(weights, unfit)
    masks = nonfinite_names(expected)  # such as buffers of minus infinity, which the model itself has made
    used = {key: value for key, value in fitting.items() if key in expected and key not in masks}
    check_finite(used, source, allow_nonfinite)
    missing, unexpected = model.load_state_dict(fitting, strict=False)
    missing = [key for key in missing if key not in unfit and not key.endswith("num_batches_tracked")]
    if not (missing or unexpected or unfit):
        return
    kind = type(model).__name__
    others = {
        "missing": missing,
        "unexpected": unexpected,
        "of another shape": of_other_shape.values(),
        "of another type": of_other_type.values(),
    }
    report = f"checkpoint {source} does not fit {kind}: {_told(others, 4)}"
    if len(unexpected) == len(fitting):
        raise CheckpointError(f"{report}.")
    if strict:
        raise CheckpointError(
            f"{report}.\nTo train from the weights that fit, use `visdet train CONFIG --from FILE`. Other commands "
            "load them with `--cfg-options strict_load=False`."
        )
    total = len(expected)
    loaded = total - len(missing) - len(unfit)
    report = f"{loaded} of the {total} weights of {kind} are those of {source}"
    if 2 * loaded > total:
        report += f". The others begin anew: {_told(others, 10)}"
    else:
        report += f", and the others begin anew.\n{_advice_for(state_dict)}"
    warn(report)
    if lists_all:
        print_log(f"what does not fit: {_told(others, total + len(weights))}", logger="current")


def _fitting(weights: dict[str, Tensor], unfit: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the weights that fit, with the versions of modules, by which these migrate old weights, if there are."""
    fitting: Any = OrderedDict((key, value) for key, value in weights.items() if key not in unfit)
    metadata = getattr(weights, "_metadata", None)
    if isinstance(metadata, dict) and all(isinstance(item, dict) for item in metadata.values()):
        fitting._metadata = metadata
    return fitting


def _told(others: Mapping[str, Collection[str]], shown: int) -> str:
    """Return how many weights do not fit, and the names of some, by what is wrong with them."""
    return "; ".join(f"{len(keys)} {what} ({listed(keys, shown)})" for what, keys in others.items() if keys)


def _advice_for(state_dict: dict[str, Tensor]) -> str:
    """Return which config to use for weights of which a model has only a few."""
    config = config_that_fits(state_dict)
    if config is None:
        return "It fits no config of the package: give that of its training"
    return f"The file fits the config {config}: let yours inherit that one"


def config_that_fits(state_dict: dict[str, Tensor]) -> str | None:
    """Return the name of the package's config whose model has nearly all of these weights, or None."""
    best = None
    best_share = 0.95
    for name in packaged_configs():
        try:
            cfg = read_config(name)
            with torch.device("meta"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = build_model(cfg, cfg.model)
            weights = own_names(state_dict, model)
        except (UserError, NotImplementedError, RuntimeError, AttributeError):
            continue  # A model that is built of files which are missing fits no weights.
        expected = model.state_dict()
        count = sum(key in expected and value.shape == expected[key].shape for key, value in weights.items())
        share = count / max(len(expected), len(weights))
        if share > best_share:
            best = name
            best_share = share
    return best
