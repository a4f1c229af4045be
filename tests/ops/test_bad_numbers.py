"""What no operator may crash on, or read foreign memory for: regions of no image, classes of nothing, huge numbers.

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
from visdet.ops.focal_loss import sigmoid_focal_loss_reference
from visdet.ops.roi_align import roi_align_reference

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


def spoilt(values, seed):
    generator = torch.Generator().manual_seed(seed)
    bad = torch.tensor(BAD[:5])[torch.randint(5, values.shape, generator=generator)].to(values)
    is_bad = (torch.rand(values.shape, generator=generator) < 0.02).to(values.device)
    return within_foreign_memory(torch.where(is_bad, bad, values))


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
