"""Inputs, gradients and tolerances for the tests of ms_deform_attn_fused."""

import pytest
import torch

from visdet.ops.ms_deform_attn import level_starts_of

DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda])]

# Largest |difference| / largest |value| against the float64 reference on the same (rounded) numbers. What is 16 bits
# wide is rounded once, to a relative 2^-11 and 2^-8 of itself.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6, torch.float16: 6e-4, torch.bfloat16: 5e-3}
# (type of value, type of offsets and logits)
TYPES = [
    (torch.float64, torch.float64),
    (torch.float32, torch.float32),
    (torch.float16, torch.float16),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
]


def make_case(
    B, Q, G, C, num_points, shapes, references=2, dtype=torch.float64, inputs=None, device="cpu", seed=0
):
    """Return the arguments; a fifth of the samples are outside. No 32-bit position is near a texel centre."""
    generator = torch.Generator().manual_seed(seed)
    level_shapes = torch.tensor(shapes, dtype=torch.int64).reshape(-1, 2)
    S, L, K = int(level_shapes.prod(1).sum()), len(shapes), sum(num_points)
    coordinates = torch.float64 if dtype == torch.float64 else torch.float32
    inputs = inputs or dtype
    value = torch.randn(B, S, G, C, generator=generator, dtype=torch.float64).to(dtype)
    reference_points = torch.rand(B, Q, L, references, generator=generator, dtype=torch.float64)
    reference_points[..., 2:] = reference_points[..., 2:] * 0.5 + 0.25
    offsets = torch.randn(B, Q, G, K, 2, generator=generator, dtype=torch.float64) * 2
    logits = torch.randn(B, Q, G, K, generator=generator, dtype=torch.float64)
    reference_points, offsets = reference_points.to(coordinates), offsets.to(inputs)
    offsets = _off_texel_centres(level_shapes, reference_points.double(), offsets, num_points)
    return (
        value.to(device),
        level_shapes,
        level_starts_of(level_shapes),
        reference_points.to(device),
        offsets.to(device),
        logits.to(inputs).to(device),
        list(num_points),
    )


def _off_texel_centres(level_shapes, references, offsets, num_points):
    """Return offsets of the same type; those that land near a texel centre, where the gradient jumps, are halved."""
    level = torch.arange(len(num_points)).repeat_interleave(torch.tensor(num_points, dtype=torch.int64))
    size = level_shapes.flip(1)[level].double()  # [K, 2]
    centre = references[:, :, level, :2].unsqueeze(2)
    scale = 1 / size
    if references.shape[-1] == 4:
        scale = (references[:, :, level, 2:] * 0.5 / torch.tensor(num_points)[level, None]).unsqueeze(2)
    for _ in range(20):
        pixel = (centre + offsets.double() * scale) * size - 0.5
        near = (pixel - pixel.round()).abs() < 0.02
        offsets = torch.where(near, offsets * 0.75 + 0.125, offsets)
    return offsets


CASES = {
    "B2-Q13-G3-C20-P4-4": (2, 13, 3, 20, [4, 4], [(7, 5), (3, 4)]),
    "B1-Q5-G1-C30-P3": (1, 5, 1, 30, [3], [(6, 9)]),
    "B3-Q17-G8-C32-P4-4-4-4": (3, 17, 8, 32, [4, 4, 4, 4], [(12, 15), (6, 8), (3, 4), (2, 2)]),
    "B2-Q40-G2-C32-P8-4-12": (2, 40, 2, 32, [8, 4, 12], [(6, 5), (1, 4), (3, 2)]),
    "B2-Q9-G2-C71-P3-6-3": (2, 9, 2, 71, [3, 6, 3], [(5, 4), (1, 7), (3, 1)]),
    "B1-Q55-G2-C64-P8-0-1": (1, 55, 2, 64, [8, 0, 1], [(6, 6), (3, 5), (2, 2)]),  # Q = S
    "B2-Q73-G3-C32-P3-6-3": (2, 73, 3, 32, [3, 6, 3], [(8, 7), (2, 7), (3, 1)]),  # Q = S
    # More samples than the CPU locates at a time, with and without room for whole registers of them.
    "B1-Q7-G2-C16-P11-11-11": (1, 7, 2, 16, [11, 11, 11], [(8, 7), (2, 7), (3, 1)]),
    "B1-Q7-G2-C16-P16-17-15": (1, 7, 2, 16, [16, 17, 15], [(8, 7), (2, 7), (3, 1)]),
    "B1-Q3-G1-C600-P1-2": (1, 3, 1, 600, [1, 2], [(4, 4), (2, 2)]),
    "B40-Q2-G1-C4-P1": (40, 2, 1, 4, [1], [(3, 3)]),
    "B1-Q4-G2-C8-P40-30-1": (1, 4, 2, 8, [40, 30, 1], [(9, 4), (4, 4), (2, 2)]),
}


def exactly(case):
    """Return the case in float64 on the CPU."""
    return [
        item.double().cpu() if isinstance(item, torch.Tensor) and item.is_floating_point() else item
        for item in case
    ]
