"""Every operator's launches fit every GPU, whatever the sizes: without a GPU, on tensors without data."""

import re

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from path_cases import devices, needs_library

from visdet.ops import explain

small = st.integers(0, 9)
count = st.one_of(small, st.integers(1, 300), st.sampled_from([900, 1024, 4097, 30000]))
side = st.one_of(st.integers(0, 9), st.integers(1, 300), st.sampled_from([512, 1000, 2000]))
channels = st.one_of(st.integers(0, 40), st.sampled_from([32, 64, 71, 128, 140, 256, 1025]))
wide_types = st.sampled_from([torch.float32, torch.float64])
value_types = st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16])


def empty(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def coordinates(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


@st.composite
def deformable_aggregation(draw):
    B, V, L = draw(st.integers(0, 3)), draw(st.integers(1, 6)), draw(st.integers(1, 4))
    shapes = [[(draw(side) + 1, draw(side) + 1) for _ in range(L)] for _ in range(V)]
    areas = torch.tensor(shapes).prod(2).flatten()
    starts = (areas.cumsum(0) - areas).view(V, L)
    Q, P = draw(count), draw(st.one_of(small, st.sampled_from([13, 300])))
    G, group = draw(st.sampled_from([1, 2, 3, 4, 8, 12])), draw(st.sampled_from([1, 2, 3, 6, 8, 12, 32, 40]))
    dtype = draw(value_types)
    return {
        "features": empty(B, int(areas.sum()), G * group, dtype=dtype),
        "level_shapes": torch.tensor(shapes),
        "level_starts": starts,
        "locations": empty(B, Q, P, V, 2, dtype=coordinates(dtype)),
        "weights": empty(B, Q, P, V, L, G, dtype=draw(st.sampled_from([dtype, coordinates(dtype)]))),
    }


@st.composite
def deformable_aggregation_with_depth(draw):
    arguments = draw(deformable_aggregation())
    features, locations = arguments.pop("features"), arguments.pop("locations")
    depth_probs = empty(*features.shape[:2], draw(st.sampled_from([0, 1, 3, 64])), dtype=features.dtype)
    locations = empty(*locations.shape[:-1], 3, dtype=locations.dtype)
    return {"features": features, "depth_probs": depth_probs, **arguments, "locations": locations}


@st.composite
def sample_sum(draw):
    B, C, H, W = draw(st.integers(0, 3)), draw(channels), draw(side), draw(side)
    Q, D, G, dtype = draw(count), draw(count), draw(st.integers(0, 9)), draw(value_types)
    return {
        "images": empty(B, C, H, W, dtype=dtype),
        "samples": empty(B, Q, D, 2, dtype=coordinates(dtype)),
        "weights": empty(B, G, Q, D, dtype=coordinates(dtype)),
    }


@st.composite
def sample_dot(draw):
    B, C, H, W = draw(st.integers(0, 3)), draw(channels), draw(side), draw(side)
    Q, D, G, dtype = draw(count), draw(count), draw(st.integers(0, 9)), draw(value_types)
    octaves = draw(st.one_of(st.integers(0, 6), st.sampled_from([12, 28, 40, 100]))) if C else 0
    octaves = min(octaves, C // 2)
    return {
        "images": empty(B, C, H, W, dtype=dtype),
        "samples": empty(B, Q, D, 2, dtype=coordinates(dtype)),
        "queries": empty(B, G, Q, C - 2 * octaves, dtype=coordinates(dtype)),
        "depths": empty(B, Q, D, dtype=coordinates(dtype)),
        "num_octaves": octaves,
    }


@st.composite
def gaussian_field(draw):
    B, N, dtype = draw(st.one_of(count, st.sampled_from([100_000]))), draw(count), draw(wide_types)
    return {
        "points": empty(B, 3, dtype=dtype),
        "means": empty(N, 3, dtype=dtype),
        "cholesky": empty(N, 3, 3, dtype=dtype),
        "weights": empty(N, dtype=dtype),
    }


@st.composite
def mahalanobis_distance(draw):
    drawn = draw(gaussian_field())
    del drawn["weights"]
    return drawn


@st.composite
def deform_conv2d(draw):
    B, H, W = draw(st.integers(0, 3)), draw(side) + 3, draw(side) + 3
    groups, deform_groups = draw(st.sampled_from([1, 2, 32])), draw(st.sampled_from([1, 2, 4]))
    C, out = 4 * groups * draw(st.integers(1, 8)), groups * draw(st.integers(1, 8))
    dtype, k = draw(value_types), draw(st.sampled_from([1, 3]))
    return {
        "input": empty(B, C, H, W, dtype=dtype),
        "offset": empty(B, deform_groups * 2 * k * k, H, W, dtype=dtype),
        "weight": empty(out, C // groups, k, k, dtype=dtype),
        "padding": k // 2,
        "groups": groups,
        "deform_groups": deform_groups,
    }


@st.composite
def roi_pool(draw):
    return {
        "input": empty(draw(st.integers(1, 3)), draw(channels), draw(side) + 1, draw(side) + 1),
        "rois": empty(draw(count), 5),
        "output_size": draw(st.integers(1, 14)),
    }


@st.composite
def sigmoid_focal_loss(draw):
    N, C = draw(st.one_of(count, st.sampled_from([1_000_000]))), draw(channels) + 1
    return {"input": empty(N, C, dtype=draw(value_types)), "target": empty(N, dtype=torch.int64)}


@st.composite
def box_key_points(draw):
    dtype, Q, F, M = draw(wide_types), draw(count), draw(small), draw(small)
    B = draw(st.integers(0, 3))
    return {
        "anchors": empty(B, Q, 11, dtype=dtype).requires_grad_(),
        "fixed": empty(F, 3, dtype=dtype),
        "logits": empty(B, Q, 3 * M, dtype=dtype) if M else None,
    }


FAMILIES = {
    function.__name__: function
    for function in (
        box_key_points,
        deform_conv2d,
        deformable_aggregation,
        deformable_aggregation_with_depth,
        gaussian_field,
        mahalanobis_distance,
        roi_pool,
        sample_dot,
        sample_sum,
        sigmoid_focal_loss,
    )
}


@needs_library
@pytest.mark.parametrize("name", FAMILIES)
def test_launches_fit_every_device(name):
    launches = 0

    @settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(arguments=FAMILIES[name](), device=devices, deterministic=st.booleans())
    def check(arguments, device, deterministic):
        nonlocal launches
        torch.use_deterministic_algorithms(deterministic)
        try:
            plan = explain(name, **arguments, device=device)
            launches += sum(len(one.launches) for one in plan.plans)
        except (RuntimeError, ValueError) as error:
            assert re.search(r"must|at most|at the most|too large", str(error)), error
            assert "CUDA kernel" not in str(error), error
        finally:
            torch.use_deterministic_algorithms(False)

    check()
    assert launches > 0


DEFORM_CONV_CHOICES = {
    "published": (dict(C=256, groups=1, G=1), torch.float32, "packs", "packs"),
    "published-bf16": (dict(C=256, groups=1, G=4), torch.bfloat16, "packs", "packs"),
    "resnext": (dict(C=256, groups=32, G=1), torch.bfloat16, "packs", "packs"),
    "four-channels-a-group": (dict(C=32, groups=8, G=1), torch.float16, "values", "packs"),
    "odd-channels": (dict(C=30, groups=1, G=1), torch.float32, "values", "values"),
    "groups-that-cross": (dict(C=24, groups=2, G=8), torch.float32, "values", "values"),
    "float64": (dict(C=256, groups=1, G=1), torch.float64, "values", "values"),
}


@needs_library
@pytest.mark.parametrize("name", DEFORM_CONV_CHOICES)
def test_choices_of_deform_conv2d(name):
    sizes, dtype, forward, backward = DEFORM_CONV_CHOICES[name]
    C, groups, G = sizes["C"], sizes["groups"], sizes["G"]
    plan = explain(
        "deform_conv2d",
        input=empty(2, C, 50, 68, dtype=dtype),
        offset=empty(2, G * 18, 50, 68, dtype=dtype),
        weight=empty(2 * groups, C // groups, 3, 3, dtype=dtype),
        padding=1,
        groups=groups,
        deform_groups=G,
        device="H200",
    )
    assert plan.paths() == {"deform_conv2d": forward, "deform_conv2d_backward": backward}
