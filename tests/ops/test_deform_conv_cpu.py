"""What only the CPU kernels of deform_conv2d have to show: instruction sets, threads, order, memory, no stray read."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from deform_conv_cases import CASES, TOLERANCE, Case, assert_near, expect, gradient_of, run

from visdet.ops import deform_conv2d, modulated_deform_conv2d

HERE = Path(__file__).resolve().parent
LARGE = {
    "panels-in-parts": Case(B=1, C=40, M=140, H=9, W=11),
    "groups-across-lines": Case(B=1, C=60, M=84, H=9, W=5, groups=3, G=5),
    "chunks": Case(B=2, C=64, M=10, H=52, W=81),  # 2 x 4212 places, of which a backward takes 7272 at a time
}


def in_a_process(script, **environment):
    """Run Python text in a process of its own, from the folder of the repository; a crash fails the test."""
    root = HERE.parents[1]
    paths = os.pathsep.join([str(root), str(HERE), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", script],
        env={**os.environ, "PYTHONPATH": paths, **environment},
        cwd=root,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, (
        f"exit status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    )
    return done.stdout


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", LARGE)
def test_large_problems_match_the_definition(name, dtype):
    case = LARGE[name]
    tensors = case.tensors(dtype, "cpu")
    output, grads = run(case, tensors)
    expected, expected_grads = expect(case, tensors, gradient_of(output))
    for found, wanted in zip((output, *grads), (expected, *expected_grads), strict=True):
        assert_near(found, wanted, dtype)


@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_instruction_sets(isa):
    """All cases with kernels of at most this set, read once a process. The best set runs in the other tests."""
    script = f"""
import torch
from deform_conv_cases import CASES, TOLERANCE, assert_near, expect, gradient_of, run
import visdet.ops
assert torch.ops.visdet.cpu_isa() <= ("baseline", "avx2").index({isa!r})
for name, case in CASES.items():
    for dtype in TOLERANCE:
        tensors = case.tensors(dtype, "cpu")
        output, grads = run(case, tensors)
        expected, expected_grads = expect(case, tensors, gradient_of(output))
        for found, wanted in zip((output, *grads), (expected, *expected_grads), strict=True):
            assert_near(found, wanted, dtype)
print(torch.ops.visdet.cpu_isa())
"""
    in_a_process(script, VISDET_CPU_ISA=isa)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", ["two-tiles", "groups", "chunks"])
def test_threads_do_not_change_a_bit(name, dtype):
    case = {**CASES, **LARGE}[name]
    tensors, before, results = case.tensors(dtype, "cpu"), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            output, grads = run(case, tensors)
            results.append((output, *grads))
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))


def test_gradients_are_deterministic():
    """The flag changes nothing: neither who serves nor a bit, whenever it is set."""
    case = CASES["groups"]
    tensors = case.tensors(torch.float32, "cpu")
    output, grads = run(case, tensors)
    torch.use_deterministic_algorithms(True)
    try:
        again, grads_again = run(case, tensors)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(map(torch.equal, (again, *grads_again), (output, *grads)))
    leaf = tensors[0].requires_grad_()
    out = modulated_deform_conv2d(leaf, *tensors[1:], None, *case.settings[:3], 3, 2)
    torch.use_deterministic_algorithms(True)
    try:
        out.sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("server", ["visdet", "torchvision"])
def test_places_that_are_none_read_nothing(server):
    """Everywhere, or at some taps: results are the definition's, in which such a tap is nothing."""
    script = f"""
import itertools, torch
from deform_conv_cases import Case, expect, assert_near, gradient_of
from visdet.ops import _library, _torchvision, modulated_deform_conv2d
if {server!r} == "torchvision":
    _library.is_loaded = lambda name: False
    if not _torchvision.serves("cpu"):
        raise SystemExit(0)
case = Case(B=1, C=4, M=3, H=40, W=50, G=2)
for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
    for step, value in itertools.product((1, 2, 97), ("nan", "inf", "1e30")):
        x, offset, mask, weight = case.tensors(dtype, "cpu")
        offset.flatten()[::step] = float(value)
        offset.flatten()[:: 3 * step] *= -1
        leaves = [t.requires_grad_() for t in (x, offset, mask, weight)]
        output = modulated_deform_conv2d(*leaves, None, *case.settings[:3], 1, case.G)
        grads = torch.autograd.grad(output, leaves, gradient_of(output))
        wanted = expect(case, leaves, gradient_of(output))
        for found, one in zip((output.detach(), *grads), (wanted[0], *wanted[1]), strict=True):
            assert_near(found, one, dtype)
        assert not grads[1].flatten()[::step].any()
        if step == 1:
            assert not output.any()
"""
    in_a_process(script)


def test_saconv_of_any_weights():
    """A network with random weights comes to offsets that are no numbers: the deformable taps are then nothing."""
    script = """
import torch
from visdet.ops import SAConv2d
torch.manual_seed(0)
layer = SAConv2d(16, 24, 3, stride=2, padding=1, bias=False, use_deform=True)
x = torch.randn(2, 16, 33, 47, requires_grad=True)
for value in ("nan", "inf", "1e30"):
    for offsets in (layer.offset_s, layer.offset_l):
        torch.nn.init.normal_(offsets.weight)
        with torch.no_grad():
            offsets.bias[::2] = float(value)  # y of each tap
    out = layer(x)
    assert out.shape == (2, 24, 17, 24) and not out.any()
    out.sum().backward()
    assert not x.grad.isnan().any()
with torch.no_grad():
    layer.offset_s.bias.zero_()
assert layer(x).isfinite().all() and layer(x).any()
"""
    in_a_process(script)


def test_deform_roi_pool_of_any_offsets():
    """Plain torch: samples that are nowhere count nothing."""
    script = """
import torch
from visdet.ops import deform_roi_pool
x = torch.randn(2, 3, 20, 30, requires_grad=True)
rois = torch.tensor([[0.0, 1, 2, 15, 12], [1, 3, 3, 25, 18]])
expected = deform_roi_pool(x, rois, torch.zeros(2, 2, 3, 3), 3)
for value in ("nan", "inf", "-inf", "1e30"):
    offset = torch.zeros(2, 2, 3, 3)
    offset[0] = float(value)
    offset.requires_grad_()
    out = deform_roi_pool(x, rois, offset, 3)
    assert not out[0].any() and torch.equal(out[1], expected[1])
    grads = torch.autograd.grad(out.square().sum(), (x, offset))
    assert not grads[0][0].any() and grads[0][1].any() and not grads[1][0].any()
"""
    in_a_process(script)


def test_memory_is_bounded_and_inputs_are_saved():
    """Columns of this problem take 655 MB; a process holds copies of the images and a few tens of megabytes of them."""
    script = """
import resource
import torch
from visdet.ops import deform_conv2d
x, offset = torch.randn(4, 64, 160, 160), torch.randn(4, 50, 160, 160)
weight = torch.randn(8, 64, 5, 5)
leaves = [t.requires_grad_() for t in (x, offset, weight)]
deform_conv2d(x[:1, :, :8, :8], offset[:1, :, :8, :8], weight, padding=2).sum().backward()  # libraries are loaded
saved = []
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
    out = deform_conv2d(*leaves, padding=2)
assert set(saved) == {t.data_ptr() for t in leaves}
out.sum().backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""
    columns = 4 * 160 * 160 * 25 * 64 * 4 >> 20
    assert int(in_a_process(script).split()[-1]) < columns / 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_types_are_mixed_in_the_widest(dtype):
    """Nothing is rounded but the result, which has the type of the offset."""
    x, offset, mask, weight = Case().tensors(torch.float64, "cpu")
    expected = modulated_deform_conv2d(x, offset.to(dtype).double(), mask, weight, padding=1)
    found = modulated_deform_conv2d(x, offset.to(dtype), mask, weight, padding=1)
    torch.testing.assert_close(found, expected.to(dtype), rtol=0, atol=0)


@pytest.mark.parametrize("channels", [1, 16, 17])
def test_infinite_pixels_stay_where_they_are(channels):
    """Corners outside of the map are not read, so that they cannot turn 0 times infinity into NaN."""
    x = torch.full((1, channels, 3, 3), float("inf"))
    offset = torch.full((1, 2, 3, 3), -0.5)
    out = deform_conv2d(x, offset, torch.ones(1, channels, 1, 1))
    assert out.eq(float("inf")).all()
