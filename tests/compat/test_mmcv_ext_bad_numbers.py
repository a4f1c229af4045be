"""mmcv._ext's functions on indices of no pixel, by which no operator may read or write foreign memory."""

import torch
from torch.testing import assert_close

from visdet import ops
from visdet.compat import mmcv_ext


def test_no_index_leads_out_of_the_memory(device):
    x, rois = torch.randn(2, 3, 7, 9, device=device), torch.tensor([[0, 0.5, 1, 6.3, 5]], device=device)
    out, argmax = x.new_zeros(1, 3, 2, 2), torch.zeros(1, 3, 2, 2, dtype=torch.int32, device=device)
    settings = dict(pooled_height=2, pooled_width=2, spatial_scale=1.0)
    mmcv_ext.roi_pool_forward(x, rois, out, argmax, **settings)
    grad = torch.zeros_like(x).transpose(2, 3).contiguous().transpose(2, 3)  # strides of its own
    mmcv_ext.roi_pool_backward(torch.ones_like(out), rois, argmax, grad, **settings)
    leaf = x.detach().requires_grad_()
    assert_close(grad, torch.autograd.grad(ops.roi_pool(leaf, rois, 2).sum(), leaf)[0])
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
    assert_close(taps[:, [0, 4]], unfolded[:, [0, 3 * 9 + 4]])
    assert not taps[:, 1:4].any()
    image, values = torch.ones_like(x[:1]), x.new_full((3, 5), 7.0)
    mmcv_ext.masked_col2im_forward(values, rows, columns, image, height=7, width=9, channels=3)
    assert (image[0, :, 0, 0] == 7).all() and (image[0, :, 3, 4] == 7).all() and image.sum() == 3 * 63 + 6 * 6
