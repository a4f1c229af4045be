"""mmcv._ext's functions on what no operator may read foreign memory for: regions of no image, and huge numbers."""

import itertools
import math

import torch

from visdet import ops
from visdet.compat import mmcv_ext

NAN, INF = math.nan, math.inf
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


def within_foreign_memory(values):
    """Return the same numbers, with FOREIGN before, between and behind them."""
    window = values.new_full((*values.shape[:-1], values.shape[-1] + 5), FOREIGN)[..., 2:-3]
    return window.copy_(values)


def test_no_number_leads_out_of_the_memory(device):
    x = within_foreign_memory(torch.randn(2, 3, 7, 9, device=device))
    rois = torch.tensor(MISSING + STRANGE + SOUND, device=device)
    for mode, ratio in itertools.product((0, 1), (0, 2)):
        settings = dict(
            aligned_height=2, aligned_width=2, spatial_scale=1.0, sampling_ratio=ratio, aligned=True
        )
        out, kept, grad = x.new_zeros(len(rois), 3, 2, 2), x.new_zeros(0), torch.zeros_like(x)
        mmcv_ext.roi_align_forward(x, rois, out, kept, kept, pool_mode=mode, **settings)
        mmcv_ext.roi_align_backward(torch.ones_like(out), rois, kept, kept, grad, pool_mode=mode, **settings)
        assert not out[: len(MISSING)].any() and out.isfinite().all() and grad.isfinite().all()
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
