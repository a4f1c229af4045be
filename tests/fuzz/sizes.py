"""Random sizes of operators' arguments, which are tensors without data."""

import torch
from hypothesis import strategies as st
from torch import Tensor

small = st.integers(0, 9)
count = st.one_of(small, st.integers(1, 300), st.sampled_from([900, 1024, 4097, 30000]))
side = st.one_of(st.integers(0, 9), st.integers(1, 300), st.sampled_from([512, 1000, 2000]))
channels = st.one_of(st.integers(0, 40), st.sampled_from([32, 64, 71, 128, 140, 256, 1025]))
wide_types = st.sampled_from([torch.float32, torch.float64])
value_types = st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16])


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
