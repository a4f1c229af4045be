"""roi_align, roi_pool and deform_roi_pool."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from calls import refusals, without_synchronisation
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from tests.fuzz import sizes
from tests.fuzz.problem import Operator, Problem, generator_of, rand
from tests.fuzz.regions import ALIGNED, draw_regions, region_bounds
from visdet.ops import (
    DeformRoIPoolPack,
    ModulatedDeformRoIPoolPack,
    RoIAlign,
    RoIPool,
    _library,
    deform_roi_pool,
    explain,
    roi_align,
    roi_pool,
)
from visdet.ops.deform_roi_pool import deform_roi_pool_reference
from visdet.ops.roi_align import roi_align_reference
from visdet.ops.roi_pool import roi_pool_reference, roi_pool_with_argmax


def _pool_reference(
    input: Tensor, rois: Tensor, output_size: tuple[int, int], spatial_scale: float
) -> Tensor:
    return roi_pool_reference(input, rois, *output_size, spatial_scale)[0]


def _deform_reference(offset: Tensor | None, **others: Any) -> Tensor:
    safe = None if offset is None else torch.where(offset.abs() < 1e4, offset, 0.0)
    return deform_roi_pool_reference(offset=safe, **others)


def _of_size(**settings: Any) -> tuple[Callable[[int], Problem], ...]:
    """Return problems with n regions, and with n images."""

    def problem(images: int, regions: int) -> Problem:
        corners = rand(regions, 2) * 5
        index = torch.arange(regions)[:, None] % max(1, images)
        rois = torch.cat([index, corners, corners + 3], 1)
        return Problem({"input": rand(images, 3, 8, 9), "rois": rois, **settings}, ("input",))

    return lambda n: problem(2, n), lambda n: problem(n, 3)


def _deformed(n: int) -> Problem:
    """Return a problem of deform_roi_pool with n regions."""
    problem = _of_size(output_size=2, sampling_ratio=2)[0](n)
    return Problem(problem.arguments | {"offset": rand(n, 2, 2, 2)}, ("input", "offset"))


OPERATORS = (
    Operator(
        "roi_align",
        roi_align,
        lambda draw: draw_regions(draw, "roi_align"),
        roi_align_reference,
        region_bounds,
        launches=sizes.arguments(rois="N 5 float32", **ALIGNED),
        of_size=_of_size(output_size=2, spatial_scale=0.5),
        shares_a_scale=True,
    ),
    Operator(
        "roi_pool",
        roi_pool,
        lambda draw: draw_regions(draw, "roi_pool"),
        _pool_reference,
        region_bounds,
        launches=sizes.arguments(
            st.just(torch.float32), input="B C H W", rois="N 5", output_size=st.integers(1, 14)
        ),
        of_size=_of_size(output_size=2, spatial_scale=0.5),
    ),
    Operator(
        "deform_roi_pool",
        deform_roi_pool,
        lambda draw: draw_regions(draw, "deform_roi_pool"),
        _deform_reference,
        region_bounds,
        spoiled={"offset": ("rank", 1, 2)},
        shares_a_scale=True,
        launches=sizes.arguments(
            rois="N 5 float32", offset="N 2 7 7 float32", spatial_scale=0.25, **ALIGNED | {"output_size": 7}
        ),
        of_size=(_deformed,),
    ),
)


# What a peer's kernels give too: 2 x 2 maps, the whole map as region.
MAP = torch.tensor([[[[1.0, 2], [3, 4]]]])
WHOLE = torch.tensor([[0.0, 0, 0, 1, 1]])
ROIS = torch.tensor(
    [[0, 0.5, 1, 9.3, 7], [1, -3, -2, 5, 4], [1, 4, 4, 4, 4], [0, 8, 6, 30, 30], [1, 2.5, 3.5, 6, 5]]
)


def maps(dtype=torch.float32, B=2, C=3, H=7, W=9):
    return torch.randn(B, C, H, W, generator=generator_of(0)).to(dtype)


def test_sizes_of_numpy():
    for size in (np.int64(2), np.array([2, 2]), [np.int32(2), 2], torch.Size([2, 2])):
        assert_close(roi_align(MAP, WHOLE, size), roi_align(MAP, WHOLE, 2))


def test_roi_align_by_hand():
    expected = torch.tensor([[[[1.0, 1.25], [1.5, 1.75]]]])
    assert_close(roi_align(MAP, WHOLE, 2, 1.0, 2, "avg", True), expected)
    maximum = roi_align(MAP, WHOLE, 1, 1.0, 2, "max", True)  # samples at -0.25 and 0.25 both ways
    assert_close(maximum, torch.tensor([[[[1 + 0.25 + 0.5]]]]))


def test_maximum_mode_takes_the_largest_sample():
    x, rois = maps(torch.float64), ROIS.double()[:2]
    fine = roi_align(x, rois, (4, 6), 1.0, 1, "avg", True)  # one sample in each quarter of a bin
    coarse = roi_align(x, rois, (2, 3), 1.0, 2, "max", True)
    assert_close(coarse, torch.nn.functional.max_pool2d(fine, 2))


def test_roi_pool_by_hand():
    assert_close(roi_pool(MAP, WHOLE, 2), MAP)
    equal = torch.ones(1, 1, 2, 2, requires_grad=True)
    roi_pool(equal, WHOLE, 1).sum().backward()
    assert equal.grad.tolist() == [[[[1, 0], [0, 0]]]]  # the first of equal maxima
    holed = torch.tensor([[[[float("nan"), 2.0], [3, 4]]]])
    assert roi_pool(holed, WHOLE, 1).item() == 4


@pytest.mark.parametrize("sampling_ratio", [0, 2])
def test_deform_roi_pool_without_offset_is_roi_align(sampling_ratio):
    x, rois = maps(torch.float64), ROIS.double()
    expected = roi_align_reference(x, rois, 2, 0.9, sampling_ratio)
    assert_close(deform_roi_pool(x, rois, None, 2, 0.9, sampling_ratio), expected)


def test_offsets_move_bins_by_part_of_the_region():
    x, rois = maps(torch.float64), torch.tensor([[0.0, 1, 1, 5, 4]]).double()
    offset = torch.zeros(1, 2, 1, 1).double()
    offset[0, 0], offset[0, 1] = 2.0, -1.0  # x by 0.1 * 4 * 2, y by 0.1 * 3 * -1
    moved = rois + torch.tensor([[0, 0.8, -0.3, 0.8, -0.3]]).double()
    assert_close(deform_roi_pool(x, rois, offset, 1, 1.0, 2), deform_roi_pool(x, moved, None, 1, 1.0, 2))


@pytest.mark.parametrize("pack, factor", [(DeformRoIPoolPack, 1.0), (ModulatedDeformRoIPoolPack, 0.5)])
def test_packs_start_undeformed(pack, factor):
    module = pack(2, 3, deform_fc_channels=8, sampling_ratio=2)
    assert_close(module(maps(), ROIS), factor * deform_roi_pool(maps(), ROIS, None, 2, 1.0, 2))
    with pytest.raises(ValueError, match="input must have 3 channels, got 4"):
        module(maps(C=4), ROIS)


def test_modules():
    x = maps()
    layer = RoIAlign(output_size=2, spatial_scale=0.5, sampling_ratio=2)
    assert layer.aligned and layer.output_size == (2, 2)
    assert torch.equal(layer(x, ROIS), roi_align(x, ROIS, 2, 0.5, 2))
    with pytest.warns(DeprecationWarning, match="out_size"):
        assert RoIAlign(out_size=7, sample_num=2).sampling_ratio == 2
    assert torch.equal(RoIPool((2, 3), 0.5)(x, ROIS), roi_pool(x, ROIS, (2, 3), 0.5))


IMAGES, REGIONS = torch.zeros(2, 3, 9, 11), torch.zeros(7, 5)
REFUSED = [
    *refusals(
        torch.ops.visdet.roi_pool,
        (IMAGES, REGIONS, 3, 2, 0.7),
        (0, IMAGES[0], r"roi_pool: input must be \[B, C, H, W\], got \[3, 9, 11\]"),
        (0, IMAGES.int(), "roi_pool: input must be float64, float32, float16 or bfloat16, got Int"),
        (1, REGIONS[:, 1:], r"roi_pool: rois must be \[N, 5\], got \[7, 4\]"),
        (1, REGIONS.double(), "roi_pool: rois must be Float for input of type Float, got Double"),
        (2, 0, "roi_pool: output_size must be positive, got 0 x 2"),
    ),
    *(
        (lambda size=size: roi_align(MAP, WHOLE, size), "output_size must be an integer or 2 integers")
        for size in ((2,), (1, 2, 3))
    ),
    (lambda: roi_align(MAP, WHOLE, 2, 1.0, 65536), r"fewer than 2\^31 samples, got \(2, 2\) and 65536"),
    (
        lambda: deform_roi_pool(MAP, WHOLE, None, 2, 1.0, 65536),
        "deform_roi_pool: output_size and sampling_ratio must",
    ),
]


def test_more_bins_than_a_kernel_counts_are_refused():
    if not (_library.is_loaded("cpu") and _library.is_loaded("cuda")):
        pytest.skip("the CUDA library is not built")
    images, rois = torch.empty(1, 1, 2, 2, device="meta"), torch.empty(1, 5, device="meta")
    with pytest.raises(
        RuntimeError, match=r"roi_align: a region must have at most .* bins on CUDA, got 16384 x 8192"
    ):
        explain("roi_align", images, rois, (16384, 8192), device="H200")
    with pytest.raises(RuntimeError, match=r"rois must be \[N, 5\] or \[N, 6\], got \[1, 7\]"):
        torch.ops.visdet_plan.roi_align(images, torch.empty(1, 7, device="meta"), 2, 2, 1.0, 0, True)


def test_regions_without_samples_have_a_gradient():
    x, nowhere = maps().requires_grad_(), torch.tensor([[0.0, 4, 4, 4, 4]])
    for out in (roi_align(x, nowhere, 2), roi_align(x, nowhere, 2, pool_mode="max")):
        (grad,) = torch.autograd.grad(out.sum(), x)
        assert not out.any() and not grad.any()


def test_a_far_region_is_cut_where_it_leaves_the_reach(device):
    """A map of 7 x 9 reaches 128 pixels and two more, whose outer end a region of 10^5 pixels does not pass."""
    x = maps().to(device)
    regions = [[1, -1e5, -1e5, 1e5, 1e5], [1, -130, -130, 139, 139], [1, -129, -130, 139, 139]]
    far, cut, smaller = roi_align(x, torch.tensor(regions, device=device), 3)
    assert torch.equal(far, cut) and not torch.equal(cut, smaller) and far[:, 1, 1].all()


def test_regions_of_no_image_in_a_compiled_and_an_exported_layer():
    layer = RoIAlign(2, 0.5, 0)
    rois = torch.cat([ROIS, torch.tensor([[2, 0, 0, 3, 3], [0, 0, float("nan"), 3, 3], [-1, 0, 0, 3, 3]])])
    N, H, W = (torch.export.Dim(name, min=2, max=500) for name in ("N", "H", "W"))
    program = torch.export.export(layer, (maps(), ROIS), dynamic_shapes=({2: H, 3: W}, {0: N}))
    for x in (maps(), maps(H=30, W=170)):
        expected = layer(x, rois)
        assert expected[:5].any() and not expected[5:].any()
        assert torch.equal(program.module()(x, rois), expected)
        assert torch.equal(torch.compile(layer, fullgraph=True, backend="eager")(x, rois), expected)


@pytest.mark.cuda
def test_bounding_the_regions_does_not_synchronise():
    x, rois = maps().cuda().requires_grad_(), ROIS.cuda()
    roi_align(x, rois, 2).sum().backward()
    with without_synchronisation():
        for ratio in (0, 2):
            roi_align(x, rois, 2, 0.5, ratio).sum().backward()


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [(1 << 24) + 1, (1 << 24) + 3], ids=str)
def test_roi_pool_of_more_rows_than_float32_counts(rows):
    # As float32, 2^24 + 1 is 2^24 and 2^24 + 3 is 2^24 + 4. A bin that ends at the end of the map must have its last
    # row, and must not reach into the next channel.
    images = torch.zeros(1, 2, rows, 1, device="cuda")
    images[0, 1, 0, 0] = 5
    images[0, 1, -1, 0] = 7
    rois = torch.tensor([[0, 0, 0, 0, 3e7]], device="cuda")
    output, argmax = roi_pool_with_argmax(images, rois, (1, 1), 1.0)
    assert output.flatten().tolist() == [0, 7]
    assert (argmax >= 0).all() and (argmax < rows).all()


@pytest.mark.cuda
def test_roi_pool_of_more_images_than_float32_counts():
    whole = 1 << 24  # float32 has no number between it and whole + 2
    images = torch.ones(whole + 1, 1, 1, 1, device="cuda")
    rois = torch.tensor([[whole + 2.0, 0, 0, 0, 0], [whole, 0, 0, 0, 0]], device="cuda")
    assert roi_pool(images, rois, 1, 1.0).flatten().tolist() == [0, 1]


@pytest.mark.parametrize("size", [(3, 2), (1, 3), (14, 13)], ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 9, 11), (1, 19, 40, 50), (2, 1, 1, 1)], ids=str)
def test_roi_pool_finds_the_first_maximum(shape, size, device):
    rois = torch.cat(
        [ROIS, torch.tensor([[2, 0, 0, 3, 3], [0, 1, 2, 6, 5], [0, 44.5, 33, 49, 41], [0, 5, 5, 3, 3]])]
    )
    x = maps(torch.float32, *shape)
    expected = roi_pool_reference(x, rois, *size, 0.7)
    found = roi_pool_with_argmax(x.to(device), rois.to(device), size, 0.7)
    assert_close(found, expected, rtol=0, atol=0, check_device=False)


def test_not_a_number_is_never_the_maximum(device):
    nan, inf = torch.nan, torch.inf
    values = torch.tensor([[[[nan, 1.0, -inf], [2.0, nan, inf]]]], device=device)
    rois = torch.tensor(
        [[0.0, 0, 0, 0, 1], [0, 0, 0, 1, 0], [0, 0, 0, 0, 0], [0, 2, 0, 2, 0], [0, 0, 0, 2, 1]], device=device
    )
    pooled, argmax = roi_pool_with_argmax(values, rois, (1, 1), 1.0)
    assert argmax.flatten().tolist() == [3, 1, 0, 2, 5]
    assert pooled.flatten().nan_to_num(7.0).tolist() == [2, 1, 7, -inf, inf] or (
        pooled[2].isnan().all() and pooled[3].isneginf().all() and pooled[4].isposinf().all()
    )


@pytest.mark.cuda
def test_roi_pool_of_more_numbers_than_32_bits_count():
    maps = torch.zeros(1, 1, 70, 70, device="cuda", dtype=torch.bfloat16)
    maps[0, 0, 69, 69] = 2
    regions = torch.tensor([[0.0, 69, 69, 69, 69]], device="cuda").expand((1 << 31) // 4900 + 5, 5)
    assert roi_pool(maps, regions, 70)[-1].eq(2).all()
