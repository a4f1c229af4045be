"""What no operator may crash on, or read foreign memory for: NaN, infinity, huge numbers, and indices of nothing.

The candidates run in a process of their own, ``python tests/ops/test_bad_numbers.py DEVICE``, which prints the name of
each before it runs it: a process that dies says last what killed it.
"""

import itertools
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from visdet import ops
from visdet.compat import mmcv_ext
from visdet.ops.carafe import carafe_reference
from visdet.ops.focal_loss import sigmoid_focal_loss_reference
from visdet.ops.nms import kept_by_plain_torch
from visdet.ops.roi_align import roi_align_reference
from visdet.ops.roi_pool import roi_pool_reference

NAN, INF = math.nan, math.inf
BAD = (NAN, INF, -INF, 1e30, -1e30, 3e38, -3e38)
FOREIGN = 6e4  # what lies around a tensor in its storage; float16 holds it

# Regions of no image of two, and with NaN.
MISSING = [[-1, 0, 0, 3, 3], [1e9, 0, 0, 3, 3], [-1e9, 0, 0, 3, 3], [2, 0, 0, 3, 3], [NAN, 0, 0, 3, 3]]
MISSING += [[0.5, 0, 0, 3, 3], [1.5, 0, 0, 3, 3], [-0.5, 0, 0, 3, 3], [1e-9, 0, 0, 3, 3]]
MISSING += [[INF, 0, 0, 3, 3], [0, NAN, 0, 3, 3], [0, 0, NAN, 3, 3], [1, 0, 0, NAN, 3], [1, 0, 0, 3, NAN]]
# Regions far outside, without end, huge, or turned inside out.
STRANGE = [[0, 0, 0, INF, INF], [1, -INF, 0, 3, 3], [0, -INF, -INF, INF, INF], [1, 0, 0, 1e5, 1e5]]
STRANGE += [[0, -3e38, 0, 3e38, 1], [1, 1e30, 1e30, 2e30, 2e30], [0, 30, 30, 0, 4], [1, 30, 30, 0, 40]]
STRANGE += [[0, INF, 0, -INF, 3], [0, 40, 40, 2, 2]]
SOUND = [[0, 0.5, 1, 6.3, 5], [1, -2, 1, 4, 9], [1, 3, 2, 3, 2]]


def say(*words):
    print(*words, flush=True)


def within_foreign_memory(values):
    """Return the same numbers, with FOREIGN before, between and behind them."""
    around = values.new_full((*values.shape[:-1], values.shape[-1] + 5), FOREIGN)
    window = around[..., 2:-3]
    return window.copy_(values)


def maps(dtype, device, *shape):
    return within_foreign_memory(
        torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    )


def agree(found, expected, loose=1.0):
    tolerance = {torch.float64: 1e-9, torch.float32: 2e-4, torch.float16: 3e-2, torch.bfloat16: 3e-1}[
        found.dtype
    ]
    expected = expected.to(found.device, found.dtype)
    torch.testing.assert_close(
        found, expected, rtol=tolerance * loose, atol=tolerance * loose, equal_nan=True
    )


def run_regions(pool, reference, x, what):
    """Missing regions give 0 and no gradient, others what the reference gives."""
    say(what)
    rois = torch.tensor(MISSING + STRANGE + SOUND, dtype=torch.float64, device=x.device)
    leaf = x.detach().requires_grad_()
    out = pool(leaf, rois)
    assert not out[: len(MISSING)].any(), out[: len(MISSING)]
    (grad,) = torch.autograd.grad(out.sum(), leaf)
    assert out.isfinite().all() and grad.isfinite().all() and out.abs().max() < 100
    wide = x.double().cpu().requires_grad_()
    expected = reference(wide, rois.cpu())
    agree(out, expected)
    (grad_expected,) = torch.autograd.grad(expected.sum(), wide)
    agree(grad, grad_expected, 4)
    (grad,) = torch.autograd.grad(pool(leaf, rois[: len(MISSING)]).sum(), leaf)
    assert not grad.any()


def check_roi_align(device):
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for ratio, aligned, mode in itertools.product((0, 2), (True, False), ("avg", "max")):
            arguments = ((2, 3), 0.5, ratio, mode, aligned)
            run_regions(
                lambda x, rois, a=arguments: ops.roi_align(x, rois, *a),
                lambda x, rois, a=arguments: roi_align_reference(x, rois, *a),
                maps(dtype, device, 2, 3, 7, 9),
                f"roi_align {dtype} sampling_ratio={ratio} aligned={aligned} {mode}",
            )
    for dtype, ratio in itertools.product((torch.float32, torch.float64), (0, 2)):
        say("the kernel of roi_align itself", dtype, ratio)
        x = maps(dtype, device, 2, 3, 7, 9)
        rois = torch.tensor(MISSING + STRANGE + SOUND, dtype=dtype, device=device)
        rois = within_foreign_memory(torch.cat([rois, rois * 1e9, rois * 1e30, rois * NAN]))
        out = torch.ops.visdet.roi_align(x, rois, 2, 3, 1.0, ratio, True)
        grad = torch.ops.visdet.roi_align_backward(
            torch.ones_like(out), rois, 2, 7, 9, 1.0, ratio, True, False
        )
        assert not out[: len(MISSING)].any() and out.abs().max() < 100 and grad.isfinite().all()
        found = out[len(MISSING + STRANGE) :][: len(SOUND)]
        agree(
            found, roi_align_reference(x, torch.tensor(SOUND, dtype=dtype, device=device), (2, 3), 1.0, ratio)
        )
    for shape in ((2, 3, 0, 9), (2, 3, 7, 0), (0, 3, 7, 9), (2, 0, 7, 9)):
        say("roi_align of an empty map", shape)
        leaf = torch.zeros(shape, device=device, requires_grad=True)
        out = ops.roi_align(leaf, torch.tensor(SOUND + MISSING, device=device), 2)
        assert out.shape == (len(SOUND + MISSING), shape[1], 2, 2) and not out.any()
        out.sum().backward()


def check_deform_roi_pool(device):
    for dtype, ratio in itertools.product((torch.float32, torch.float64, torch.bfloat16), (0, 2)):
        run_regions(
            lambda x, rois, r=ratio: ops.deform_roi_pool(x, rois, None, (2, 3), 0.5, r),
            lambda x, rois, r=ratio: roi_align_reference(x, rois, (2, 3), 0.5, r),
            maps(dtype, device, 2, 3, 7, 9),
            f"deform_roi_pool {dtype} sampling_ratio={ratio}",
        )
    x, rois = maps(torch.float32, device, 2, 3, 7, 9), torch.tensor(SOUND, device=device)
    for value in BAD:
        say("deform_roi_pool with an offset of", value)
        offset = torch.full((3, 2, 2, 2), value, device=device, requires_grad=True)
        out = ops.deform_roi_pool(x, rois, offset, 2, 1.0, 2)
        out.sum().backward()
        assert not out[:2].any() and not offset.grad[:2].any()  # the third has no extent to move by


def check_roi_pool(device):
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        say("roi_pool", dtype)
        x = maps(dtype, device, 2, 3, 7, 9)
        rois = torch.tensor(MISSING + STRANGE + SOUND, dtype=torch.float64, device=device)
        leaf = x.detach().requires_grad_()
        out = ops.roi_pool(leaf, rois, (2, 3), 0.5)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        expected = roi_pool_reference(x.cpu(), rois.cpu().to(wide), 2, 3, 0.5)[0]
        assert not out[: len(MISSING)].any() and torch.equal(out.cpu(), expected)
        assert torch.autograd.grad(out.sum(), leaf)[0].isfinite().all()
    for shape in ((2, 3, 0, 9), (0, 3, 7, 9)):
        leaf = torch.zeros(shape, device=device, requires_grad=True)
        out = ops.roi_pool(leaf, torch.tensor(SOUND + MISSING, device=device), 2)
        out.sum().backward()
        assert not out.any()


def check_point_sample(device):
    modes = itertools.product(
        ("zeros", "border", "reflection"), ("bilinear", "nearest", "bicubic"), (False, True)
    )
    for (padding, mode, corners), dtype in itertools.product(modes, (torch.float32, torch.float64)):
        x = maps(dtype, device, 2, 3, 7, 9)
        settings = dict(align_corners=corners, padding_mode=padding, mode=mode)
        for value in BAD:
            say("point_sample", dtype, padding, mode, corners, value)
            points = torch.full((2, 11, 2), value, dtype=dtype, device=device)
            points[:, ::3] = 0.3  # sound ones between them
            points[:, 1, 1] = 0.4
            points, leaf = points.requires_grad_(), x.detach().requires_grad_()
            out = ops.point_sample(leaf, points, **settings)
            out.sum().backward()
            assert out.isfinite().all() and leaf.grad.isfinite().all() and points.grad.isfinite().all()
            assert not points.grad[:, 2].any() or padding == "reflection"
            if padding == "zeros":
                assert not out[..., 1].any() and not out[..., 2].any()
            if padding == "border" and mode != "bicubic":
                corner = (-1, -1) if value > 0 else (0, 0)
                torch.testing.assert_close(out[..., 2], x[..., corner[0], corner[1]])
            sound = ops.point_sample(x, points[:, ::3].detach(), **settings)
            torch.testing.assert_close(out[..., ::3], sound)
    say("bilinear_grid_sample")
    x = maps(torch.float64, device, 2, 3, 7, 9).requires_grad_()
    grid = torch.tensor(BAD, dtype=torch.float64, device=device).view(1, 7, 1, 1).expand(2, 7, 4, 2)
    out = ops.bilinear_grid_sample(x, grid)
    assert not out.any() and not torch.autograd.grad(out.sum(), x)[0].any()
    for aligned in (True, False):
        say("SimpleRoIAlign", aligned)
        rois = torch.tensor(MISSING + STRANGE + SOUND, dtype=torch.float64, device=device)
        out = ops.SimpleRoIAlign(2, 1.0, aligned)(x, rois)
        assert out.isfinite().all() and not out[: len(MISSING)].any() and out[-3].all()
        assert torch.autograd.grad(out.sum(), x)[0].isfinite().all()


def bad_boxes(seed, device, count=70):
    """Return boxes and scores, a third of which are spoilt."""
    generator = torch.Generator().manual_seed(seed)
    corner = torch.rand(count, 2, generator=generator) * 30
    boxes = torch.cat([corner, corner + torch.rand(count, 2, generator=generator) * 20], 1)
    scores = torch.rand(count, generator=generator)
    values = torch.tensor(BAD)[torch.randint(len(BAD), (count, 5), generator=generator)]
    is_bad = torch.rand(count, 5, generator=generator) < 0.08
    boxes, scores = (
        torch.where(is_bad[:, :4], values[:, :4], boxes),
        torch.where(is_bad[:, 4], values[:, 4], scores),
    )
    return within_foreign_memory(boxes.to(device)), within_foreign_memory(scores.to(device))


def check_kept(boxes, dets, keep):
    assert keep.unique().numel() == keep.numel() and ((keep >= 0) & (keep < len(boxes))).all()
    assert torch.equal(dets[:, :-1].nan_to_num(7), boxes[keep].nan_to_num(7))


def check_nms(device):
    for seed in range(20):
        say("nms", seed)
        boxes, scores = bad_boxes(seed, device)
        dets, keep = ops.nms(boxes, scores, 0.4)
        check_kept(boxes, dets, keep)
        assert torch.equal(keep, kept_by_plain_torch(boxes, scores, 0.4))
        say("nms_match", seed)
        groups = ops.nms_match(torch.cat([boxes, scores[:, None]], 1), 0.4)
        assert torch.cat(groups).sort().values.tolist() == list(range(len(boxes)))
        for method, offset in itertools.product(("naive", "linear", "gaussian"), (0, 1)):
            say("soft_nms", seed, method, offset)
            check_kept(boxes, *ops.soft_nms(boxes, scores, 0.3, 0.5, 1e-3, method, offset))
        overlaps = ops.bbox_overlaps(boxes, boxes)
        is_sound = boxes.isfinite().all(1) & (boxes.abs() < 1e3).all(1)
        assert overlaps[is_sound][:, is_sound].isfinite().all()
    boxes, scores = bad_boxes(1, device, 0)
    for dtype in (torch.float16, torch.int64):
        say("boxes of", dtype)
        whole = torch.tensor([[0, 0, 1, 1], [0, 0, 1, 1]], device=device).to(dtype)
        assert ops.nms(whole, torch.ones(2, device=device), 0.5)[1].tolist() == [0]
        assert ops.nms(boxes.to(dtype), scores.to(dtype), 0.5)[1].numel() == 0


def check_batched_nms(device):
    for seed, kind, limit in itertools.product(range(10), ("nms", "soft_nms"), (10000, 5)):
        boxes, scores = bad_boxes(seed, device)
        for name, ids in {
            "few": torch.arange(70) % 3,
            "huge": torch.arange(70) * (1 << 40),
            "negative": -torch.arange(70),
        }.items():
            say("batched_nms", seed, kind, limit, name)
            cfg = dict(type=kind, iou_threshold=0.4, split_thr=limit, max_num=9)
            dets, keep = ops.batched_nms(boxes, scores, ids.to(device), cfg)
            check_kept(boxes, dets, keep)
            assert len(keep) == 9
    for limit in (10000, 0):
        none = torch.zeros(0, device=device)
        dets, keep = ops.batched_nms(
            none.view(0, 4), none, none.long(), dict(split_thr=limit, iou_threshold=0.5)
        )
        assert dets.shape == (0, 5) and keep.shape == (0,)
    say("batched_nms beside spoilt boxes")
    pair = torch.tensor([[0.0, 0, 9, 9], [0, 0, 9, 9], [0, 0, 9, 9], [5, 5, 5, 5]], device=device)
    scores, ids = torch.tensor([0.9, 0.8, 0.7, 0.6], device=device), torch.tensor([0, 0, 1, 2], device=device)
    for value in (NAN, INF, -INF):
        pair[3, 2] = value
        for kind, kept in (("nms", [0, 2, 3]), (ops.nms, [0, 2, 3])):
            assert ops.batched_nms(pair, scores, ids, dict(type=kind, iou_threshold=0.5))[1].tolist() == kept


def spoilt(values, seed):
    generator = torch.Generator().manual_seed(seed)
    bad = torch.tensor(BAD[:5])[torch.randint(5, values.shape, generator=generator)].to(values)
    is_bad = (torch.rand(values.shape, generator=generator) < 0.02).to(values.device)
    return within_foreign_memory(torch.where(is_bad, bad, values))


def check_maps(device):
    for dtype, seed in itertools.product((torch.float32, torch.float64), range(5)):
        say("carafe", dtype, seed)
        x = spoilt(maps(dtype, device, 2, 4, 5, 7), seed).requires_grad_()
        masks = spoilt(maps(dtype, device, 2, 18, 10, 14), seed + 9).requires_grad_()
        out = ops.carafe(x, masks, 3, 2, 2)
        agree(out, carafe_reference(x.detach().cpu(), masks.detach().cpu(), 3, 2, 2), 10)
        out.sum().backward()
        say("masked_conv2d", dtype, seed)
        mask, weight = spoilt(maps(dtype, device, 2, 5, 7), seed), maps(dtype, device, 3, 4, 3, 3)
        out = ops.masked_conv2d(x.detach(), mask, weight, None, 1)
        whole = torch.nn.functional.conv2d(x.detach(), weight, None, 1, 1)
        counts = (mask > 0)[:, None].expand_as(out)
        assert not out[~counts].any()
        assert torch.equal(out[counts].isfinite(), whole[counts].isfinite())
        for mode in ("bottom", "left", "right", "top"):
            say("corner_pool", mode)
            leaf = x.detach().requires_grad_()
            ops.corner_pool(leaf, mode).sum().backward()
            assert leaf.grad.isfinite().all()


def check_focal_losses(device):
    targets = torch.tensor([0, 3, 4, -1, 5, -(1 << 62), 1 << 62, 2], device=device)
    weight = within_foreign_memory(torch.rand(4, device=device))
    for dtype, given in itertools.product((torch.float32, torch.float64, torch.float16), (None, weight)):
        say("focal losses", dtype, given is not None)
        logits = maps(dtype, device, 8, 4).requires_grad_()
        factor = torch.zeros(0, device=device) if given is None else given
        found = ops.sigmoid_focal_loss(logits, targets, 2.0, 0.25, given, "none")
        agree(found, sigmoid_focal_loss_reference(logits.detach(), targets, factor, 2.0, 0.25))
        assert torch.autograd.grad(found.sum(), logits)[0].isfinite().all()
        loss = ops.softmax_focal_loss(logits, targets, 2.0, 0.25, given, "none")
        assert loss.isnan().tolist() == [False, False, True, False, True, False, True, False]
        (grad,) = torch.autograd.grad(loss.sum(), logits)
        assert grad.any(1).tolist() == [True, True, False, False, False, False, False, True]
        spoilt_logits = spoilt(maps(dtype, device, 8, 4), 3).requires_grad_()
        found = ops.sigmoid_focal_loss(spoilt_logits, targets, 2.0, 0.25, given, "none")
        found.sum().backward()
        assert torch.equal(found.isnan(), spoilt_logits.isnan() | (found.isnan() & spoilt_logits.isinf()))


def check_bridge(device):
    x, rois = maps(torch.float32, device, 2, 3, 7, 9), torch.tensor(MISSING + STRANGE + SOUND, device=device)
    for mode, ratio in itertools.product((0, 1), (0, 2)):
        say("mmcv._ext.roi_align", mode, ratio)
        settings = dict(
            aligned_height=2, aligned_width=2, spatial_scale=1.0, sampling_ratio=ratio, aligned=True
        )
        out, kept, grad = x.new_zeros(len(rois), 3, 2, 2), x.new_zeros(0), torch.zeros_like(x)
        mmcv_ext.roi_align_forward(x, rois, out, kept, kept, pool_mode=mode, **settings)
        mmcv_ext.roi_align_backward(torch.ones_like(out), rois, kept, kept, grad, pool_mode=mode, **settings)
        assert not out[: len(MISSING)].any() and out.isfinite().all() and grad.isfinite().all()
    say("mmcv._ext.roi_pool")
    out, argmax = x.new_zeros(len(rois), 3, 2, 2), x.new_zeros(len(rois), 3, 2, 2, dtype=torch.int32)
    settings = dict(pooled_height=2, pooled_width=2, spatial_scale=1.0)
    mmcv_ext.roi_pool_forward(x, rois, out, argmax, **settings)
    grad = torch.zeros_like(x).transpose(2, 3).contiguous().transpose(2, 3)  # strides of its own
    mmcv_ext.roi_pool_backward(torch.ones_like(out), rois, argmax, grad, **settings)
    leaf = x.detach().requires_grad_()
    torch.testing.assert_close(grad, torch.autograd.grad(ops.roi_pool(leaf, rois, 2).sum(), leaf)[0])
    for index in (-5, 63, 1 << 30):
        mmcv_ext.roi_pool_backward(
            torch.ones_like(out), rois, torch.full_like(argmax, index), grad, **settings
        )
        assert not grad.any()
    say("mmcv._ext.masked_im2col and masked_col2im")
    rows = torch.tensor([0, -9, 6, 1 << 40, 3], device=device)
    columns = torch.tensor([0, 2, 99, 1, 4], device=device)
    taps = x.new_zeros(27, 5)
    mmcv_ext.masked_im2col_forward(x[:1], rows, columns, taps, kernel_h=3, kernel_w=3, pad_h=1, pad_w=1)
    unfolded = torch.nn.functional.unfold(x[:1], 3, padding=1)[0]
    torch.testing.assert_close(taps[:, [0, 4]], unfolded[:, [0, 3 * 9 + 4]])
    assert not taps[:, 1:4].any()
    image, values = torch.ones_like(x[:1]), x.new_full((3, 5), 7.0)
    mmcv_ext.masked_col2im_forward(values, rows, columns, image, height=7, width=9, channels=3)
    assert (image[0, :, 0, 0] == 7).all() and (image[0, :, 3, 4] == 7).all() and image.sum() == 3 * 63 + 6 * 6


CHECKS = {
    name.removeprefix("check_"): check for name, check in globals().items() if name.startswith("check_")
}
CHECKS.pop("kept")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda])])
def test_bad_numbers_break_nothing(device):
    command = [sys.executable, "-X", "faulthandler", __file__, device]
    root = Path(__file__).resolve().parents[2]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=environment)
    last = done.stdout.splitlines()[-1:] or ["nothing"]
    assert done.returncode == 0, f"exit status {done.returncode} after {last[0]!r}\n{done.stderr}"
    assert last == ["done"]


if __name__ == "__main__":
    for name, check in CHECKS.items():
        say(name)
        check(sys.argv[1])
        if sys.argv[1] == "cuda":
            torch.cuda.synchronize()
    say("done")
