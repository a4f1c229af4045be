"""Golden cases of SparseDrive's parts: build, load, compare."""

import json

import torch
from golden import golden, under

from visdet.registry import MODELS, TASK_UTILS

_CACHE = {}


def module_case(name):
    """Return (config, state, input, output) of one case of modules.npz, or skip."""
    if "modules" not in _CACHE:
        _CACHE["modules"] = golden("modules")
    arrays = _CACHE["modules"]
    config = json.loads(str(arrays[f"{name}/config"]))
    return config, *(under(arrays, f"{name}/{part}") for part in ("state", "input", "output"))


def built(name, kind=None, registry=MODELS):
    """Return (module with the peer's weights, input, output) of a case."""
    config, state, given, expected = module_case(name)
    module = registry.build({"type": kind or name, **config})
    if registry is not TASK_UTILS:
        module.load_state_dict(state, strict=True)
        module.eval()
    return module, given, expected


def close(actual, expected, tolerance=2e-5):
    """Compare relative to the largest magnitude; integers and booleans exactly; NaN only beside NaN."""
    actual, expected = torch.as_tensor(actual).detach(), torch.as_tensor(expected)
    assert actual.shape == expected.shape
    if not expected.is_floating_point():
        assert torch.equal(actual.to(expected.dtype), expected)
        return
    assert torch.equal(actual.isnan(), expected.isnan())
    actual, expected = actual[~expected.isnan()], expected[~expected.isnan()]
    if len(expected):
        error = float((actual - expected).abs().max())
        assert error <= tolerance * max(1.0, float(expected.abs().max())), error
