"""The stand-in for mmcv._ext: its entries write into given tensors, as mmcv's wrappers expect."""

import pytest
import torch
from entries import check_entries, device, leaf  # noqa: F401
from torch.testing import assert_close

from visdet import ops
from visdet.compat import mmcv_ext as ext
from visdet.compat import msda_ext
from visdet.ops.mmcv import aligned_pooling, map_correlation

on_each_device = pytest.mark.usefixtures("device")


def rois():
    return torch.tensor([[0, 0.5, 1, 5.3, 4], [1, 1, 2, 5, 4.5]]).double()


def empty():
    return torch.zeros(0, dtype=torch.float64)


ALIGN = dict(aligned_height=2, aligned_width=2, spatial_scale=1.0, sampling_ratio=2, aligned=True)
POOL = dict(pooled_height=2, pooled_width=2, spatial_scale=1.0)
ONCE = {f"{name}_{side}": 1 for name in ("stride", "pad", "dilation") for side in "hw"}
MODULATED = dict(kernel_h=3, kernel_w=3, group=1, deformable_group=1, with_bias=True) | ONCE
VERSION_1 = dict(
    kW=2, kH=3, dW=1, dH=2, padW=0, padH=1, dilationW=2, dilationH=1, group=2, deformable_group=2
)


def roi_align(mode):
    settings, kept = ALIGN | dict(pool_mode=("max", "avg").index(mode)), empty()
    return (
        lambda x: ops.roi_align(x, rois(), 2, 1.0, 2, mode),
        [leaf(2, 3, 6, 7)],
        lambda x, out: ext.roi_align_forward(x, rois(), out, kept, empty(), **settings),
        lambda grad, x, gx: ext.roi_align_backward(grad, rois(), kept, empty(), gx, **settings),
    )


def roi_pool():
    argmax = torch.zeros(2, 3, 2, 2).int()
    return (
        lambda x: ops.roi_pool(x, rois(), 2),
        [leaf(2, 3, 6, 7)],
        lambda x, out: ext.roi_pool_forward(x, rois(), out, argmax, **POOL),
        lambda grad, x, gx: ext.roi_pool_backward(grad, rois(), argmax, gx, **POOL),
    )


def modulated_deform_conv():
    return (
        lambda x, o, m, w, b: ops.modulated_deform_conv2d(x, o, m, w, b, 1, 1),
        [leaf(2, 4, 5, 6), leaf(2, 18, 5, 6), leaf(2, 9, 5, 6), leaf(3, 4, 3, 3), leaf(3)],
        lambda x, o, m, w, b, out: ext.modulated_deform_conv_forward(
            x, w, b, empty(), o, m, out, empty(), **MODULATED
        ),
        lambda grad, x, o, m, w, b, gx, go, gm, gw, gb: ext.modulated_deform_conv_backward(
            x, w, b, empty(), o, m, empty(), gx, gw, gb, go, gm, grad, **MODULATED
        ),
    )


def offset_and_mask_of_more_places():
    """DyHead gives the offset of a level of 6 x 5 places, read from the start of each image, for an output of 3 x 4."""

    def read(t):
        return torch.stack([image.reshape(-1)[: len(image) * 12].view(-1, 3, 4) for image in t])

    function, inputs, *entries = modulated_deform_conv()
    inputs = [leaf(2, 4, 3, 4), leaf(2, 18, 6, 5), leaf(2, 9, 6, 5), *inputs[3:]]
    return lambda x, o, m, w, b: function(x, read(o), read(m), w, b), inputs, *entries


def deform_conv_of_version_1():
    """The gradients of the weight are added times a scale."""
    torchvision_ops = pytest.importorskip("torchvision.ops")

    def backward(grad, x, offset, weight, gx, go, gw):
        ext.deform_conv_backward_input(x, offset, grad, gx, go, weight, empty(), **VERSION_1, im2col_step=2)
        ext.deform_conv_backward_parameters(
            x, offset, grad, gw, empty(), empty(), scale=0.5, **VERSION_1, im2col_step=2
        )
        gw *= 2

    return (
        lambda x, o, w: torchvision_ops.deform_conv2d(x, o, w, None, (2, 1), (1, 0), (1, 2)),
        [leaf(2, 4, 5, 6), leaf(2, 24, 3, 4), leaf(6, 2, 3, 2)],
        lambda x, o, w, out: ext.deform_conv_forward(
            x, w, o, out, empty(), empty(), **VERSION_1, im2col_step=2
        ),
        backward,
    )


def deform_roi_pool(with_offset):
    settings = POOL | dict(sampling_ratio=2, gamma=0.1)
    return (
        lambda x, *offset: ops.deform_roi_pool(x, rois(), *offset or (None,), 2, 1.0, 2, 0.1),
        [leaf(2, 3, 6, 7)] + [leaf(2, 2, 2, 2)] * with_offset,
        lambda x, *rest: ext.deform_roi_pool_forward(
            x, rois(), rest[0] if with_offset else empty(), rest[-1], **settings
        ),
        lambda grad, x, *rest: ext.deform_roi_pool_backward(
            grad,
            x,
            rois(),
            rest[0] if with_offset else empty(),
            rest[with_offset],
            rest[-1] if with_offset else empty(),
            **settings,
        ),
    )


def carafe(naive):
    sizes, kept = (
        dict(kernel_size=3, group_size=2, scale_factor=2),
        torch.zeros(1, 4, 3, 3, dtype=torch.float64),
    )
    return (
        lambda x, m: ops.carafe_naive(x, m, 3, 2, 2) if naive else ops.carafe(x, m, 3, 2, 2),
        [leaf(1, 4, 3, 3), leaf(1, 18, 6, 6)],
        lambda x, m, out: (
            ext.carafe_naive_forward(x, m, out, **sizes)
            if naive
            else ext.carafe_forward(x, m, kept, None, None, out, **sizes)
        ),
        lambda grad, x, m, gx, gm: (
            ext.carafe_naive_backward(grad, x, m, gx, gm, **sizes)
            if naive
            else ext.carafe_backward(grad, kept, m, None, None, None, None, gx, gm, **sizes)
        ),
    )


def stack_group_points():
    index, counts, groups = indices()[0], torch.tensor([2, 3]).int(), torch.tensor([1, 3]).int()
    sizes = dict(b=2, c=2, m=4, nsample=3)
    return (
        lambda x: ops.stack_group_points(x, counts, index, groups),
        [leaf(5, 2)],
        lambda x, out: ext.stack_group_points_forward(x, counts, index, groups, out, **sizes),
        lambda grad, x, out: ext.stack_group_points_backward(grad, index, groups, counts, out, n=5, **sizes),
    )


def assign_score_withk():
    sizes, index = dict(B=2, N0=5, N1=4, M=2, K=3, O=3, aggregate=0), indices()
    return (
        lambda x, c, s: ops.assign_score_withk(s, x, c, index),
        [leaf(2, 5, 2, 3), leaf(2, 5, 2, 3), leaf(2, 4, 3, 2)],
        lambda x, c, s, out: ext.assign_score_withk_forward(x, c, s, index, out, **sizes),
        lambda grad, x, c, s, *outs: ext.assign_score_withk_backward(grad, x, c, s, index, *outs, **sizes),
    )


def border_align():
    boxes, argmax = double(1, 3, 4) * 5, torch.zeros(1, 2, 3, 4).int()
    return (
        lambda x: aligned_pooling.border_align(x, boxes, 3),
        [leaf(1, 8, 5, 6)],
        lambda x, out: ext.border_align_forward(x, boxes, out, argmax, 3),
        lambda grad, x, out: ext.border_align_backward(grad, boxes, argmax, out, pool_size=3),
    )


def prroi_coordinates():
    x = leaf(2, 2, 5, 6).detach()
    return (
        lambda r: aligned_pooling.prroi_pool(x, r, (2, 2), 1.0),
        [rois().requires_grad_()],
        lambda r, out: ext.prroi_pool_forward(x, r, out, **POOL),
        lambda grad, r, out: ext.prroi_pool_coor_backward(None, grad, x, r, out, **POOL),
    )


CASES = {
    "stack_group_points": stack_group_points,
    "assign_score_withk": assign_score_withk,
    "border_align": border_align,
    "prroi_pool, coordinates": prroi_coordinates,
    "roi_align max": lambda: roi_align("max"),
    "roi_align avg": lambda: roi_align("avg"),
    "roi_pool": roi_pool,
    "modulated_deform_conv": modulated_deform_conv,
    "an offset and a mask of more places": offset_and_mask_of_more_places,
    "deform_conv": deform_conv_of_version_1,
    "deform_roi_pool": lambda: deform_roi_pool(False),
    "deform_roi_pool with an offset": lambda: deform_roi_pool(True),
    "carafe": lambda: carafe(False),
    "carafe_naive": lambda: carafe(True),
}


@pytest.mark.parametrize("name", CASES)
@on_each_device
def test_forward_and_backward_entries(name):
    check_entries(*CASES[name]())


def indices():
    return (torch.arange(24).view(2, 4, 3) * 7 % 5).int()


def double(*shape):
    return torch.rand(shape, dtype=torch.float64)


def turned():
    return torch.tensor([[0, 3.5, 2, 5.3, 4, 0.5], [1, 3, 2, 4, 2.5, -1]]).double()


def turns():
    return torch.tensor([[1, 2], [2, 4], [4, 3], [3, 1]]).int().view(1, 2, 2, 2)


POINTS = dict(b=2, c=3, n=5, npoints=4)
TURNED = dict(pooled_height=2, pooled_width=2, spatial_scale=0.9)
PSA = dict(num_=1, h_feature=4, w_feature=5, h_mask=3, w_mask=3, half_h_mask=1, half_w_mask=1, psa_type=1)
# For each pair of entries that is linear in its first argument: the operator, that argument, the others, the settings.
LINEAR = {
    "group_points": lambda: (ops.group_points, leaf(2, 3, 5), [indices()], POINTS | dict(nsample=3)),
    "gather_points": lambda: (ops.gather_points, leaf(2, 3, 5), [indices()[..., 0]], POINTS),
    "three_interpolate": lambda: (
        ops.three_interpolate,
        leaf(2, 3, 5),
        [indices(), double(2, 4, 3)],
        dict(b=2, c=3, m=5, n=4),
    ),
    "prroi_pool": lambda: (
        lambda x, r: aligned_pooling.prroi_pool(x, r, (2, 2), 1.0),
        leaf(2, 2, 5, 6),
        [rois()],
        POOL,
    ),
    "psamask": lambda: (
        lambda x: map_correlation.psa_mask(x, "distribute", (3, 3)),
        leaf(1, 9, 4, 5),
        [],
        PSA,
    ),
    "tin_shift": lambda: (
        map_correlation.tin_shift,
        leaf(1, 3, 2, 4),
        [torch.tensor([[1, -1]]).int()],
        {},
    ),
    "roi_align_rotated": lambda: (
        lambda x, r: ops.roi_align_rotated(x, r, 2, 0.9, 2, True, True),
        leaf(2, 8, 6, 7),
        [turned()],
        TURNED | dict(sampling_ratio=2, aligned=True, clockwise=True),
    ),
    "riroi_align_rotated": lambda: (
        lambda x, r: ops.riroi_align_rotated(x, r, 2, 0.9, 2, 4, True),
        leaf(2, 8, 6, 7),
        [turned()],
        TURNED | dict(num_samples=2, num_orientations=4, clockwise=True),
    ),
    "rotated_feature_align": lambda: (
        lambda x, b: ops.rotated_feature_align(x, b, 0.5, 5),
        leaf(2, 3, 4, 5),
        [double(2, 4, 5, 5) * 9],
        dict(spatial_scale=0.5, points=5),
    ),
    "active_rotated_filter": lambda: (ops.active_rotated_filter, leaf(2, 3, 1, 2, 2), [turns()], {}),
}


@pytest.mark.parametrize("name", LINEAR)
@on_each_device
def test_entries_that_are_linear(name):
    function, input, others, settings = LINEAR[name]()
    check_entries(
        lambda x: function(x, *others),
        [input],
        lambda x, out: getattr(ext, f"{name}_forward")(x, *others, out, **settings),
        lambda grad, x, out: getattr(ext, f"{name}_backward")(grad, *others, out, **settings),
    )


@pytest.mark.parametrize("name", ["sigmoid", "softmax"])
@pytest.mark.parametrize("weighted", [False, True])
@on_each_device
def test_focal_losses(name, weighted):
    logits, target = leaf(5, 4), torch.tensor([0, 3, 2, 1, 1])
    weight = torch.rand(4, dtype=torch.float64) if weighted else empty()
    loss = getattr(ops, f"{name}_focal_loss")
    expected = loss(logits, target, 2.0, 0.25, weight if weighted else None, "none")
    out, grad = torch.zeros_like(expected), torch.zeros_like(logits)
    given = logits.detach() if name == "sigmoid" else logits.detach().softmax(1)
    buffer = [] if name == "sigmoid" else [torch.zeros(5, dtype=torch.float64)]
    settings = dict(gamma=2.0, alpha=0.25)
    getattr(ext, f"{name}_focal_loss_forward")(given, target, weight, out, **settings)
    getattr(ext, f"{name}_focal_loss_backward")(given, target, weight, *buffer, grad, **settings)
    assert_close(out, expected.detach())
    assert_close(grad, torch.autograd.grad(expected.sum(), logits)[0])


@on_each_device
def test_ms_deform_attn():
    shapes, starts = torch.tensor([[4, 5], [2, 3]]), torch.tensor([0, 20])
    value, locations, weights = leaf(2, 26, 2, 4), torch.rand(2, 3, 2, 2, 4, 2).double(), leaf(2, 3, 2, 2, 4)
    leaves = [value, locations.requires_grad_(), weights]
    expected = ops.ms_deform_attn_reference(value, shapes, starts, locations, weights)
    given, found = [one.detach() for one in leaves], [torch.zeros_like(one) for one in leaves]
    arguments = given[0], shapes, starts, *given[1:]
    assert_close(ext.ms_deform_attn_forward(*arguments, im2col_step=64), expected.detach())
    ext.ms_deform_attn_backward(*arguments, torch.ones_like(expected), *found, im2col_step=64)
    wanted = torch.autograd.grad(expected.sum(), leaves)
    assert_close(found, list(wanted))
    # The extension of Deformable DETR returns what mmcv's writes.
    assert_close(msda_ext.ms_deform_attn_forward(*arguments, 64), expected.detach())
    given_back = msda_ext.ms_deform_attn_backward(*arguments, torch.ones_like(expected), 64)
    assert_close(list(given_back), list(wanted))


BOXES = [
    [0.0, 0, 10, 10],
    [5, 0, 15, 10],
    [0, 0, 10, 9],
    [20, 20, 30, 30],
]  # IoU with the first: 1/3, 9/10, 0
SCORES = [0.9, 0.8, 0.7, 0.6]


@on_each_device
def test_entries_over_boxes():
    boxes, scores = torch.tensor(BOXES), torch.tensor(SCORES)
    assert ext.nms(boxes, scores, iou_threshold=0.5, offset=0).tolist() == [0, 1, 3]
    ious = torch.zeros(4, 4)
    ext.bbox_overlaps(boxes, boxes, ious, mode=0, aligned=False, offset=0)
    assert_close(ious[0], torch.tensor([1, 1 / 3, 0.9, 0]))
    iofs = torch.zeros(4)
    ext.bbox_overlaps(boxes, boxes.flip(0), iofs, mode=1, aligned=True, offset=1)
    assert iofs.tolist() == pytest.approx([0, 6 * 10 / (11 * 11), 6 * 10 / (11 * 10), 0])
    groups = ext.nms_match(torch.cat([boxes, scores[:, None]], 1), iou_threshold=0.5)
    assert groups == [[0, 2], [1], [3]]


@pytest.mark.parametrize("method", range(3))
def test_softnms_writes_into_the_given_tensor(method):
    boxes, scores, dets = torch.tensor(BOXES), torch.tensor(SCORES), torch.full((4, 5), -1.0)
    settings = dict(iou_threshold=0.3, sigma=0.5, min_score=1e-3, method=method, offset=0)
    keep = ext.softnms(boxes, scores, dets, **settings)
    settings["method"] = ("naive", "linear", "gaussian")[method]
    expected, expected_keep = ops.soft_nms(boxes, scores, **settings)
    assert torch.equal(keep, expected_keep) and torch.equal(dets[: len(keep)], expected)
    assert len(keep) == (2, 4, 4)[method] and (dets[len(keep) :] == -1).all()


X, REGIONS = torch.zeros(2, 3, 6, 7), torch.zeros(4, 5)
CORNERS = REGIONS[:, 1:]
POOLED, OTHER = torch.zeros(4, 3, 2, 2), torch.zeros(1, 3, 2, 2)
NONE = torch.zeros(0)
CARAFE = dict(kernel_size=3, group_size=1, scale_factor=2)
MASKS = torch.zeros(2, 9, 12, 14)
TARGET = torch.zeros(4).long()
SOFT = dict(iou_threshold=0.3, sigma=0.5, min_score=1e-3, offset=0)
OVERLAP = dict(aligned=False, offset=0)


@pytest.mark.parametrize(
    ("entry", "arguments", "settings", "message"),
    [
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
        ("roi_pool_forward", (X, REGIONS, POOLED, OTHER.int()), POOL, "argmax must be"),
        (
            "deform_roi_pool_backward",
            (OTHER, X, REGIONS, NONE, X.clone(), NONE),
            POOL | dict(sampling_ratio=2, gamma=0.1),
            "grad_output must be",
        ),
        ("carafe_naive_backward", (OTHER, X, MASKS, X.clone(), MASKS.clone()), CARAFE, "grad_output must be"),
        (
            "sigmoid_focal_loss_forward",
            (REGIONS, TARGET, NONE, OTHER),
            dict(gamma=2.0, alpha=0.25),
            "output must be",
        ),
        ("softnms", (CORNERS, REGIONS[:, 0], POOLED), SOFT | dict(method=0), "dets must be"),
        (
            "softnms",
            (CORNERS, REGIONS[:, 0], REGIONS),
            SOFT | dict(method=-1),
            "method must be one of",
        ),
        ("bbox_overlaps", (CORNERS, CORNERS, POOLED), OVERLAP | dict(mode=0), "ious must be"),
        (
            "bbox_overlaps",
            (CORNERS, CORNERS, POOLED),
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
        getattr(ext, entry)(*arguments, **settings)


def test_other_entries_say_what_to_do():
    with pytest.raises(
        NotImplementedError, match=r"mmcv\._ext\.of_no_operator.*compiled from the sources of mmcv"
    ):
        ext.of_no_operator(torch.zeros(1))
