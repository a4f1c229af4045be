"""Access to the golden vectors: inputs, weights and results of other implementations.

``tests/data`` holds small ones, which every checkout has; ``tests/make_golden.py`` makes them. A developer's checkout
may have large ones beside it, in ``../shared/data``.
"""

import functools
import io
import json
import lzma
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.testing import assert_close

OWN = Path(__file__).resolve().parent / "data"
SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


def available(*names: str) -> list[str]:
    """Return those of the golden files ``names`` that this checkout has, for a test's parameters."""
    return [name for name in names if _own_file(name).exists() or _shared_file(name).exists()]


def golden(name: str) -> dict[str, np.ndarray]:
    """Return the arrays of golden file ``name`` (without an ending).

    Of an array named ``drawn/NAME`` the file holds the shape; the numbers of NAME, from -2 to 2, are drawn.
    """
    with np.load(io.BytesIO(_content(name)), allow_pickle=False) as stored:
        arrays = dict(stored)
    for key in [key for key in arrays if key.startswith("drawn/")]:
        name, shape = key.removeprefix("drawn/"), tuple(arrays.pop(key).tolist())
        arrays[name] = 2 * drawn(name, shape)
    return arrays


@functools.lru_cache(maxsize=2)
def _content(name: str) -> bytes:
    own = _own_file(name)
    return lzma.decompress(own.read_bytes()) if own.exists() else _shared_file(name).read_bytes()


def _own_file(name: str) -> Path:
    return OWN / "golden" / f"{name}.npz.xz"


def _shared_file(name: str) -> Path:
    return SHARED / "golden" / f"{name}.npz"


@functools.cache
def _all_published_shapes() -> dict[str, dict[str, list[int]]]:
    return json.loads(lzma.decompress((OWN / "state_dicts.json.xz").read_bytes()))


def published_shapes(name: str) -> dict[str, tuple[int, ...]]:
    """Return {parameter name: shape} of a published model."""
    return {key: tuple(shape) for key, shape in _all_published_shapes()[name].items()}


def under(arrays: dict[str, np.ndarray], prefix: str) -> dict[str, torch.Tensor]:
    """Return the numeric arrays whose name starts with ``prefix``/, as tensors, by the rest of the name."""
    prefix = prefix.rstrip("/") + "/"
    return {
        key[len(prefix) :]: torch.from_numpy(array)
        for key, array in arrays.items()
        if key.startswith(prefix) and array.dtype.kind in "fiub"
    }


def drawn(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return float32 numbers from -1 to 1 in steps of 1/64 that depend on ``name`` alone.

    numpy promises that the numbers of RandomState never change, so that a file need not hold them.
    """
    numbers = np.random.RandomState(zlib.crc32(name.encode()))
    return (numbers.randint(-64, 65, size=shape) / 64).astype(np.float32)


def drawn_noise(batch_size: int, room: int, num_classes: int) -> tuple[torch.Tensor, ...]:
    """Return drawn numbers in place of random ones for the denoising queries [B, P] of ``CdnQueryGenerator``."""
    shape = (batch_size, room)
    numbers = [
        torch.from_numpy(drawn(f"noise/{i}", (batch_size, 500, 4)))[:, :room] for i in range(4)
    ]  # of each query the same, whatever the room
    label = ((numbers[1][..., 0] + 1) * 64).long() % num_classes
    return (
        (numbers[0][..., 0].reshape(shape) + 1) / 2,
        label,
        torch.where(numbers[2] < 0, -1.0, 1.0),
        (numbers[3] + 1) / 2,
    )


def golden_state(model: nn.Module, arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Return the weights of a golden model: those stored, and where the file has a ``drawn_gain`` drawn ones.

    Drawn weights are within the gain over the square root of the number of their inputs, scales of norms lie around
    one, variances above one half, and integers stay as they are. Names that stand for one tensor get the same numbers.
    """
    stored = under(arrays, "state")
    if "drawn_gain" not in arrays:
        return stored
    gain = float(arrays["drawn_gain"])
    result: dict[str, torch.Tensor] = {}
    first_names: dict[int, str] = {}
    for name, value in model.state_dict().items():
        first = first_names.setdefault(value.data_ptr(), name)
        if name in stored or not value.is_floating_point():
            result[name] = stored.get(name, value)
            continue
        numbers = torch.from_numpy(drawn(first, tuple(value.shape)))
        if name.endswith("running_var"):
            result[name] = 1 + numbers / 2
        elif value.ndim < 2:
            result[name] = numbers / 4 + (1.0 if name.endswith("weight") else 0.0)
        else:
            result[name] = gain * numbers * 2.0 ** -round(np.log2(value[0].numel()) / 2)
    return result


def close(actual, expected, tolerance: float = 1e-4) -> None:
    """Compare relative to the largest magnitude, or to 1; integers and booleans exactly; NaN only beside NaN."""
    expected = torch.as_tensor(expected)
    if expected.is_floating_point() and expected.numel():
        largest = expected.nan_to_num(0.0, 0.0, 0.0).abs().max()
        tolerance *= max(1.0, float(largest))
    else:
        tolerance = 0.0
    options = dict(rtol=0, atol=tolerance, equal_nan=True, check_dtype=False)
    assert_close(torch.as_tensor(actual).detach(), expected, **options)


def every(name: str) -> tuple[str, int]:
    """Return the parts of a golden name ``key@n``: the key, and that every n-th number is stored (1 without ``@``)."""
    key, _, step = name.partition("@")
    return key, int(step or 1)


def sampled(value: torch.Tensor, step: int) -> torch.Tensor:
    """Return every ``step``-th number of ``value``, flat; ``value`` itself for a step of one."""
    return value if step == 1 else value.reshape(-1)[::step]
