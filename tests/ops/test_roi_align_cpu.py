"""The CPU kernel of roi_align: its definition, what it reads, instruction sets, threads, registration, refusals."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from visdet.ops import _library, roi_align
from visdet.ops.roi_align import roi_align_reference

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
ROOT = Path(__file__).resolve().parents[2]
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


def make(name, dtype):
    (B, C, H, W), N, settings = CASES[name]
    generator = torch.Generator().manual_seed(len(name))
    x = torch.randn(B, C, H, W, generator=generator).to(dtype)
    corner = torch.rand(N, 2, generator=generator) * torch.tensor([W + 2, H + 2]) - 2
    extent = torch.rand(N, 2, generator=generator) * torch.tensor([W, H])
    index = torch.randint(B, (N, 1), generator=generator)
    rois = torch.cat([index, torch.cat([corner, corner + extent], 1) / settings[1]], 1)
    return x, rois.to(torch.float64 if dtype == torch.float64 else torch.float32), settings


def run(x, rois, settings):
    size, scale, ratio, aligned = settings
    x = x.detach().requires_grad_()
    output = roi_align(x, rois, size, scale, ratio, "avg", aligned)
    gradient = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(x.dtype)
    return output.detach(), *torch.autograd.grad(output, x, gradient), gradient


def expect(x, rois, settings, gradient):
    size, scale, ratio, aligned = settings
    x = x.double().requires_grad_()

    output = roi_align_reference(x, rois.double(), size, scale, ratio, "avg", aligned)
    return output.detach(), *torch.autograd.grad(output, x, gradient.double())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_kernel_matches_the_definition(name, dtype):
    x, rois, settings = make(name, dtype)
    output, grad, gradient = run(x, rois, settings)
    assert output.dtype == grad.dtype == dtype and output.any()
    for found, expected in zip((output, grad), expect(x, rois, settings, gradient), strict=True):
        peak = expected.abs().max().item()
        torch.testing.assert_close(
            found.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * max(peak, 1)
        )


@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_instruction_sets(isa):
    """All cases with kernels of at most this set, read once a process. The best set runs in the other tests."""
    expected = min(torch.ops.visdet.cpu_isa(), ("baseline", "avx2").index(isa))
    script = f"""
import test_roi_align_cpu as tests, torch
assert torch.ops.visdet.cpu_isa() == {expected}
for name in tests.CASES:
    for dtype in tests.TOLERANCE:
        tests.test_kernel_matches_the_definition(name, dtype)
print("done")
"""
    paths = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": paths, "VISDET_CPU_ISA": isa, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and done.stdout.endswith("done\n"), done.stderr[-4000:]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("ratio", [0, 2])
@pytest.mark.parametrize("device", DEVICES)
def test_a_pixel_spoils_the_bins_that_sample_it_alone(device, ratio, value):
    """Pixel (0, 0) is not what samples outside of the map read."""
    x = torch.ones(1, 2, 8, 8)
    x[0, 0, 0, 0] = value
    outside = torch.tensor([[0.0, -9, -9, -3, -3], [0, 4.3, 4.3, 20.1, 20.1], [0, 0.2, 0.2, 7, 7]])
    out = roi_align(x.to(device), outside.to(device), 2, 1.0, ratio).cpu()
    assert not out[0].any() and out[1].isfinite().all() and out[1, :, 0, 0].all()
    assert out[2, 0].isfinite().tolist() == [[False, True], [True, True]] and out[2, 1].isfinite().all()


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_a_bad_gradient_spreads_to_the_pixels_of_its_bin(device, ordered):
    x = torch.ones(1, 2, 8, 8, device=device, requires_grad=True)
    rois = torch.tensor([[0.0, 1.3, 1.3, 5.3, 5.3], [0, -9, -9, -3, -3]], device=device)
    torch.use_deterministic_algorithms(ordered)
    try:
        out = roi_align(x, rois, 2, 1.0, 0)
        gradient = torch.ones_like(out)
        gradient[0, 0, 0, 0] = gradient[1] = math.nan
        out.backward(gradient)
    finally:
        torch.use_deterministic_algorithms(False)
    assert x.grad[0, 0, 1:4, 1:4].isnan().all() and x.grad[0, 0].isnan().sum() == 9
    assert x.grad[0, 1].isfinite().all()


def test_values_as_large_as_the_type_holds_do_not_overflow():
    for dtype in (torch.float32, torch.float16):
        most = torch.finfo(dtype).max
        out = roi_align(torch.full((1, 1, 9, 9), most, dtype=dtype), torch.tensor([[0.0, 1, 1, 8, 8]]), 2)
        torch.testing.assert_close(out, torch.full_like(out, most), rtol=1e-5, atol=0)


def test_gradients_numerically():
    x, rois, (size, scale, ratio, aligned) = make("B2-C3-H9-W11-N7-adaptive", torch.float64)
    function = lambda x: roi_align(x, rois, size, scale, ratio, "avg", aligned)  # noqa: E731
    assert torch.autograd.gradcheck(function, x.requires_grad_())
    (grad,) = torch.autograd.grad(function(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()


def test_torchvision_serves_where_the_library_is_missing(monkeypatch):
    pytest.importorskip("torchvision")
    x, rois, settings = make("B2-C3-H9-W11-N7-adaptive", torch.bfloat16)
    expected = run(x, rois, settings)
    monkeypatch.setattr(_library, "is_loaded", lambda name: False)
    for found, wanted in zip(run(x, rois, settings), expected, strict=True):
        torch.testing.assert_close(found, wanted)


X, ROIS = torch.zeros(2, 3, 4, 5), torch.zeros(6, 5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((X[0], ROIS, 2, 2, 1.0, 0, True), r"roi_align: input must be \[B, C, H, W\], got \[3, 4, 5\]"),
        ((X.int(), ROIS, 2, 2, 1.0, 0, True), "input must be float64, float32, float16 or bfloat16, got Int"),
        ((X, ROIS[:, 1:], 2, 2, 1.0, 0, True), r"roi_align: rois must be \[N, 5\], got \[6, 4\]"),
        (
            (X, ROIS.double(), 2, 2, 1.0, 0, True),
            "roi_align: rois must be Float for input of type Float, got Double",
        ),
        ((X, ROIS, 2, 0, 1.0, 0, True), "output_size must be positive, got 2 x 0"),
        ((X, ROIS, 2, 2, math.inf, 0, True), "spatial_scale must be positive and finite, got inf"),
        ((X, ROIS, 2, 2, -1.0, 0, True), "spatial_scale must be positive and finite, got -1"),
        ((X, ROIS, 2, 2, 1.0, 1 << 40, True), r"fewer than 2\^31 samples, got 1099511627776 for 2 x 2 bins"),
        ((X, ROIS, 2, 2, 1.0, 30000, True), r"fewer than 2\^31 samples, got 30000 for 2 x 2 bins"),
    ],
)
def test_refusals_of_the_operator(arguments, message):
    with pytest.raises(RuntimeError, match=message):
        torch.ops.visdet.roi_align(*arguments)
