"""The names that a pickle of numpy's arrays and scalars contains, for readers that refuse all other names."""

import codecs
from typing import Any

import numpy as np

__all__ = ["NUMPY_GLOBALS"]

_scalar = np.float64(0).__reduce__()[0]
_reconstruct = np.zeros(1).__reduce__()[0]
_frombuffer = np.zeros(1).__reduce_ex__(5)[0]

# The keys are (module, name) as in the pickle. numpy 2 renamed its package ``core`` to ``_core``.
NUMPY_GLOBALS: dict[tuple[str, str], Any] = {
    ("numpy", "dtype"): np.dtype,
    ("numpy", "ndarray"): np.ndarray,
    ("_codecs", "encode"): codecs.encode,
    **{(f"numpy.{core}.multiarray", "scalar"): _scalar for core in ("core", "_core")},
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _reconstruct for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _frombuffer for core in ("core", "_core")},
}
