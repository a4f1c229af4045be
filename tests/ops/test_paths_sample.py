"""How sample_sum and sample_dot copy NCHW images and read the copies: in runs that the second-level cache holds."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from path_cases import needs_library, of_two_types

from visdet.ops import explain, sample_dot, sample_sum
from visdet.ops.devices import DEVICES, present_device
from visdet.ops.explain import choose_for

PASSES = {"sample_sum": "sum_kernel", "sample_dot": "dots_kernel"}


def arguments(op, B, C, H, W, Q, D, G, octaves=0, dtype=torch.float32, channels_last=False):
    def empty(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device="meta")

    images = empty(B, C, H, W, dtype=dtype)
    if channels_last:
        images = images.to(memory_format=torch.channels_last)
    if op == "sample_sum":
        return images, empty(B, Q, D, 2), empty(B, G, Q, D)
    return images, empty(B, Q, D, 2), empty(B, G, Q, C - 2 * octaves), empty(B, Q, D), octaves


def launches(op, given, device):
    (plan,) = explain(op, *given, device=device, backward=False).plans
    return [(launch.kernel, launch.grid[0]) for launch in plan.launches]


PUBLISHED = dict(B=8, C=140, H=128, W=256, Q=256, D=123, G=4)


@needs_library
@pytest.mark.parametrize("op, octaves", [("sample_sum", 0), ("sample_dot", 6)])
@pytest.mark.parametrize(
    "dtype, device, runs",
    [
        (torch.float32, "H200", 4),  # 18 MB an image, 60 MB of cache
        (torch.bfloat16, "H200", 2),
        (torch.float32, "H100", 4),
        (torch.float32, "RTX 5090", 2),
        (torch.float32, "A100", 1),  # its launches do not overlap
        (torch.float32, "T4", 1),
    ],
    ids=str,
)
def test_images_are_copied_and_read_in_runs_that_the_cache_holds(op, octaves, dtype, device, runs):
    kernels = launches(op, arguments(op, **PUBLISHED, octaves=octaves, dtype=dtype), device)
    each = -(-8 // runs)
    expected = []
    for first in range(0, 8, each):
        images = min(each, 8 - first)
        expected += [("copy_kernel", images * 1024), (PASSES[op], images * 256)]
    assert kernels == expected


of_both_operators = pytest.mark.parametrize("op", PASSES)


@needs_library
@of_both_operators
def test_channels_last_images_are_read_where_they_are(op):
    kernels = launches(op, arguments(op, **PUBLISHED, channels_last=True), "H200")
    assert kernels == [(PASSES[op], 8 * 256)]


@needs_library
@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(sorted(PASSES)),
    st.integers(1, 70),
    st.sampled_from([1, 8, 71, 140]),
    st.integers(1, 300),
    st.integers(1, 300),
    st.sampled_from(sorted(DEVICES)),
)
def test_runs_cover_all_images(op, B, C, H, W, device):
    kernels = launches(op, arguments(op, B, C, H, W, 3, 5, 2), device)
    if C == 1 or H * W == 1:  # an image of one channel or one pixel is channels last, too
        assert kernels == [(PASSES[op], B * 3)]
        return
    copies = [blocks for kernel, blocks in kernels if kernel == "copy_kernel"]
    reads = [blocks for kernel, blocks in kernels if kernel == PASSES[op]]
    of_image = -(-H * W // 32)
    assert sum(copies) == B * of_image and sum(reads) == B * 3
    assert [blocks // of_image for blocks in copies] == [blocks // 3 for blocks in reads]


# On a GPU: runs of one image, as on a GPU with a tiny cache, against images that are read where they are.


def tiny_cache():
    return dataclasses.replace(present_device(), l2_bytes=1)


def make(op, B, C, H, W, Q, D, G, octaves, dtype=torch.float32):
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape, dtype=torch.float32):
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    images, samples = draw(B, C, H, W, dtype=dtype), draw(B, Q, D, 2) * 0.7
    if op == "sample_sum":
        return images, samples, draw(B, G, Q, D)
    return images, samples, draw(B, G, Q, C - 2 * octaves), draw(B, Q, D), octaves


FUNCTIONS = {"sample_sum": sample_sum, "sample_dot": sample_dot}


@pytest.mark.cuda
@of_two_types
@pytest.mark.parametrize("sizes", [(9, 140, 128, 256, 64, 123, 4, 6), (5, 31, 40, 30, 7, 300, 3, 0)], ids=str)
@of_both_operators
def test_overlapping_runs_read_what_was_copied(op, sizes, dtype):
    function, given = FUNCTIONS[op], make(op, *sizes, dtype=dtype)
    expected = function(given[0].to(memory_format=torch.channels_last), *given[1:])
    with choose_for(tiny_cache()):
        for _ in range(20):  # the second call's copies may lie where the first call's were
            images = given[0].clone()
            actual = function(images, *given[1:])
            images.fill_(float("nan"))  # the next launch must wait for all runs
            assert torch.equal(actual, expected)


@pytest.mark.cuda
@of_both_operators
def test_overlapping_runs_are_captured_in_a_graph(op):
    function, given = FUNCTIONS[op], make(op, 6, 140, 64, 96, 32, 50, 4, 6)
    with choose_for(tiny_cache()):
        expected = function(*given)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            actual = function(*given)
    for _ in range(5):
        actual.zero_()
        graph.replay()
        assert torch.equal(actual, expected)


@pytest.mark.cuda
def test_runs_without_samples_are_zero():
    given = make("sample_sum", 6, 140, 64, 96, 32, 0, 4, 0)
    with choose_for(tiny_cache()):
        assert not sample_sum(*given).any()
