"""Paths of aggregation, Gaussians and box points on which GPU: without a GPU."""

import pytest
import torch
from calls import in_order
from path_cases import needs_library

from tests.fuzz.problem import wide_of
from tests.fuzz.sampling import starts_of
from visdet.ops import explain

CAMERAS = 6


def tables(V, L, H=16, W=44):
    """Return level_shapes and level_starts of V cameras, each level half the size of the one before."""
    shapes = torch.tensor([[[max(H >> l, 1), max(W >> l, 1)] for l in range(L)]] * V, dtype=torch.int64)
    shapes = shapes.view(V, L, 2)
    return shapes, *starts_of(shapes)


def aggregation(B=1, Q=900, P=13, V=CAMERAS, L=4, G=8, C=256, dtype=torch.float32, offset=0, on_device=False):
    """Return arguments of deformable_aggregation without data; features with an offset lie so far into memory."""
    shapes, starts, S = tables(V, L)
    if on_device:
        shapes, starts = shapes.to("meta"), starts.to("meta")
    memory = torch.empty(B * S * C + offset, dtype=dtype, device="cpu" if offset else "meta")
    wide = wide_of(dtype)
    return {
        "features": memory[offset:].view(B, S, C),
        "level_shapes": shapes,
        "level_starts": starts,
        "locations": torch.empty(B, Q, P, V, 2, dtype=wide, device="meta"),
        "weights": torch.empty(B, Q, P, V, L, G, dtype=wide, device="meta"),
    }


def gaussians(B, N, dtype=torch.float32):
    """Return arguments of gaussian_field without data; the first three are those of mahalanobis_distance."""
    return [torch.empty(*sizes, dtype=dtype, device="meta") for sizes in ((B, 3), (N, 3), (N, 3, 3), (N,))]


AGGREGATION_CHOICES = {
    "published": (dict(), "packs", "packs"),
    "published-bf16": (dict(dtype=torch.bfloat16), "packs", "packs"),
    "published-float64": (dict(dtype=torch.float64), "single_values", "single_values"),
    "three-packs-a-group": (dict(G=4, C=48), "packs", "packs"),
    "groups-of-5": (dict(G=8, C=40), "single_values", "single_values"),
    "packs-a-lane-holds": (dict(G=32, C=256), "packs", "packs"),
    "more-than-a-lane-holds": (dict(G=8, C=512), "packs", "single_values"),
    "more-than-a-lane-holds-bf16": (dict(G=8, C=512, dtype=torch.bfloat16), "packs", "single_values"),
    "one-group-of-many-channels": (dict(G=1, C=256), "packs", "single_values"),
    "odd-address": (dict(offset=1), "single_values", "single_values"),
}


@needs_library
@pytest.mark.parametrize("device", ["H200", "L4", "T4"])
@pytest.mark.parametrize("name", AGGREGATION_CHOICES)
def test_choices_of_deformable_aggregation(name, device):
    sizes, forward, backward = AGGREGATION_CHOICES[name]
    plan = explain("deformable_aggregation", **aggregation(**sizes), device=device)
    assert plan.paths() == {"deformable_aggregation": forward, "deformable_aggregation_backward": backward}


@needs_library
def test_only_the_deterministic_mode_sorts_cells():
    for deterministic in (False, True):
        with in_order(deterministic):
            backward = explain("deformable_aggregation", **aggregation(), device="H200").plans[-1]
        assert ("order_kernel" in [launch.kernel for launch in backward.launches]) == deterministic


@needs_library
def test_tables_on_the_device_are_read_by_a_kernel():
    forward = explain("deformable_aggregation", **aggregation(on_device=True), device="H200").plans[0]
    assert [launch.kernel for launch in forward.launches] == ["maps_kernel", "forward_kernel"]


@needs_library
@pytest.mark.parametrize(
    "B, N, dtype, tolerance, forward, backward",
    [
        (500, 1000, torch.float32, 0.0, "one_point", "one_point"),
        (100_000, 10_000, torch.float32, 0.0, "many_points", "one_point"),
        (100_000, 10_000, torch.float64, 0.0, "one_point", "one_point"),
        (100_000, 10_000, torch.float32, 1e-3, "culled", "culled"),
        (100_000, 10_000, torch.float64, 1e-3, "one_point", "one_point"),
    ],
)
def test_choices_of_gaussian_field(B, N, dtype, tolerance, forward, backward):
    plan = explain("gaussian_field", *gaussians(B, N, dtype), tolerance, device="H200")
    assert plan.paths() == {"gaussian_field": forward, "gaussian_field_backward": backward}
