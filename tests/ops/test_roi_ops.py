"""roi_align, roi_pool and deform_roi_pool."""

import math

import pytest
import torch

from visdet.ops import (
    DeformRoIPoolPack,
    ModulatedDeformRoIPoolPack,
    RoIAlign,
    RoIPool,
    SimpleRoIAlign,
    _torchvision,
    deform_roi_pool,
    roi_align,
    roi_pool,
)
from visdet.ops.roi_align import roi_align_reference

# What a peer's kernels give too: 2 x 2 maps, the whole map as region.
MAP = torch.tensor([[[[1.0, 2], [3, 4]]]])
WHOLE = torch.tensor([[0.0, 0, 0, 1, 1]])
ROIS = torch.tensor(
    [[0, 0.5, 1, 9.3, 7], [1, -3, -2, 5, 4], [1, 4, 4, 4, 4], [0, 8, 6, 30, 30], [1, 2.5, 3.5, 6, 5]]
)


def maps(dtype=torch.float32, B=2, C=3, H=7, W=9):
    return torch.randn(B, C, H, W, generator=torch.Generator().manual_seed(0)).to(dtype)


def test_roi_align_by_hand():
    expected = torch.tensor([[[[1.0, 1.25], [1.5, 1.75]]]])
    torch.testing.assert_close(roi_align(MAP, WHOLE, 2, 1.0, 2, "avg", True), expected)
    maximum = roi_align(MAP, WHOLE, 1, 1.0, 2, "max", True)  # samples at -0.25 and 0.25 both ways
    torch.testing.assert_close(maximum, torch.tensor([[[[1 + 0.25 + 0.5]]]]))


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("sampling_ratio", [0, 2, 3])
@pytest.mark.parametrize("size", [(2, 3), 1])
def test_plain_torch_agrees_with_torchvision(aligned, sampling_ratio, size):
    if not _torchvision.serves("cpu"):
        pytest.skip("torchvision's operators do not load")
    x = maps(torch.float64).requires_grad_()
    arguments = (ROIS.double(), size, 0.9, sampling_ratio, "avg", aligned)
    served, plain = roi_align(x, *arguments), roi_align_reference(x, *arguments)
    torch.testing.assert_close(served, plain)
    grad = torch.randn(served.shape, dtype=torch.float64)
    for first, second in zip(*(torch.autograd.grad(out, x, grad) for out in (served, plain)), strict=True):
        torch.testing.assert_close(first, second)


def test_maximum_mode_takes_the_largest_sample():
    x = maps(torch.float64)
    fine = roi_align(x, ROIS.double()[:2], (4, 6), 1.0, 1, "avg", True)  # one sample in each quarter of a bin
    coarse = roi_align(x, ROIS.double()[:2], (2, 3), 1.0, 2, "max", True)
    torch.testing.assert_close(coarse, torch.nn.functional.max_pool2d(fine, 2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_types_are_computed_in_float32(dtype):
    x = maps(dtype).requires_grad_()
    for function in (
        lambda x: roi_align(x, ROIS, 2),
        lambda x: roi_align(x, ROIS, 2, pool_mode="max"),
        lambda x: roi_pool(x, ROIS, 2),
        lambda x: deform_roi_pool(x, ROIS, None, 2),
    ):
        out = function(x)
        assert out.dtype == dtype
        torch.testing.assert_close(out, function(x.detach().float()).to(dtype))
        out.sum().backward()


@pytest.mark.parametrize("served", [True, False])
def test_no_regions(served, monkeypatch):
    if not served:
        monkeypatch.setattr(_torchvision, "serves", lambda device_type: False)
    x, none = maps().requires_grad_(), torch.zeros(0, 5)
    offset = torch.zeros(0, 2, 2, 2, requires_grad=True)
    for out in (
        roi_align(x, none, 2),
        roi_align(x, none, 2, pool_mode="max"),
        roi_pool(x, none, 2),
        SimpleRoIAlign(2, 1.0)(x, none),
        deform_roi_pool(x, none, None, 2),
        deform_roi_pool(x, none, offset, 2),
    ):
        assert out.shape == (0, 3, 2, 2)
        out.sum().backward()
        assert not x.grad.any()
    assert offset.grad.shape == offset.shape


def roi_pool_by_definition(x, rois, PH, PW, scale):
    out = torch.zeros(len(rois), x.shape[1], PH, PW, dtype=x.dtype)
    H, W = x.shape[2:]
    for n, (b, x1, y1, x2, y2) in enumerate(rois.tolist()):
        x1, y1, x2, y2 = x1 * scale, y1 * scale, (x2 + 1) * scale, (y2 + 1) * scale
        if x2 <= x1 or y2 <= y1:
            continue
        for p in range(PH):
            for q in range(PW):
                top = min(max(math.floor(p * (y2 - y1) / PH + y1), 0), H)
                bottom = min(max(math.ceil((p + 1) * (y2 - y1) / PH + y1), 0), H)
                left = min(max(math.floor(q * (x2 - x1) / PW + x1), 0), W)
                right = min(max(math.ceil((q + 1) * (x2 - x1) / PW + x1), 0), W)
                if bottom > top and right > left:
                    out[n, :, p, q] = x[int(b), :, top:bottom, left:right].amax((1, 2))
    return out


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_roi_pool_is_its_definition(scale):
    x, rois = maps(torch.float64), ROIS.double()
    torch.testing.assert_close(roi_pool(x, rois, (3, 2), scale), roi_pool_by_definition(x, rois, 3, 2, scale))
    x.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: roi_pool(x, rois, (3, 2), scale), x)


def test_roi_pool_by_hand():
    torch.testing.assert_close(roi_pool(MAP, WHOLE, 2), MAP)
    equal = torch.ones(1, 1, 2, 2, requires_grad=True)
    roi_pool(equal, WHOLE, 1).sum().backward()
    assert equal.grad.tolist() == [[[[1, 0], [0, 0]]]]  # the first of equal maxima
    holed = torch.tensor([[[[float("nan"), 2.0], [3, 4]]]])
    assert roi_pool(holed, WHOLE, 1).item() == 4


@pytest.mark.parametrize("sampling_ratio", [0, 2])
def test_deform_roi_pool_without_offset_is_roi_align(sampling_ratio):
    x, rois = maps(torch.float64), ROIS.double()
    expected = roi_align_reference(x, rois, 2, 0.9, sampling_ratio)
    torch.testing.assert_close(deform_roi_pool(x, rois, None, 2, 0.9, sampling_ratio), expected)


def test_offsets_move_bins_by_part_of_the_region():
    x, rois = maps(torch.float64), torch.tensor([[0.0, 1, 1, 5, 4]]).double()
    offset = torch.zeros(1, 2, 1, 1).double()
    offset[0, 0], offset[0, 1] = 2.0, -1.0  # x by 0.1 * 4 * 2, y by 0.1 * 3 * -1
    moved = rois + torch.tensor([[0, 0.8, -0.3, 0.8, -0.3]]).double()
    torch.testing.assert_close(
        deform_roi_pool(x, rois, offset, 1, 1.0, 2), deform_roi_pool(x, moved, None, 1, 1.0, 2)
    )


def test_gradients_of_deform_roi_pool_and_maximum():
    x = maps(torch.float64, B=1, C=2, H=5, W=6).requires_grad_()
    rois = torch.tensor([[0.0, 0.7, 1.1, 4.2, 3.9], [0, 1.3, 0.6, 3.3, 2.8]]).double()
    offset = (
        torch.rand(2, 2, 2, 2, generator=torch.Generator().manual_seed(1)).double() * 0.3
    ).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, o: deform_roi_pool(x, rois, o, 2, 1.0, 2), (x, offset))
    assert torch.autograd.gradcheck(lambda x: roi_align(x, rois, 2, 1.0, 2, "max"), x)


@pytest.mark.parametrize("pack, factor", [(DeformRoIPoolPack, 1.0), (ModulatedDeformRoIPoolPack, 0.5)])
def test_packs_start_undeformed(pack, factor):
    module = pack(2, 3, deform_fc_channels=8, sampling_ratio=2)
    torch.testing.assert_close(module(maps(), ROIS), factor * deform_roi_pool(maps(), ROIS, None, 2, 1.0, 2))
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


def test_export_of_roi_align():
    if not _torchvision.serves("cpu"):
        pytest.skip("torchvision's operators do not load")
    program = torch.export.export(RoIAlign(2, 1.0, 2), (maps(), ROIS))
    torch.testing.assert_close(program.module()(maps(), ROIS), RoIAlign(2, 1.0, 2)(maps(), ROIS))


def test_compilation_of_roi_align():
    if not _torchvision.serves("cpu"):
        pytest.skip("torchvision's operators do not load")
    layer = RoIAlign(2, 1.0, 2)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for count in (5, 3):
        x = maps().requires_grad_()
        expected, found = layer(x, ROIS[:count]), compiled(x, ROIS[:count])
        torch.testing.assert_close(found, expected)
        grads = [torch.autograd.grad(out.square().sum(), x)[0] for out in (found, expected)]
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: roi_align(MAP[0], WHOLE, 1), r"roi_align: input must be \[B, C, H, W\], got \[1, 2, 2\]"),
        (lambda: roi_pool(MAP, WHOLE[:, 1:], 1), r"roi_pool: rois must be \[N, 5\].*got \[1, 4\]"),
        (lambda: roi_align(MAP, WHOLE, 1, pool_mode="sum"), "pool_mode must be 'avg' or 'max', got 'sum'"),
        (lambda: deform_roi_pool(MAP, WHOLE, MAP, 2), r"offset must be \[1, 2, 2, 2\], got \[1, 1, 2, 2\]"),
    ],
)
def test_rejections(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.cuda
def test_cuda_agrees_with_the_cpu():
    x = maps(torch.float64)
    for function in (
        lambda x, r: roi_align(x, r, 2),
        lambda x, r: roi_align(x, r, 2, pool_mode="max"),
        lambda x, r: roi_pool(x, r, 2),
        lambda x, r: deform_roi_pool(x, r, None, 2),
    ):
        results = []
        for device in ("cpu", "cuda"):
            leaf = x.to(device).requires_grad_()
            out = function(leaf, ROIS.double().to(device))
            (grad,) = torch.autograd.grad(out.square().sum(), leaf)
            results.append((out.detach().cpu(), grad.cpu()))
        for first, second in zip(*results, strict=True):
            torch.testing.assert_close(first, second)


@pytest.mark.cuda
def test_gradients_on_cuda_are_deterministic_on_demand():
    x, grads = maps().cuda().requires_grad_(), []
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(2):
            grads.append(torch.autograd.grad(roi_align(x, ROIS.cuda(), 2).square().sum(), x)[0])
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(*grads)
    torch.testing.assert_close(
        grads[0], torch.autograd.grad(roi_align(x, ROIS.cuda(), 2).square().sum(), x)[0]
    )


def test_the_doctor_says_who_serves(monkeypatch):
    pytest.importorskip("mmengine")
    from visdet import doctor

    monkeypatch.setattr(_torchvision, "_problems", {"cpu": None})
    assert "on cpu: torchvision" in doctor.report()[0]
    monkeypatch.setattr(_torchvision, "_problems", {"cpu": "torchvision does not import (why)"})
    text, advice = doctor.report()
    assert "on cpu: plain torch" in text and any("does not import (why)" in line for line in advice)
