"""Inputs, gradients and tolerances for the tests of Gaussian fields."""

import pytest
import torch

from visdet.ops import (
    gaussian_field,
    gaussian_field_reference,
    mahalanobis_distance,
    mahalanobis_distance_reference,
)

DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda])]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}
OPS = {
    "distance": (mahalanobis_distance, mahalanobis_distance_reference),
    "field": (gaussian_field, gaussian_field_reference),
}


def make_case(B, N, dtype=torch.float64, device="cpu", seed=0, spread=1.0, size=0.6):
    """Return points, means, cholesky, weights."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    factors = (size * 0.3 * draw(N, 3, 3)).tril(-1) + torch.diag_embed(size * (0.6 + draw(N, 3).sigmoid()))
    tensors = (draw(B, 3) * spread, draw(N, 3) * spread, factors, draw(N))
    return [tensor.to(dtype).to(device) for tensor in tensors]


def arguments_of(name, case):
    return case if name == "field" else case[:3]


def grad_shape(name, B, N):
    return (B,) if name == "field" else (B, N)
