"""Suppression within classes: the boxes, their order and their scores are those of each class alone."""

import itertools

import pytest
import torch
from detection_cases import DEVICES
from nms_cases import of_random_problem
from torch.library import opcheck

from visdet.ops import (
    _library,
    _torchvision,
    batched_nms,
    nms,
    nms3d,
    nms3d_normal,
    nms_quadri,
    nms_rotated,
    soft_nms,
)
from visdet.ops.nms import kept_indices
from visdet.ops.soft_nms import SOFT_METHODS

needs_library = pytest.mark.skipif(not _library.is_loaded("cpu"), reason="the library is not built")
SIZES = (0, 1, 2, 3, 17, 70, 200)


def kept_by_torchvision(boxes, scores, classes, is_candidate, threshold):
    """Return the indices that ``torchvision.ops.nms`` keeps of each class, best first."""
    torchvision = pytest.importorskip("torchvision")
    classes = torch.zeros(len(boxes)) if classes is None else classes
    kept = [torch.zeros(0, dtype=torch.int64)]
    for label in classes.unique():
        is_member = (classes == label) & (True if is_candidate is None else is_candidate)
        members = is_member.nonzero().squeeze(1)
        kept.append(members[torchvision.ops.nms(boxes[members], scores[members], threshold)])
    keep = torch.cat(kept).sort().values
    return keep[scores[keep].sort(descending=True, stable=True).indices]


@pytest.mark.parametrize("library", ["built", "missing", "missing-torchvision-too"])
def test_random_problems_have_torchvisions_result(library, monkeypatch):
    if library != "built":
        monkeypatch.setattr(_library, "is_loaded", lambda name: False)
    problems = [of_random_problem(seed, N) for seed, N in itertools.product(range(40), SIZES) if N]
    expected = [kept_by_torchvision(*problem) for problem in problems]
    if library == "missing-torchvision-too":
        monkeypatch.setattr(_torchvision, "serves", lambda device_type: False)
    for (boxes, scores, classes, chosen, threshold), keep in zip(problems, expected, strict=True):
        assert torch.equal(kept_indices(boxes, scores, threshold, classes, chosen), keep)


@pytest.mark.cuda
@pytest.mark.parametrize("columns", [4, 5, 8])
@pytest.mark.parametrize("N", [1, 63, 64, 65, 1000, 5000])
def test_the_gpu_keeps_what_the_cpu_keeps(columns, N):
    for seed in range(60 if N <= 1000 else 8):
        boxes, scores, classes, chosen, threshold = of_random_problem(seed, N, columns)
        # The compilers round the overlap of polygons differently, so that it may lie on either side of an equal number.
        threshold += 0 if columns == 4 else 1e-4
        expected = kept_indices(boxes, scores, threshold, classes, chosen)
        given = (None if one is None else one.cuda() for one in (classes, chosen))
        assert torch.equal(kept_indices(boxes.cuda(), scores.cuda(), threshold, *given).cpu(), expected), seed


@needs_library
@pytest.mark.parametrize("device", DEVICES)
def test_many_disjoint_boxes_are_kept(device):
    N = 60_000 if device == "cpu" else 400_000
    place = torch.stack([torch.arange(N) % 500, torch.arange(N) // 500], 1).float() * 10
    boxes = torch.cat([place, place + 9], 1)[torch.randperm(N, generator=torch.Generator().manual_seed(0))]
    scores = torch.arange(N, 0, -1).double()
    boxes[-1] = boxes[-3]  # only this one is suppressed
    keep = kept_indices(boxes.to(device, torch.float64), scores.to(device), 0.5)
    assert torch.equal(keep.cpu(), torch.arange(N - 1))


@needs_library
@pytest.mark.parametrize("axis", [0, 1])
def test_boxes_of_many_strips_have_torchvisions_result(axis):
    """From 512 boxes on the CPU divides a class into strips: wide boxes, points, and bad numbers among them."""
    generator = torch.Generator().manual_seed(axis)
    for dtype in (torch.float32, torch.float64):
        corner = torch.rand(3000, 2, generator=generator).to(dtype) * torch.tensor([1e4, 300.0]).roll(axis)
        sides = torch.rand(3000, 2, generator=generator).to(dtype) * 40
        sides[::50, axis] *= 200
        sides[::70] = 0
        boxes = torch.cat([corner, corner + sides], 1)
        boxes[7, 0], boxes[8, 3], boxes[9, 2], boxes[10] = torch.nan, torch.inf, -torch.inf, boxes[11]
        boxes[12] = boxes[12].flip(0)
        scores = torch.rand(3000, generator=generator).to(dtype)
        for threshold in (0.0, 0.3, -0.1):
            keep = kept_indices(boxes, scores, threshold)
            assert torch.equal(keep, kept_by_torchvision(boxes, scores, None, None, threshold))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["nms", *SOFT_METHODS])
def test_every_class_is_suppressed_as_if_alone(kind, dtype, device):
    """Far from the origin and with many classes, where moving classes apart would round the overlaps."""
    generator = torch.Generator().manual_seed(0)
    corner = torch.rand(300, 2, generator=generator).repeat_interleave(3, 0) * 20000
    corner = corner + torch.rand(900, 2, generator=generator) * 6
    boxes, scores = (
        torch.cat([corner, corner + 12], 1).to(device, dtype),
        torch.rand(900, generator=generator),
    )
    scores = scores.to(device, torch.promote_types(dtype, torch.float32))
    classes = (torch.randint(-600, 600, (300,), generator=generator).repeat_interleave(3) * 2**33).to(device)
    suppress, settings = (nms, {}) if kind == "nms" else (soft_nms, dict(method=kind, min_score=0.05))
    cfg = dict(type=suppress.__name__, iou_threshold=0.4, **settings)
    dets, keep = batched_nms(boxes, scores, classes, cfg)
    expected = {}
    for label in classes.unique():
        members = (classes == label).nonzero().squeeze(1)
        alone, kept = suppress(boxes[members], scores[members], 0.4, **settings)
        expected |= dict(zip(members[kept].tolist(), alone[:, -1].to(dtype).tolist(), strict=True))
    assert dict(zip(keep.tolist(), dets[:, -1].tolist(), strict=True)) == expected
    assert (dets[:-1, -1] >= dets[1:, -1]).all() and torch.equal(dets[:, :4], boxes[keep])


@pytest.mark.parametrize("classes", [[0.5, 0.5, 0.25], [-0.0, 0.0, 1.0], [True, True, False]])
def test_classes_may_be_any_numbers(classes):
    boxes, scores = torch.tensor([[0.0, 0, 9, 9]]).repeat(3, 1), torch.tensor([0.9, 0.8, 0.7])
    for suppress in (nms, soft_nms):
        assert suppress(boxes, scores, 0.5, classes=torch.tensor(classes))[1].tolist() == [0, 2]
    assert nms(boxes.numpy(), scores.numpy(), 0.5, classes=torch.tensor(classes).numpy())[1].tolist() == [
        0,
        2,
    ]


@needs_library
def test_registrations():
    boxes, scores, *_ = of_random_problem(1, 20, dtype=torch.float32)
    for columns, classes, chosen in (
        (4, None, None),
        (5, torch.arange(20) % 3, None),
        (8, None, scores > 0.3),
    ):
        given = (boxes.repeat(1, 2)[:, :columns], scores, classes, chosen, 0.3)
        opcheck(torch.ops.visdet.nms.default, given)


COMPILED = {
    "nms": lambda boxes, scores, classes: nms(boxes[:, :4], scores, 0.3, 1, 0.2, classes=classes),
    "batched_nms": lambda boxes, scores, classes: batched_nms(
        boxes[:, :4], scores, classes, dict(iou_threshold=0.3, max_num=9)
    ),
    "batched_soft_nms": lambda boxes, scores, classes: batched_nms(
        boxes[:, :4], scores, classes, dict(type="soft_nms", iou_threshold=0.3)
    ),
    "nms_rotated": lambda boxes, scores, classes: nms_rotated(boxes[:, :5], scores, 0.3, classes, False),
    "nms_quadri": lambda boxes, scores, classes: nms_quadri(boxes, scores, 0.3, classes),
}


@needs_library
@pytest.mark.parametrize("name", COMPILED)
def test_one_graph_serves_all_sizes(name):
    torch._dynamo.reset()
    compiled = torch.compile(COMPILED[name], fullgraph=True, dynamic=True, backend="eager")
    boxes, scores, classes = torch.rand(60, 8) * 9, torch.rand(60), torch.arange(60) % 3
    for N in (2, 0, 1, 60):
        given = boxes[:N], scores[:N], classes[:N]
        for found, expected in zip(compiled(*given), COMPILED[name](*given), strict=True):
            assert torch.equal(found, expected)


@needs_library
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(3, 6), torch.zeros(3), None, None), "nms: boxes must have 4, 5 or 8 columns, got 6"),
        (
            (torch.zeros(3, 4).half(), torch.zeros(3), None, None),
            "boxes must be float64 or float32, got Half",
        ),
        ((torch.zeros(3, 4), torch.zeros(2), None, None), r"scores must be \[3\], got \[2\]"),
        ((torch.zeros(3, 4), torch.zeros(3).double(), None, None), "scores must be Float"),
        ((torch.zeros(3, 4), torch.zeros(3), torch.zeros(3), None), "classes must be int64, got Float"),
        (
            (torch.zeros(3, 4), torch.zeros(3), torch.zeros(2).long(), None),
            r"classes must be \[3\], got \[2\]",
        ),
        ((torch.zeros(3, 4), torch.zeros(3), None, torch.zeros(3)), "is_candidate must be bool, got Float"),
    ],
)
def test_rejections(arguments, message):
    with pytest.raises(RuntimeError, match=message):
        torch.ops.visdet.nms(*arguments, 0.5)


def test_classes_of_another_number_are_refused():
    boxes, scores, labels = torch.zeros(3, 5), torch.zeros(3), torch.zeros(2)
    for suppress in (nms, soft_nms):
        with pytest.raises(ValueError, match=rf"{suppress.__name__}: classes must be \[3\], got \[2\]"):
            suppress(boxes[:, :4], scores, 0.5, classes=labels)
    with pytest.raises(ValueError, match=r"nms_rotated: labels must be \[3\], got \[2\]"):
        nms_rotated(boxes, scores, 0.5, labels)


CLOSE = torch.tensor([0.5, 0.5 + 1e-12, 0.5 - 1e-12], dtype=torch.float64)  # equal in float32


@pytest.mark.parametrize("has_classes", [False, True])
@pytest.mark.parametrize("kind", ["nms", "soft_nms", "nms_rotated", "nms_quadri"])
def test_scores_are_ranked_in_their_own_type(kind, has_classes):
    """Float64 scores of float32 boxes decide which box stays, and are returned as they were given."""
    box = {"nms_rotated": [5.0, 5.0, 4.0, 4.0, 0.0], "nms_quadri": [3.0, 3, 7, 3, 7, 7, 3, 7]}.get(
        kind, [3.0, 3, 7, 7]
    )
    boxes = torch.tensor([box] * 3)
    detections, keep = batched_nms(
        boxes, CLOSE, torch.zeros(3), dict(type=kind, iou_threshold=0.5), class_agnostic=not has_classes
    )
    assert keep[0] == 1 and detections[0, -1] == CLOSE[1]
    assert keep.tolist() == [1]


@pytest.mark.parametrize("suppress", [nms3d, nms3d_normal])
def test_scores_of_boxes_in_space_are_ranked_in_their_own_type(suppress):
    boxes = torch.tensor([[0.0, 0, 0, 2, 2, 2, 0]] * 3)
    assert suppress(boxes, CLOSE, 0.5).tolist() == [1]
    assert suppress(boxes, torch.tensor([2**40, 2**40 + 1, 2**40 - 1]), 0.5).tolist() == [1]
    assert suppress(boxes, torch.tensor([0.1, torch.nan, 0.3], dtype=torch.float64), 0.5).tolist() == [1]
