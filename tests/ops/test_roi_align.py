"""roi_align on all devices beside its definition, and roi_align_rotated, which shares its kernels."""

import math

import pytest
import torch
from calls import assert_matches, gradients, in_a_process, in_order, refusals
from torch.testing import assert_close

from tests.fuzz.problem import generator_of, wide_of
from visdet.ops import roi_align, roi_align_rotated
from visdet.ops.roi_align import roi_align_reference
from visdet.ops.roi_align_rotated import roi_align_rotated_reference

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# Shapes [B, C, H, W], regions, and (output size, spatial scale, sampling ratio, aligned).
CASES = {
    "B2-C3-H9-W11-N7-adaptive": ((2, 3, 9, 11), 7, ((3, 2), 0.7, 0, True)),
    "B2-C3-H9-W11-N7-shifted": ((2, 3, 9, 11), 7, ((3, 2), 0.7, 0, False)),
    "B1-C37-H40-W50-N60-one-window": ((1, 37, 40, 50), 60, ((7, 7), 1.0, 0, True)),
    "B3-C17-H40-W50-N2-own-windows": ((3, 17, 40, 50), 2, ((4, 3), 1.0, 2, True)),
    "B1-C5-H60-W70-N3-sparse-samples": ((1, 5, 60, 70), 3, ((1, 2), 1.0, 3, False)),
    "B1-C2-H1-W1-N5-one-pixel": ((1, 2, 1, 1), 5, ((2, 2), 1.0, 2, True)),
    "B2-C20-H13-W8-N9-many-bins": ((2, 20, 13, 8), 9, ((14, 13), 1.0, 0, True)),
}
CASES_OF_CUDA = {
    **CASES,
    "B1-C67-H40-W50-N60-odd-channels": ((1, 67, 40, 50), 60, ((7, 7), 1.0, 0, True)),
    "B1-C130-H40-W50-N9-two-slabs": ((1, 130, 40, 50), 9, ((7, 7), 1.0, 2, True)),
    "B3-C17-H90-W70-N20-sparse-samples": ((3, 17, 90, 70), 20, ((4, 3), 1.0, 2, True)),
    "B1-C3-H1-W300-N9-wider-than-a-window": ((1, 3, 1, 300), 9, ((2, 5), 1.0, 0, True)),
    "B1-C3-H200-W310-N9-some-windows": ((1, 3, 200, 310), 9, ((7, 7), 1.0, 0, True)),
    "B2-C5-H50-W60-N9-groups-of-rows": ((2, 5, 50, 60), 9, ((32, 32), 1.0, 0, True)),
    "B2-C5-H20-W30-N9-more-bins-than-lanes": ((2, 5, 20, 30), 9, ((40, 3), 1.0, 0, True)),
}


def make(name, dtype, turned=False, device="cpu"):
    (B, C, H, W), N, settings = CASES_OF_CUDA[name]
    generator = generator_of(len(name))
    x = torch.randn(B, C, H, W, generator=generator).to(dtype)
    corner = torch.rand(N, 2, generator=generator) * torch.tensor([W + 2, H + 2]) - 2
    extent = torch.rand(N, 2, generator=generator) * torch.tensor([W, H])
    if N > 2:
        extent[-1] *= 0.05
    index = torch.randint(B, (N, 1), generator=generator)
    if turned:
        boxes = torch.cat([corner, extent], 1) / settings[1]
        numbers = [index, boxes, torch.rand(N, 1, generator=generator) * 14 - 7]
    else:
        if N > 2:
            corner[0], extent[0] = 1.0, -0.4  # backwards: nothing, or samples that go back
        numbers = [index, torch.cat([corner, corner + extent], 1) / settings[1]]
    rois = torch.cat(numbers, 1).to(wide_of(dtype))
    return x.to(device), rois.to(device), *settings


def upright(function, mode="avg"):
    return lambda x, rois, size, scale, ratio, aligned: function(x, rois, size, scale, ratio, mode, aligned)


def compare(turned, name, dtype, device, mode="avg"):
    case = make(name, dtype, turned, device)
    function, reference = (
        (roi_align_rotated, roi_align_rotated_reference)
        if turned
        else (upright(roi_align, mode), upright(roi_align_reference, mode))
    )
    assert_matches(function, reference, case, TOLERANCE[dtype], of=[0])
    output, (grad,) = gradients(function, case, of=[0])
    assert turned or output.any()
    return grad


of_all_types = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


@of_all_types
@pytest.mark.parametrize("name", CASES)
def test_the_cpu_kernels_match_the_definitions(name, dtype):
    compare(False, name, dtype, "cpu")
    compare(True, name, dtype, "cpu")
    compare(False, name, dtype, "cpu", "max")


@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_instruction_sets(isa):
    """All cases with kernels of at most this set, read once a process. The best set runs in the other tests."""
    expected = min(torch.ops.visdet.cpu_isa(), ("baseline", "avx2").index(isa))
    script = f"""
import test_roi_align as tests, torch
assert torch.ops.visdet.cpu_isa() == {expected}
for name in tests.CASES:
    for dtype in tests.TOLERANCE:
        tests.test_the_cpu_kernels_match_the_definitions(name, dtype)
"""
    in_a_process(script, VISDET_CPU_ISA=isa)


upright_and_rotated = pytest.mark.parametrize("turned", [False, True], ids=["upright", "rotated"])


on_cases_of_cuda = pytest.mark.parametrize("name", CASES_OF_CUDA)


@pytest.mark.cuda
@of_all_types
@on_cases_of_cuda
@upright_and_rotated
def test_the_cuda_kernels_match_the_definitions(turned, name, dtype):
    compare(turned, name, dtype, "cuda")


@pytest.mark.cuda
@of_all_types
@on_cases_of_cuda
@upright_and_rotated
@in_order()
def test_gradients_in_order(turned, name, dtype):
    first = compare(turned, name, dtype, "cuda")
    assert all(torch.equal(compare(turned, name, dtype, "cuda"), first) for _ in range(2))


@pytest.mark.parametrize("scale", [1e-40, 1e-20, 1.0, 1e30])
@in_order()
def test_gradients_in_order_of_any_size(scale, device):
    case = make("B2-C3-H9-W11-N7-adaptive", torch.float64, False, device)
    output = roi_align_reference(*case[:-1], aligned=case[-1])
    gradient = torch.randn(output.shape, generator=generator_of(1)).to(output)
    _, expected = gradients(upright(roi_align_reference), case, gradient, of=[0])
    _, (found,) = gradients(upright(roi_align), case, gradient * scale, of=[0])
    assert_close(found / scale, expected[0], rtol=1e-10, atol=1e-10)
    gradient[output[:, 1, 0, 0].abs().argmax(), 1, 0, 0] = math.nan
    _, (found,) = gradients(upright(roi_align), case, gradient, of=[0])
    assert found.isnan().flatten(2).any(2).sum() == 1


@upright_and_rotated
def test_regions_that_count_for_nothing(turned, device):
    x, rois, *settings = make("B2-C3-H9-W11-N7-adaptive", torch.float32, turned, device)
    bad = rois[[1] * 6].clone()
    bad[0, 0], bad[1, 0], bad[2, 0], bad[3, 0] = -1, 2, 0.5, math.nan
    bad[4, 2], bad[5, -1] = math.nan, math.nan
    if turned:
        bad[5, -1] = math.inf
    huge = rois[[1] * 3].clone()
    huge[0, 3], huge[1, 1:5], huge[2, 1:3] = 1e30, math.inf, -1e9
    function = roi_align_rotated if turned else upright(roi_align)
    reference = roi_align_rotated_reference if turned else upright(roi_align_reference)
    case = x, torch.cat([bad, huge]), *settings
    found, expected = (gradients(one, case, of=[0]) for one in (function, reference))
    assert not found[0][:6].any()
    assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("ratio", [0, 2])
def test_a_pixel_spoils_the_bins_that_sample_it_alone(device, ratio, value):
    """Pixel (0, 0) is not what samples outside of the map read."""
    x = torch.ones(1, 2, 8, 8)
    x[0, 0, 0, 0] = value
    outside = torch.tensor([[0.0, -9, -9, -3, -3], [0, 4.3, 4.3, 20.1, 20.1], [0, 0.2, 0.2, 7, 7]])
    out = roi_align(x.to(device), outside.to(device), 2, 1.0, ratio).cpu()
    assert not out[0].any() and out[1].isfinite().all() and out[1, :, 0, 0].all()
    assert out[2, 0].isfinite().tolist() == [[False, True], [True, True]] and out[2, 1].isfinite().all()


@pytest.mark.parametrize("ordered", [False, True])
def test_a_bad_gradient_spreads_to_the_pixels_of_its_bin(device, ordered):
    x = torch.ones(1, 2, 8, 8, device=device, requires_grad=True)
    rois = torch.tensor([[0.0, 1.3, 1.3, 5.3, 5.3], [0, -9, -9, -3, -3]], device=device)
    with in_order(ordered):
        out = roi_align(x, rois, 2, 1.0, 0)
        gradient = torch.ones_like(out)
        gradient[0, 0, 0, 0] = gradient[1] = math.nan
        out.backward(gradient)
    assert x.grad[0, 0, 1:4, 1:4].isnan().all() and x.grad[0, 0].isnan().sum() == 9
    assert x.grad[0, 1].isfinite().all()


def test_values_as_large_as_the_type_holds_do_not_overflow():
    for dtype in (torch.float32, torch.float16):
        most = torch.finfo(dtype).max
        out = roi_align(torch.full((1, 1, 9, 9), most, dtype=dtype), torch.tensor([[0.0, 1, 1, 8, 8]]), 2)
        assert_close(out, torch.full_like(out, most), rtol=1e-5, atol=0)


@pytest.mark.cuda
@pytest.mark.slow
def test_an_output_of_more_than_2_31_numbers():
    N = 172_000
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("it needs 24 GiB of memory")
    x = torch.randn(1, 256, 20, 30, device="cuda", dtype=torch.float16)
    rois = torch.tensor([[0, 1.0, 2, 20, 15]], device="cuda").expand(N, 5)
    output = roi_align(x, rois, 7)
    assert output.numel() > 1 << 31
    one = roi_align(x, rois[:1], 7)[0]
    assert one.any() and torch.equal(output[-1], one) and torch.equal(output[N // 2], one)


X, ROIS = torch.zeros(2, 3, 4, 5), torch.zeros(6, 5)


REFUSED = refusals(
    torch.ops.visdet.roi_align,
    (X, ROIS, 2, 2, 1.0, 0, True),
    (0, X[0], r"roi_align: input must be \[B, C, H, W\], got \[3, 4, 5\]"),
    (0, X.int(), "input must be float64, float32, float16 or bfloat16, got Int"),
    (1, ROIS[:, 1:], r"roi_align: rois must be \[N, 5\] or \[N, 6\], got \[6, 4\]"),
    (1, ROIS.double(), "roi_align: rois must be Float for input of type Float, got Double"),
    (3, 0, "output_size must be positive, got 2 x 0"),
    (4, math.inf, "spatial_scale must be positive and finite, got inf"),
    (4, -1.0, "spatial_scale must be positive and finite, got -1"),
    (5, 1 << 40, r"fewer than 2\^31 samples, got 1099511627776 for 2 x 2 bins"),
    (5, 30000, r"fewer than 2\^31 samples, got 30000 for 2 x 2 bins"),
)
