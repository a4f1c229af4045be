"""Inputs, gradients and tolerances for the tests of deformable_aggregation."""

import pytest
import torch

DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda])]

# Largest |difference| / largest |value| against the float64 definition on the same (rounded) features.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: 5e-3}

SHAPES = [[(7, 5), (3, 4)], [(6, 9), (2, 2)], [(5, 5), (1, 3)]]  # three cameras, two levels


def make_case(B, Q, P, G, C, shapes=SHAPES, dtype=torch.float64, device="cpu", seed=0):
    """Return features, shapes, starts, locations (a part outside), weights; off texel centres and off 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    level_shapes = torch.tensor(shapes, dtype=torch.int64)
    V, L = level_shapes.shape[:2]
    areas = level_shapes.prod(-1).flatten()
    starts = (areas.cumsum(0) - areas).view(V, L)
    coordinate_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    features = torch.randn(B, int(areas.sum()), C, generator=generator, dtype=torch.float64).to(dtype)
    locations = torch.rand(B, Q, P, V, 2, generator=generator, dtype=torch.float64) * 1.6 - 0.3
    weights = torch.randn(B, Q, P, V, L, G, generator=generator, dtype=torch.float64)
    return (
        features.to(device),
        level_shapes,
        starts,
        locations.to(coordinate_dtype).to(device),
        weights.to(coordinate_dtype).to(device),
    )


CASES = {
    "B2-Q13-P4-G2-C20": (2, 13, 4, 2, 20),
    "B1-Q5-P3-G1-C30": (1, 5, 3, 1, 30),
    "B3-Q9-P13-G8-C256": (3, 9, 13, 8, 256),
    "B2-Q3-P2-G71-C71": (2, 3, 2, 71, 71),
    "B1-Q2-P30-G5-C1025": (1, 2, 30, 5, 1025),
}
