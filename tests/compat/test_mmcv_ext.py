"""The stand-in for mmcv._ext: its entries write into given tensors, as mmcv's wrappers expect."""

import pytest
import torch

from visdet import ops
from visdet.compat import mmcv_ext


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.cuda])])
def device(request):
    """Make every tensor of a test on this device."""
    with torch.device(request.param):
        yield request.param


def rois():
    return torch.tensor([[0, 0.5, 1, 5.3, 4], [1, 1, 2, 5, 4.5]]).double()


def leaf(*shape, seed=0):
    generator = torch.Generator("cpu").manual_seed(seed)
    values = torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")
    return values.to(torch.get_default_device()).requires_grad_()


def gradients(out, inputs):
    grad = leaf(*out.shape, seed=9).detach()
    return grad, torch.autograd.grad(out, inputs, grad)


@pytest.mark.parametrize("mode", ["max", "avg"])
def test_roi_align(mode, device):
    x, regions = leaf(2, 3, 6, 7), rois()
    expected = ops.roi_align(x, regions, 2, 1.0, 2, mode)
    grad, (grad_expected,) = gradients(expected, [x])
    settings = dict(aligned_height=2, aligned_width=2, spatial_scale=1.0, sampling_ratio=2, aligned=True)
    settings["pool_mode"] = ("max", "avg").index(mode)
    out, argmax_y, argmax_x, grad_x = (
        torch.zeros_like(expected),
        x.new_zeros(0),
        x.new_zeros(0),
        torch.zeros_like(x),
    )
    mmcv_ext.roi_align_forward(x.detach(), regions, out, argmax_y, argmax_x, **settings)
    mmcv_ext.roi_align_backward(grad, regions, argmax_y, argmax_x, grad_x, **settings)
    torch.testing.assert_close(out, expected.detach())
    torch.testing.assert_close(grad_x, grad_expected)


def test_roi_pool(device):
    x, regions = leaf(2, 3, 6, 7), rois()
    expected = ops.roi_pool(x, regions, 2)
    grad, (grad_expected,) = gradients(expected, [x])
    out, argmax, grad_x = torch.zeros_like(expected), torch.zeros(2, 3, 2, 2).int(), torch.zeros_like(x)
    settings = dict(pooled_height=2, pooled_width=2, spatial_scale=1.0)
    mmcv_ext.roi_pool_forward(x.detach(), regions, out, argmax, **settings)
    mmcv_ext.roi_pool_backward(grad, regions, argmax, grad_x, **settings)
    torch.testing.assert_close(out, expected.detach())
    torch.testing.assert_close(grad_x, grad_expected)


@pytest.mark.parametrize("name", ["sigmoid", "softmax"])
@pytest.mark.parametrize("weighted", [False, True])
def test_focal_losses(name, weighted, device):
    logits, target = leaf(5, 4), torch.tensor([0, 3, 2, 1, 1])
    weight = torch.rand(4, dtype=torch.float64) if weighted else torch.zeros(0, dtype=torch.float64)
    loss = getattr(ops, f"{name}_focal_loss")
    expected = loss(logits, target, 2.0, 0.25, weight if weighted else None, "none")
    (grad_expected,) = torch.autograd.grad(expected.sum(), logits)
    out, grad = torch.zeros_like(expected), torch.zeros_like(logits)
    given = logits.detach() if name == "sigmoid" else logits.detach().softmax(1)
    buffer = [] if name == "sigmoid" else [torch.zeros(5, dtype=torch.float64)]
    getattr(mmcv_ext, f"{name}_focal_loss_forward")(given, target, weight, out, gamma=2.0, alpha=0.25)
    getattr(mmcv_ext, f"{name}_focal_loss_backward")(
        given, target, weight, *buffer, grad, gamma=2.0, alpha=0.25
    )
    torch.testing.assert_close(out, expected.detach())
    torch.testing.assert_close(grad, grad_expected)


def test_modulated_deform_conv(device):
    x, offset, mask, weight, bias = (
        leaf(2, 4, 5, 6),
        leaf(2, 18, 5, 6),
        leaf(2, 9, 5, 6),
        leaf(3, 4, 3, 3),
        leaf(3),
    )
    inputs = [x, offset, mask, weight, bias]
    expected = ops.modulated_deform_conv2d(x, offset, mask, weight, bias, 1, 1)
    grad, grads_expected = gradients(expected, inputs)
    settings = dict(
        kernel_h=3, kernel_w=3, stride_h=1, stride_w=1, pad_h=1, pad_w=1, dilation_h=1, dilation_w=1
    )
    settings |= dict(group=1, deformable_group=1, with_bias=True)
    x, offset, mask, weight, bias = (t.detach() for t in inputs)
    out, empty = torch.zeros_like(expected), x.new_empty(0)
    mmcv_ext.modulated_deform_conv_forward(x, weight, bias, empty, offset, mask, out, empty, **settings)
    torch.testing.assert_close(out, expected.detach())
    gx, go, gm, gw, gb = (torch.zeros_like(t) for t in inputs)
    mmcv_ext.modulated_deform_conv_backward(
        x, weight, bias, empty, offset, mask, empty, gx, gw, gb, go, gm, grad, **settings
    )
    for found, wanted in zip((gx, go, gm, gw, gb), grads_expected, strict=True):
        torch.testing.assert_close(found, wanted)


def test_an_offset_and_mask_of_more_places_are_read_from_the_start_of_each_image(device):
    """DyHead gives the offset of a level of 6 x 5 places to a convolution with an output of 3 x 4."""
    x, weight, bias = leaf(2, 4, 3, 4), leaf(3, 4, 3, 3), leaf(3)
    offset, mask = leaf(2, 27, 6, 5)[:, :18].detach(), leaf(2, 9, 6, 5).detach()
    leaves = [x, *(t.clone().requires_grad_() for t in (offset, mask)), weight, bias]
    read = [
        torch.stack([image.reshape(-1)[: C * 12].view(C, 3, 4) for image in t])
        for t, C in ((leaves[1], 18), (leaves[2], 9))
    ]
    expected = ops.modulated_deform_conv2d(x, *read, weight, bias, 1, 1)
    grad, grads_expected = gradients(expected, leaves)
    sides = {f"{name}_{side}": 1 for name in ("stride", "pad", "dilation") for side in "hw"}
    settings = sides | dict(kernel_h=3, kernel_w=3, group=1, deformable_group=1, with_bias=True)
    x, weight, bias = x.detach(), weight.detach(), bias.detach()
    out, empty = torch.zeros_like(expected), x.new_empty(0)
    mmcv_ext.modulated_deform_conv_forward(x, weight, bias, empty, offset, mask, out, empty, **settings)
    torch.testing.assert_close(out, expected.detach())
    gx, go, gm, gw, gb = (torch.zeros_like(t) for t in (x, offset, mask, weight, bias))
    mmcv_ext.modulated_deform_conv_backward(
        x, weight, bias, empty, offset, mask, empty, gx, gw, gb, go, gm, grad, **settings
    )
    for found, wanted in zip((gx, go, gm, gw, gb), grads_expected, strict=True):
        torch.testing.assert_close(found, wanted)
    with pytest.raises(ValueError, match=r"offset must be"):
        small = offset[..., :2, :2].contiguous()
        mmcv_ext.modulated_deform_conv_forward(x, weight, bias, empty, small, mask, out, empty, **settings)


def test_carafe_and_masked_convolution(device):
    x, masks = leaf(1, 4, 3, 3), leaf(1, 9, 6, 6)
    expected = ops.carafe(x, masks, 3, 1, 2)
    grad, grads_expected = gradients(expected, [x, masks])
    out, kept, gx, gm = (
        torch.zeros_like(expected),
        torch.zeros_like(x),
        torch.zeros_like(x),
        torch.zeros_like(masks),
    )
    sizes = dict(kernel_size=3, group_size=1, scale_factor=2)
    mmcv_ext.carafe_forward(x.detach(), masks.detach(), kept, None, None, out, **sizes)
    mmcv_ext.carafe_backward(grad, kept, masks.detach(), None, None, None, None, gx, gm, **sizes)
    for found, wanted in zip((out, gx, gm), (expected.detach(), *grads_expected), strict=True):
        torch.testing.assert_close(found, wanted)
    column = torch.zeros(4 * 9, 2, dtype=torch.float64)
    rows, columns = torch.tensor([0, 2]), torch.tensor([1, 2])
    mmcv_ext.masked_im2col_forward(
        x.detach(), rows, columns, column, kernel_h=3, kernel_w=3, pad_h=1, pad_w=1
    )
    unfolded = torch.nn.functional.unfold(x.detach(), 3, padding=1)[0]
    torch.testing.assert_close(column, unfolded[:, [1, 8]])

    image = torch.zeros(1, 2, 3, 3, dtype=torch.float64)
    mmcv_ext.masked_col2im_forward(
        torch.tensor([[1.0, 2], [3, 4]]).double(), rows, columns, image, height=3, width=3, channels=2
    )
    assert image[0, :, 0, 1].tolist() == [1, 3] and image[0, :, 2, 2].tolist() == [2, 4] and image.sum() == 10


def test_carafe_naive(device):
    x, masks = leaf(1, 4, 3, 3), leaf(1, 18, 6, 6)
    expected = ops.carafe_naive(x, masks, 3, 2, 2)
    grad, grads_expected = gradients(expected, [x, masks])
    out, gx, gm = torch.zeros_like(expected), torch.zeros_like(x), torch.zeros_like(masks)
    sizes = dict(kernel_size=3, group_size=2, scale_factor=2)
    mmcv_ext.carafe_naive_forward(x.detach(), masks.detach(), out, **sizes)
    mmcv_ext.carafe_naive_backward(grad, x.detach(), masks.detach(), gx, gm, **sizes)
    for found, wanted in zip((out, gx, gm), (expected.detach(), *grads_expected), strict=True):
        torch.testing.assert_close(found, wanted)


def test_deform_conv_of_version_one(device):
    torchvision_ops = pytest.importorskip("torchvision.ops")
    x, offset, weight = leaf(2, 4, 5, 6), leaf(2, 2 * 2 * 6, 3, 4, seed=1), leaf(6, 2, 3, 2, seed=2)
    expected = torchvision_ops.deform_conv2d(x, offset, weight, None, (2, 1), (1, 0), (1, 2))
    grad, grads_expected = gradients(expected, [x, offset, weight])
    settings = dict(kW=2, kH=3, dW=1, dH=2, padW=0, padH=1, dilationW=2, dilationH=1)
    settings |= dict(group=2, deformable_group=2, im2col_step=2)
    x, offset, weight = x.detach(), offset.detach(), weight.detach()
    out, none = torch.full_like(expected, 7.0), x.new_empty(0)
    mmcv_ext.deform_conv_forward(x, weight, offset, out, none, none, **settings)
    torch.testing.assert_close(out, expected.detach())
    gx, go, gw = torch.zeros_like(x), torch.zeros_like(offset), torch.zeros_like(weight)
    mmcv_ext.deform_conv_backward_input(x, offset, grad, gx, go, weight, none, **settings)
    mmcv_ext.deform_conv_backward_parameters(x, offset, grad, gw, none, none, scale=0.5, **settings)
    for found, wanted in zip((gx, go, 2 * gw), grads_expected, strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("with_offset", [False, True])
def test_deform_roi_pool(with_offset, device):
    x, regions = leaf(2, 3, 6, 7), rois()
    offset = leaf(2, 2, 2, 2, seed=3) if with_offset else x.new_zeros(0)
    expected = ops.deform_roi_pool(x, regions, offset, 2, 0.9, 2, 0.1)
    inputs = [x, offset] if with_offset else [x]
    grad, grads_expected = gradients(expected, inputs)
    settings = dict(pooled_height=2, pooled_width=2, spatial_scale=0.9, sampling_ratio=2, gamma=0.1)
    out, gx, go = torch.zeros_like(expected), torch.zeros_like(x), torch.zeros_like(offset)
    x, offset = x.detach(), offset.detach()
    mmcv_ext.deform_roi_pool_forward(x, regions, offset, out, **settings)
    mmcv_ext.deform_roi_pool_backward(grad, x, regions, offset, gx, go, **settings)
    for found, wanted in zip((out, gx, go), (expected.detach(), *grads_expected), strict=False):
        torch.testing.assert_close(found, wanted)


def test_ms_deform_attn(device):
    shapes = torch.tensor([[4, 5], [2, 3]])
    starts = torch.tensor([0, 20])
    value, locations, weights = leaf(2, 26, 2, 4), leaf(2, 3, 2, 2, 4, 2, seed=1), leaf(2, 3, 2, 2, 4, seed=2)
    locations = (locations.detach() * 0.4 + 0.5).requires_grad_()
    expected = ops.ms_deform_attn_reference(value, shapes, starts, locations, weights)
    grad, grads_expected = gradients(expected, [value, locations, weights])
    value, locations, weights = value.detach(), locations.detach(), weights.detach()
    out = mmcv_ext.ms_deform_attn_forward(value, shapes, starts, locations, weights, im2col_step=64)
    torch.testing.assert_close(out, expected.detach())
    found = [torch.zeros_like(t) for t in (value, locations, weights)]
    mmcv_ext.ms_deform_attn_backward(value, shapes, starts, locations, weights, grad, *found, im2col_step=64)
    for one, wanted in zip(found, grads_expected, strict=True):
        torch.testing.assert_close(one, wanted)


BOXES = [
    [0.0, 0, 10, 10],
    [5, 0, 15, 10],
    [0, 0, 10, 9],
    [20, 20, 30, 30],
]  # IoU with the first: 1/3, 9/10, 0
SCORES = [0.9, 0.8, 0.7, 0.6]


def test_entries_over_boxes(device):
    boxes, scores = torch.tensor(BOXES), torch.tensor(SCORES)
    assert mmcv_ext.nms(boxes, scores, iou_threshold=0.5, offset=0).tolist() == [0, 1, 3]
    ious = torch.zeros(4, 4)
    mmcv_ext.bbox_overlaps(boxes, boxes, ious, mode=0, aligned=False, offset=0)
    torch.testing.assert_close(ious[0], torch.tensor([1, 1 / 3, 0.9, 0]))
    iofs = torch.zeros(4)
    mmcv_ext.bbox_overlaps(boxes, boxes.flip(0), iofs, mode=1, aligned=True, offset=1)
    assert iofs.tolist() == pytest.approx([0, 6 * 10 / (11 * 11), 6 * 10 / (11 * 10), 0])
    groups = mmcv_ext.nms_match(torch.cat([boxes, scores[:, None]], 1), iou_threshold=0.5)
    assert groups == [[0, 2], [1], [3]]


@pytest.mark.parametrize("method", range(3))
def test_softnms_writes_into_the_given_tensor(method):
    boxes, scores, dets = torch.tensor(BOXES), torch.tensor(SCORES), torch.full((4, 5), -1.0)
    settings = dict(iou_threshold=0.3, sigma=0.5, min_score=1e-3, method=method, offset=0)
    keep = mmcv_ext.softnms(boxes, scores, dets, **settings)
    settings["method"] = ("naive", "linear", "gaussian")[method]
    expected, expected_keep = ops.soft_nms(boxes, scores, **settings)
    assert torch.equal(keep, expected_keep) and torch.equal(dets[: len(keep)], expected)
    assert len(keep) == (2, 4, 4)[method] and (dets[len(keep) :] == -1).all()


X, REGIONS = torch.zeros(2, 3, 6, 7), torch.zeros(4, 5)
POOLED, OTHER = torch.zeros(4, 3, 2, 2), torch.zeros(1, 3, 2, 2)
ALIGN = dict(aligned_height=2, aligned_width=2, spatial_scale=1.0, sampling_ratio=2, aligned=True)
POOL = dict(pooled_height=2, pooled_width=2, spatial_scale=1.0)
NONE = torch.zeros(0)
CARAFE = dict(kernel_size=3, group_size=1, scale_factor=2)
MASKS = torch.zeros(2, 9, 12, 14)
TARGET = torch.zeros(4).long()
SOFT = dict(iou_threshold=0.3, sigma=0.5, min_score=1e-3, offset=0)
OVERLAP = dict(aligned=False, offset=0)


@pytest.mark.parametrize(
    ("entry", "arguments", "settings", "message"),
    [
        ("roi_align_forward", (X, REGIONS, OTHER, NONE, NONE), ALIGN | dict(pool_mode=1), "output must be"),
        (
            "roi_align_forward",
            (X, REGIONS, POOLED, NONE, NONE),
            ALIGN | dict(pool_mode=2),
            "pool_mode must be one",
        ),
        (
            "roi_align_backward",
            (OTHER, REGIONS, NONE, NONE, X),
            ALIGN | dict(pool_mode=1),
            "grad_output must be",
        ),
        (
            "roi_align_backward",
            (POOLED, torch.zeros(4, 6), NONE, NONE, X),
            ALIGN | dict(pool_mode=1),
            "rois must be",
        ),
        (
            "roi_align_backward",
            (POOLED, REGIONS, X, X, X[:1]),
            ALIGN | dict(pool_mode=0),
            "grad_input must be",
        ),
        ("roi_pool_forward", (X, REGIONS, POOLED, OTHER.int()), POOL, "argmax must be"),
        (
            "deform_roi_pool_backward",
            (OTHER, X, REGIONS, NONE, X.clone(), NONE),
            POOL | dict(sampling_ratio=2, gamma=0.1),
            "grad_output must be",
        ),
        ("carafe_naive_forward", (X, MASKS, OTHER), CARAFE, "output must be"),
        ("carafe_naive_backward", (OTHER, X, MASKS, X.clone(), MASKS.clone()), CARAFE, "grad_output must be"),
        (
            "sigmoid_focal_loss_forward",
            (REGIONS, TARGET, NONE, OTHER),
            dict(gamma=2.0, alpha=0.25),
            "output must be",
        ),
        ("softnms", (REGIONS[:, 1:], REGIONS[:, 0], POOLED), SOFT | dict(method=0), "dets must be"),
        (
            "softnms",
            (REGIONS[:, 1:], REGIONS[:, 0], REGIONS),
            SOFT | dict(method=-1),
            "method must be one of",
        ),
        ("bbox_overlaps", (REGIONS[:, 1:], REGIONS[:, 1:], POOLED), OVERLAP | dict(mode=0), "ious must be"),
        (
            "bbox_overlaps",
            (REGIONS[:, 1:], REGIONS[:, 1:], POOLED),
            OVERLAP | dict(mode=-1),
            "mode must be one of",
        ),
        (
            "masked_im2col_forward",
            (X[:1], TARGET, TARGET, OTHER),
            dict(kernel_h=3, kernel_w=3, pad_h=1, pad_w=1),
            "data_col must be",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_tensors_of_wrong_sizes_are_refused_by_name(entry, arguments, settings, message):
    with pytest.raises(
        (ValueError, RuntimeError), match=rf"{entry}: .*{message}.*, got|roi_align.*{message}.*got"
    ):
        getattr(mmcv_ext, entry)(*arguments, **settings)


def test_other_entries_say_what_to_do():
    with pytest.raises(
        NotImplementedError, match=r"mmcv\._ext\.of_no_operator.*compiled from the sources of mmcv"
    ):
        mmcv_ext.of_no_operator(torch.zeros(1))
