"""deformable_aggregation on group sizes that fill no power of two of lanes, and on other uncommon shapes."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from aggregation_cases import DEVICES, TOLERANCE, make_case
from calls import gradients, relative_error

from visdet.ops import deformable_aggregation, deformable_aggregation_reference
from visdet.ops.explain import choose_only

SHAPES = [[(6, 9), (3, 5)], [(7, 9), (4, 5)], [(6, 9), (3, 5)]]  # three cameras, the second with a row more
NUM_GROUPS = (1, 2, 4, 9, 35)  # one round of a warp's lanes over the groups, and several


def assert_matches_reference(case, tolerance_of_coordinates):
    dtype = case[0].dtype
    exact = [tensor.double().cpu() if tensor.is_floating_point() else tensor for tensor in case]
    B, C, Q = case[0].shape[0], case[0].shape[2], case[3].shape[1]
    grad_output = torch.randn(B, Q, C, generator=torch.Generator().manual_seed(1)).to(dtype)
    output, grads = gradients(deformable_aggregation, case, grad_output)
    expected, expected_grads = gradients(deformable_aggregation_reference, exact, grad_output.double())
    assert relative_error(output, expected) < TOLERANCE[dtype]
    tolerances = (TOLERANCE[dtype], tolerance_of_coordinates, tolerance_of_coordinates)
    for name, grad, wanted, tolerance in zip(
        ("features", "locations", "weights"), grads, expected_grads, tolerances, strict=True
    ):
        assert relative_error(grad, wanted) < tolerance, f"the gradient of {name}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("channels", range(1, 41))
def test_any_number_of_channels_a_group(channels, dtype, device):
    for G in NUM_GROUPS if device == "cuda" else NUM_GROUPS[:3]:
        case = make_case(2, 7, 5, G, G * channels, SHAPES, dtype=dtype, device=device)
        assert_matches_reference(case, 1e-12 if dtype == torch.float64 else 2e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("G, C", [(1, 48), (1, 96), (1, 130), (2, 192), (3, 399), (4, 288), (8, 1032)])
def test_groups_of_many_channels(G, C, dtype, device):
    case = make_case(2, 7, 5, G, C, SHAPES, dtype=dtype, device=device)
    assert_matches_reference(case, 1e-12 if dtype == torch.float64 else 2e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("B, Q, P, V, L, G, C", [(2, 7, 5, 3, 2, 4, 24), (2, 23, 7, 6, 3, 2, 12)])
def test_six_channels_a_group_in_float64(B, Q, P, V, L, G, C, device):
    shapes = [[(6 + v % 2, 9), (3 + v % 2, 5), (2, 3)][:L] for v in range(V)]
    assert_matches_reference(make_case(B, Q, P, G, C, shapes, device=device), 1e-12)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    "channels, dtype", [(6, torch.float64), (12, torch.float32), (24, torch.bfloat16)], ids=str
)
def test_bad_channel_stays_in_its_group(channels, dtype, bad, device):
    features, shapes, starts, locations, weights = make_case(
        1, 5, 3, 3, 3 * channels, dtype=dtype, device=device
    )
    locations = locations * 0.4 + 0.3  # visible, every one
    grad_output = torch.ones(1, 5, 3 * channels)
    expected, expected_grads = gradients(
        deformable_aggregation, (features, shapes, starts, locations, weights), grad_output
    )
    features[:, :, 0] = bad
    output, grads = gradients(
        deformable_aggregation, (features, shapes, starts, locations, weights), grad_output
    )
    assert not output[..., 0].isfinite().any() and torch.equal(output[..., 1:], expected[..., 1:])
    assert not grads[2][..., 0].isfinite().any() and torch.equal(
        grads[2][..., 1:], expected_grads[2][..., 1:]
    )


def run(case, grad_output, deterministic=False):
    """Return the output and the gradients of the operators themselves, which copy no argument beforehand."""
    ops = torch.ops.visdet
    output = ops.deformable_aggregation.default(*case)
    return output, *ops.deformable_aggregation_backward.default(grad_output, *case, deterministic)


PATHS = {
    "deformable_aggregation": ("packs", "single_values"),
    "deformable_aggregation_backward": ("packs", "single_values"),
}


@pytest.mark.cuda
@pytest.mark.parametrize(
    "op, path, dtype",
    [
        (op, path, dtype)
        for op, paths in PATHS.items()
        for path in paths
        for dtype in TOLERANCE
        if dtype != torch.float64 or path == "single_values"  # the only path of float64
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "G, C", [(4, 96), (16, 256), (5, 120)]
)  # three packs of 16 bits a group, two packs of float32 a lane, idle lanes
def test_every_path_gives_the_same(G, C, op, path, dtype):
    case = make_case(2, 7, 5, G, C, SHAPES, dtype=dtype, device="cuda")
    grad_output = torch.randn(2, 7, C, generator=torch.Generator().manual_seed(1)).to(dtype).cuda()
    exact = [tensor.double() if tensor.is_floating_point() else tensor for tensor in case]
    expected, expected_grads = gradients(deformable_aggregation_reference, exact, grad_output.double())
    with choose_only(op, path):
        results = run(case, grad_output)
    wide = 1e-12 if dtype == torch.float64 else 2e-5
    tolerances = (TOLERANCE[dtype], TOLERANCE[dtype], wide, wide)
    for result, wanted, tolerance in zip(results, (expected, *expected_grads), tolerances, strict=True):
        assert relative_error(result, wanted) < tolerance


@pytest.mark.cuda
def test_so_many_groups_and_levels_are_refused():
    G = 1 << 21
    features, zero = torch.zeros(1, device="cuda").expand(1, 4, G), torch.zeros(1, device="cuda")
    weights = zero.expand(1, 1, 1, 1, 1, G)
    with pytest.raises(RuntimeError, match=r"L \* G must be under 2.21 on CUDA, got 1 \* 2097152"):
        deformable_aggregation(features, [[(2, 2)]], [[0]], zero.expand(1, 1, 1, 1, 2), weights)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sizes", [(0, 2), (3, 0), (0, 0)], ids=lambda sizes: f"V{sizes[0]}-L{sizes[1]}")
def test_no_cameras_or_no_levels(sizes, device):
    V, L = sizes
    case = (
        torch.ones(2, 6, 8, device=device),
        torch.ones(V, L, 2, dtype=torch.int64),
        torch.zeros(V, L, dtype=torch.int64),
        torch.full((2, 5, 3, V, 2), 0.5, device=device),
        torch.ones(2, 5, 3, V, L, 4, device=device),
    )
    output, grads = gradients(deformable_aggregation, case, torch.ones(2, 5, 8))
    assert output.shape == (2, 5, 8) and not output.any()
    assert all(
        grad.shape == case[i].shape and not grad.any() for i, grad in zip((0, 3, 4), grads, strict=True)
    )


@pytest.mark.parametrize("device", DEVICES)
def test_no_rows_of_features(device):
    case = (
        torch.ones(2, 0, 8, device=device),
        torch.ones(0, 0, 2, dtype=torch.int64),
        torch.zeros(0, 0, dtype=torch.int64),
        torch.full((2, 5, 3, 0, 2), 0.5, device=device),
        torch.ones(2, 5, 3, 0, 0, 4, device=device),
    )
    output, grads = gradients(deformable_aggregation, case, torch.ones(2, 5, 8))
    assert output.shape == (2, 5, 8) and not output.any() and grads[0].shape == (2, 0, 8)


def samples_on_a_map(Q, P, spread, C=8, size=(9, 9)):
    """Return a case on the GPU: one camera, one map, and Q * P samples within `spread` of its middle.

    No sample lies between two cells, where the gradient of its location jumps and float32 may take the other side.
    """
    features, shapes, starts, locations, weights = make_case(
        1, Q, P, 2, C, [[size]], dtype=torch.float32, device="cuda"
    )
    drawn = torch.rand(locations.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    pixels = (drawn * spread + (0.5 - spread / 2)) * torch.tensor(size[::-1]) - 0.5
    pixels = pixels.floor() + pixels.frac().abs().clamp(0.01, 0.99)
    locations = ((pixels + 0.5) / torch.tensor(size[::-1])).to(locations)
    return features, shapes, starts, locations, weights


@pytest.mark.cuda
@pytest.mark.parametrize("spread", [0.01, 0.99], ids=["one-cell", "all-cells"])
def test_sum_of_samples_far_apart_is_deterministic(spread):
    # The samples of a cell have numbers up to 300 000: more than are sorted with a few bitmaps.
    case = samples_on_a_map(3000, 100, spread)
    grad_output = torch.randn(1, 3000, 8, generator=torch.Generator().manual_seed(1)).cuda()
    runs = [run(case, grad_output, deterministic=True) for _ in range(3)]
    for other in runs[1:]:
        assert all(torch.equal(*pair) for pair in zip(other, runs[0], strict=True))
    exact = [tensor.double() if tensor.is_floating_point() else tensor for tensor in case]
    expected, expected_grads = gradients(deformable_aggregation_reference, exact, grad_output.double())
    assert relative_error(runs[0][0], expected) < 1e-4
    for grad, wanted in zip(runs[0][1:], expected_grads, strict=True):
        assert relative_error(grad, wanted) < 1e-4


@pytest.mark.cuda
@pytest.mark.parametrize("deterministic", [False, True])
def test_time_for_samples_in_one_cell_grows_with_their_number(deterministic):
    def milliseconds(Q):
        case = samples_on_a_map(Q, 64, 0.01)
        grad_output = torch.ones(1, Q, 8, device="cuda")
        run(case, grad_output, deterministic)
        times = []
        for _ in range(3):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run(case, grad_output, deterministic)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return min(times)

    # Eight times as many samples take some eight times as long, not sixty-four times.
    assert milliseconds(1 << 15) < 24 * milliseconds(1 << 12)


@pytest.mark.cuda
def test_tables_on_a_gpu_for_features_on_the_cpu_are_refused():
    case = make_case(2, 5, 3, 2, 4, dtype=torch.float32)
    with pytest.raises(RuntimeError, match="must be on the CPU or on the device of features"):
        torch.ops.visdet.deformable_aggregation.default(case[0], case[1].cuda(), case[2].cuda(), *case[3:])


STRAY_TABLES = """
import sys
sys.path[:0] = sys.argv[1:]
import torch
from aggregation_cases import make_case
import visdet.ops
case = make_case(2, 5, 3, 2, 8, dtype=torch.float32, device="cuda")
for shape, start in ((1, 2**63 - 1), (2**62, 0), (2**31, 2**31), (-1, 0), (0, 0), (3, -(2**63))):
    shapes, starts = torch.full_like(case[1], shape).cuda(), torch.full_like(case[2], start).cuda()
    output = torch.ops.visdet.deformable_aggregation.default(case[0], shapes, starts, *case[3:])
    torch.ops.visdet.deformable_aggregation_backward.default(
        torch.ones_like(output), case[0], shapes, starts, *case[3:], True
    )
    torch.cuda.synchronize()
    assert output.isnan().any(), (shape, start)
"""


@pytest.mark.cuda
def test_tables_on_the_device_with_any_numbers_lead_to_no_stray_access():
    tests = Path(__file__).resolve().parent
    command = [sys.executable, "-c", STRAY_TABLES, str(tests), str(tests.parent)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
