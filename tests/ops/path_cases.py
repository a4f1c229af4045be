"""Sizes, devices and arguments for the tests of the paths that operators choose."""

import pytest
import torch
from hypothesis import strategies as st

from tests.fuzz.problem import FLOATING, wide_of
from visdet.ops import _library
from visdet.ops.devices import DEVICES, Device

of_two_types = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
needs_library = pytest.mark.skipif(
    not _library.is_loaded("cuda"), reason="the CUDA library, which makes the plans, is not built"
)
PYRAMID = [(100, 134), (50, 67), (25, 34), (13, 17)]  # an image of 800 x 1066 pixels at strides 8 to 64


def sizes_of(shapes, device):
    """Return (width, height) of each level as [L, 1, 2]."""
    sizes = [[(width, height)] for height, width in shapes]
    return torch.tensor(sizes, dtype=torch.float64, device=device).reshape(-1, 1, 2)


def positions(B, Q, G, P, shapes, device):
    """Return random pixel positions [B, Q, G, L, P, 2], some outside and none near a texel's centre.

    There the gradient of a location jumps, so that roundings could tell two right answers apart.
    """
    sizes = sizes_of(shapes, device)
    whole = (
        torch.rand(B, Q, G, len(shapes), P, 2, dtype=torch.float64, device=device) * (sizes + 3)
    ).floor() - 2
    return whole + 0.05 + 0.9 * torch.rand(whole.shape, dtype=torch.float64, device=device)


def attention(Q, B=2, G=8, C=32, P=4, shapes=PYRAMID, dtype=torch.float32, device="meta"):
    """Return random arguments of ms_deform_attn; Q = None: one query a texel."""
    S = sum(height * width for height, width in shapes)
    Q = S if Q is None else Q
    coordinates = wide_of(dtype)
    return {
        "value": torch.randn(B, S, G, C, device=device, dtype=dtype),
        "level_shapes": shapes,
        "level_starts": None,
        "locations": (positions(B, Q, G, P, shapes, device) + 0.5)
        .div(sizes_of(shapes, device))
        .to(coordinates),
        "weights": torch.rand(B, Q, G, len(shapes), P, device=device, dtype=coordinates),
    }


def fused(Q, B=2, G=8, C=32, P=4, shapes=PYRAMID, dtype=torch.float32, boxes=False, device="meta"):
    """Return random arguments of ms_deform_attn_fused."""
    given = attention(Q, B, G, C, P, shapes, dtype, device)
    Q, K, L = given["locations"].shape[1], len(shapes) * P, len(shapes)
    coordinates = given["locations"].dtype
    reference = torch.rand(B, Q, L, 4 if boxes else 2, device=device, dtype=coordinates)
    centers = reference[:, :, None, :, None, :2].double() * sizes_of(shapes, device) - 0.5
    offsets = (positions(B, Q, G, P, shapes, device) - centers).reshape(B, Q, G, K, 2)
    return {
        "value": given["value"],
        "level_shapes": shapes,
        "level_starts": None,
        "reference_points": reference,
        "offsets": offsets.to(coordinates),
        "logits": torch.randn(B, Q, G, K, device=device, dtype=coordinates),
        "num_points": P,
    }


devices = st.one_of(
    st.sampled_from(sorted(DEVICES)),
    st.builds(
        lambda sms, kib, threads, l2, capability: Device(
            sms, (kib - 1) << 10, kib << 10, threads, l2 << 20, capability
        ),
        st.integers(1, 300),
        st.sampled_from([64, 96, 100, 164, 228]),
        st.sampled_from([1024, 1536, 2048]),
        st.integers(0, 200),
        st.sampled_from([75, 80, 86, 89, 90, 100, 110, 120]),
    ),
)


side = st.one_of(st.integers(1, 9), st.integers(1, 700))


@st.composite
def attention_sizes(draw):
    """Sizes of ms_deform_attn from nothing to large, encoders included."""
    shapes = draw(st.lists(st.tuples(side, side), min_size=1, max_size=5))
    queries = st.one_of(st.none(), st.integers(0, 40), st.sampled_from([300, 384, 450, 900, 1000, 30000]))
    return dict(
        Q=draw(queries),
        B=draw(st.one_of(st.integers(0, 3), st.integers(1, 64))),
        G=draw(st.one_of(st.integers(0, 3), st.sampled_from([1, 2, 4, 6, 8, 12, 16, 32]))),
        C=draw(st.one_of(st.integers(0, 40), st.sampled_from([32, 64, 71, 128, 256, 1025]))),
        P=draw(st.one_of(st.integers(0, 9), st.sampled_from([4, 8, 300]))),
        shapes=shapes,
        dtype=draw(st.sampled_from(FLOATING)),
    )


@st.composite
def launches_of_attention(draw):
    return attention(**draw(attention_sizes()))


@st.composite
def launches_of_fused_attention(draw):
    return fused(**draw(attention_sizes()), boxes=draw(st.booleans()))
