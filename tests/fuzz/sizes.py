"""Random sizes of operators' arguments, which are tensors without data."""

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

small = st.integers(0, 9)
count = st.one_of(small, st.integers(1, 300), st.sampled_from([900, 1024, 4097, 30000]))
side = st.one_of(st.integers(0, 9), st.integers(1, 300), st.sampled_from([512, 1000, 2000]))
channels = st.one_of(st.integers(0, 40), st.sampled_from([32, 64, 71, 128, 140, 256, 1025]))
wide_types = st.sampled_from([torch.float32, torch.float64])
value_types = st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16])

OF_LETTERS = {"B": st.integers(0, 3), "C": channels, "G": small, "H": side, "W": side, "K": channels}
OF_LETTERS["N"] = st.one_of(count, st.sampled_from([1_000_000]))


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@st.composite
def arguments(draw: st.DrawFn, types: Any = value_types, **declared: Any) -> dict[str, Any]:
    """Return arguments of a call as they are declared, of any sizes.

    A text such as "B N 3" is a tensor of these sizes, of which equal letters are equal. Its type is one of ``types``,
    or what stands behind the sizes: int32, int64, float32, or "wide" for the one that coordinates beside values have.
    A strategy is drawn first, and may give such a text. Everything else is what it is.
    """
    dtype, letters, given = draw(types), {}, {}
    wide = torch.promote_types(dtype, torch.float32)
    named = {"wide": wide, "int32": torch.int32, "int64": torch.int64, "float32": torch.float32}
    for name, value in declared.items():
        value = draw(value) if isinstance(value, st.SearchStrategy) else value
        if isinstance(value, str) and value[0].isupper():
            words = value.split()
            dims = [word for word in words if word not in named]
            for letter in dims:
                if letter not in letters:
                    letters[letter] = int(letter) if letter.isdigit() else draw(OF_LETTERS.get(letter, count))
            value = empty(*(letters[letter] for letter in dims), dtype=named.get(words[-1], dtype))
        given[name] = value
    return given
