"""What only the CPU kernels of deform_conv2d have to show: instruction sets, threads, order, memory, no stray read."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from deform_conv_cases import Case, assert_near, expect, gradient_of, run

from visdet.ops import deform_conv2d

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


@pytest.mark.parametrize("channels", [1, 16, 17])
def test_infinite_pixels_stay_where_they_are(channels):
    """Corners outside of the map are not read, so that they cannot turn 0 times infinity into NaN."""
    x = torch.full((1, channels, 3, 3), float("inf"))
    offset = torch.full((1, 2, 3, 3), -0.5)
    out = deform_conv2d(x, offset, torch.ones(1, channels, 1, 1))
    assert out.eq(float("inf")).all()
