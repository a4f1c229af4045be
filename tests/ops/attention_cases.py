"""Inputs, gradients and tolerances for the tests of ms_deform_attn."""

import pytest
import torch

from visdet.ops import ms_deform_attn
from visdet.ops.ms_deform_attn import level_starts_of

DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda])]

# Largest |difference| / largest |value| of the output against the float64 reference on the same (rounded)
# values. The 16-bit outputs are rounded once, to a relative 2^-11 and 2^-8 of themselves; gradients of
# value likewise.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: 5e-3}


def make_case(B, Q, G, C, P, shapes, dtype=torch.float64, device="cpu", seed=0, spread=0.15):
    """Return value, shapes, starts, locations (some outside), weights; positions keep off texel centres."""
    generator = torch.Generator().manual_seed(seed)
    level_shapes = torch.tensor(shapes, dtype=torch.int64).reshape(-1, 2)
    S, L = int(level_shapes.prod(1).sum()), len(shapes)
    coordinate_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    value = torch.randn(B, S, G, C, generator=generator, dtype=torch.float64).to(dtype)
    locations = (
        torch.rand(B, Q, G, L, P, 2, generator=generator, dtype=torch.float64) * (1 + 2 * spread) - spread
    )
    size = level_shapes.flip(1)[None, None, None, :, None].double()
    pixels = locations * size - 0.5
    fraction = pixels - pixels.floor()
    locations = (pixels.floor() + fraction.clamp(0.05, 0.95) + 0.5) / size
    weights = torch.randn(B, Q, G, L, P, generator=generator, dtype=torch.float64)
    return (
        value.to(device),
        level_shapes,
        level_starts_of(level_shapes),
        locations.to(coordinate_dtype).to(device),
        weights.to(coordinate_dtype).to(device),
    )


CASES = {
    "B2-Q13-G3-C20-P4-L2": (2, 13, 3, 20, 4, [(7, 5), (3, 4)]),
    "B1-Q5-G1-C30-P3-L1": (1, 5, 1, 30, 3, [(6, 9)]),
    "B3-Q17-G8-C32-P4-L4": (3, 17, 8, 32, 4, [(12, 15), (6, 8), (3, 4), (2, 2)]),
    "B2-Q9-G2-C71-P5-L3": (2, 9, 2, 71, 5, [(5, 4), (1, 7), (3, 1)]),
    "B1-Q33-G2-C64-P8-L3": (1, 33, 2, 64, 8, [(8, 8), (4, 5), (2, 3)]),
    "B1-Q3-G1-C1025-P1-L2": (1, 3, 1, 1025, 1, [(4, 4), (2, 2)]),
    "B2-Q3-G3-C20-P2-L2": (2, 3, 3, 20, 2, [(7, 5), (3, 4)]),  # fewer samples than texels
    "B65-Q2-G1-C4-P1-L1": (65, 2, 1, 4, 1, [(3, 3)]),
    "B1-Q4-G2-C8-P30-L3": (1, 4, 2, 8, 30, [(9, 4), (4, 4), (2, 2)]),
}


def output_of(case):
    with torch.no_grad():
        return ms_deform_attn(*case)
