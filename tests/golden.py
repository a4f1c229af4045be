"""Access to the golden vectors: peers' inputs, weights and results, kept beside a developer's checkout."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


def golden(name: str) -> dict[str, np.ndarray]:
    """Return the arrays of golden file ``name`` (without ``.npz``), or skip where the file is absent."""
    path = SHARED / "golden" / f"{name}.npz"
    if not path.exists():
        pytest.skip(f"golden vectors are not part of a user's clone: no ../shared/data/golden/{name}.npz")
    with np.load(path, allow_pickle=False) as arrays:
        return dict(arrays)


def published_shapes(name: str) -> dict[str, tuple[int, ...]]:
    """Return {parameter name: shape} of a published model, or skip the test where the list is absent."""
    path = SHARED / "state_dicts" / f"{name}.json"
    if not path.exists():
        pytest.skip(
            f"state-dict lists are not part of a user's clone: no ../shared/data/state_dicts/{name}.json"
        )
    return {key: tuple(shape) for key, shape in json.loads(path.read_text()).items()}


def under(arrays: dict[str, np.ndarray], prefix: str) -> dict[str, torch.Tensor]:
    """Return the numeric arrays whose name starts with ``prefix``/, as tensors, by the rest of the name."""
    prefix = prefix.rstrip("/") + "/"
    return {
        key[len(prefix) :]: torch.from_numpy(array)
        for key, array in arrays.items()
        if key.startswith(prefix) and array.dtype.kind in "fiub"
    }
