"""Kernels of the detection operators under torch.compile and export, what they refuse, and Soft-NMS."""

import pytest
import torch
from detection_cases import CASES, draw
from torch.library import opcheck

from visdet.ops import _library, carafe, roi_pool, sigmoid_focal_loss, soft_nms
from visdet.ops.soft_nms import SOFT_METHODS, soft_nms_reference


@pytest.mark.parametrize(
    ("case", "position", "replacement", "message"),
    [
        ("roi_pool", 0, lambda t: t[0], r"roi_pool: input must be \[B, C, H, W\], got \[3, 9, 11\]"),
        (
            "roi_pool",
            0,
            lambda t: t.int(),
            "roi_pool: input must be float64, float32, float16 or bfloat16, got Int",
        ),
        ("roi_pool", 1, lambda t: t[:, 1:], r"roi_pool: rois must be \[N, 5\], got \[7, 4\]"),
        (
            "roi_pool",
            1,
            lambda t: t.double(),
            "roi_pool: rois must be Float for input of type Float, got Double",
        ),
        ("roi_pool", 2, lambda _: 0, "roi_pool: output_size must be positive, got 0 x 2"),
        ("focal", 0, lambda t: t[0], r"sigmoid_focal_loss: input must be \[N, C\], got \[7\]"),
        ("focal", 0, lambda t: t.int(), "input must be float64, float32, float16 or bfloat16, got Int"),
        ("focal", 1, lambda t: t[1:], r"target must be \[13\], got \[12\]"),
        ("focal", 1, lambda t: t.int(), "target must be int64, got Int"),
        ("focal", 2, lambda t: t[1:], r"weight must be \[7\] or empty, got \[6\]"),
        ("focal", 2, lambda t: t.double(), "weight must be Float for input of type Float, got Double"),
        ("carafe", 0, lambda t: t[0], r"carafe: features must be \[B, C, H, W\], got \[6, 5, 7\]"),
        ("carafe", 0, lambda t: t.int(), "features must be float64, float32, float16 or bfloat16, got Int"),
        ("carafe", 1, lambda t: t[:, 1:], r"masks must be \[2, 18, 10, 14\], got \[2, 17, 10, 14\]"),
        ("carafe", 1, lambda t: t.double(), "masks must be Float, the type of features, got Double"),
        ("carafe", 2, lambda _: 2, "kernel_size must be odd and below 256, got 2"),
        ("carafe", 3, lambda _: 4, "features must have a multiple of 4 channels, got 6"),
        ("carafe", 4, lambda _: 0, "scale_factor must be from 1 to 255, got 0"),
    ],
)
def test_rejections(case, position, replacement, message):
    setup = CASES[case](torch.float32, "cpu")
    arguments = list(setup.arguments)
    arguments[position] = replacement(arguments[position])
    with pytest.raises(RuntimeError, match=message):
        setup.op(*arguments)


def soft_boxes(N, dtype, grid=False):
    generator = torch.Generator().manual_seed(N)
    corner = torch.rand(N, 2, generator=generator) * 60
    extent = torch.rand(N, 2, generator=generator) * 40 + 1
    scores = torch.rand(N, generator=generator)
    if grid:  # many equal overlaps and scores
        corner, extent, scores = corner.round(), torch.full_like(extent, 20), (scores * 8).round() / 8
    return torch.cat([corner, corner + extent], 1).to(dtype), scores.to(dtype)


@pytest.mark.parametrize("grid", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("N", [0, 1, 2, 15, 16, 17, 300])
@pytest.mark.parametrize("method", range(3))
def test_soft_nms_matches_reference(method, N, dtype, grid):
    boxes, scores = soft_boxes(N, dtype, grid)
    for offset, min_score in ((0, 1e-3), (1, 0.2)):
        settings = (0.3, 0.5, min_score, method, offset)
        dets, keep = torch.ops.visdet.soft_nms(boxes, scores, None, *settings)
        expected, expected_keep = soft_nms_reference(boxes, scores, *settings)
        assert torch.equal(keep, expected_keep)
        torch.testing.assert_close(dets, expected, rtol=1e-5 if dtype == torch.float32 else 1e-11, atol=0)


@pytest.mark.parametrize("method", SOFT_METHODS)
def test_soft_nms_of_what_is_no_box(method):
    boxes, scores = soft_boxes(20, torch.float64)
    boxes[3], boxes[5, 2], boxes[7] = boxes[3, 0], float("nan"), float("inf")  # no area, no number, no end
    scores[2], scores[9], scores[11] = float("nan"), float("inf"), -float("inf")
    settings = (0.3, 0.5, 1e-3, SOFT_METHODS.index(method), 0)
    found, expected = (
        torch.ops.visdet.soft_nms(boxes, scores, None, *settings),
        soft_nms_reference(boxes, scores, *settings),
    )
    assert torch.equal(found[1], expected[1]) and found[1][-1] == 2
    torch.testing.assert_close(found[0], expected[0], equal_nan=True)


def test_soft_nms_registration():
    boxes, scores = soft_boxes(9, torch.float32)
    for classes in (None, torch.arange(9) % 3):
        opcheck(torch.ops.visdet.soft_nms.default, (boxes, scores, classes, 0.3, 0.5, 1e-3, 1, 0))
    program = torch.export.export(SoftNms(), (boxes, scores))
    for found, wanted in zip(program.module()(boxes, scores), soft_nms(boxes, scores), strict=True):
        assert torch.equal(found, wanted)


class SoftNms(torch.nn.Module):
    def forward(self, boxes, scores):
        return soft_nms(boxes, scores)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(3, 5), torch.zeros(3)), r"soft_nms: boxes must be \[N, 4\], got \[3, 5\]"),
        ((torch.zeros(3, 4).half(), torch.zeros(3)), "soft_nms: boxes must be float64 or float32, got Half"),
        ((torch.zeros(3, 4), torch.zeros(2)), r"soft_nms: scores must be \[3\], got \[2\]"),
        ((torch.zeros(3, 4), torch.zeros(3).double()), "scores must be Float, the type of boxes, got Double"),
        ((torch.zeros(3, 4), torch.zeros(3), torch.zeros(2).long()), r"classes must be \[3\], got \[2\]"),
        ((torch.zeros(3, 4), torch.zeros(3), torch.zeros(3)), "classes must be int64, got Float"),
        ((torch.zeros(3, 4), torch.zeros(3), None, 0.3, 0.5, 0.0, 3), "method must be 0, 1 or 2, got 3"),
        ((torch.zeros(3, 4), torch.zeros(3), None, 0.3, 0.0, 0.0, 2), "sigma must be positive, got 0"),
    ],
)
def test_soft_nms_rejections(arguments, message):
    settings = (None, 0.3, 0.5, 0.0, 1, 0)
    with pytest.raises(RuntimeError, match=message):
        torch.ops.visdet.soft_nms(*arguments, *settings[len(arguments) - 2 :])
    with pytest.raises(ValueError, match="soft_nms: sigma must be positive, got 0"):
        soft_nms(torch.zeros(3, 4), torch.zeros(3), sigma=0, method="gaussian")


def test_without_the_library_the_reference_runs(monkeypatch):
    boxes, scores = soft_boxes(30, torch.float32)
    x, logits = draw(1, 4, 3, 3).float(), draw(5, 3).float()
    masks, target, rois = (
        draw(1, 9, 6, 6).float(),
        torch.tensor([0, 3, 1, 2, 0]),
        torch.tensor([[0.0, 0, 0, 2, 2]]),
    )

    def everything():
        return [
            *soft_nms(boxes, scores),
            roi_pool(x, rois, 2),
            carafe(x, masks, 3, 1, 2),
            sigmoid_focal_loss(logits, target),
        ]

    served = everything()
    monkeypatch.setattr(_library, "is_loaded", lambda name: False)
    for one, other in zip(served, everything(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.cuda
def test_more_elements_than_32_bits_count():
    rows = (1 << 31) // 1024 + 3
    logits = torch.zeros(rows, 1024, dtype=torch.bfloat16, device="cuda")
    target = torch.full((rows,), 1024, device="cuda")
    target[-1] = 1023
    logits[-1, 1023] = 3
    loss = torch.ops.visdet.sigmoid_focal_loss(logits, target, torch.empty(0, device="cuda"), 2.0, 0.25)
    expected = sigmoid_focal_loss(logits[-1:].float().cpu(), torch.tensor([1023]), reduction="none")
    torch.testing.assert_close(loss[-1:].float().cpu(), expected, rtol=1e-2, atol=1e-3)
    del loss, logits
    maps = torch.zeros(1, 1, 70, 70, device="cuda", dtype=torch.bfloat16)
    maps[0, 0, 69, 69] = 2
    regions = torch.tensor([[0.0, 69, 69, 69, 69]], device="cuda").expand((1 << 31) // 4900 + 5, 5)
    assert roi_pool(maps, regions, 70)[-1].eq(2).all()
