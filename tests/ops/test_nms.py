"""nms, batched_nms, soft_nms, nms_match and bbox_overlaps."""

import numpy as np
import pytest
import torch

from visdet.ops import _torchvision, batched_nms, bbox_overlaps, nms, nms_match, register_nms, soft_nms

# Overlaps of the first with the others: 1/3 (50 of 150), 9/10 (90 of 100), 0.
BOXES = torch.tensor([[0.0, 0, 10, 10], [5, 0, 15, 10], [0, 0, 10, 9], [20, 20, 30, 30]])
SCORES = torch.tensor([0.9, 0.8, 0.7, 0.6])


@pytest.fixture(params=["torchvision", "plain"])
def backend(request, monkeypatch):
    if request.param == "plain":
        monkeypatch.setattr(_torchvision, "serves", lambda device_type: False)
    else:
        pytest.importorskip("torchvision")
    return request.param


def random_boxes(count, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    corner = torch.rand(count, 2, generator=generator) * 80
    boxes = torch.cat([corner, corner + torch.rand(count, 2, generator=generator) * 40 + 1], 1)
    return boxes.to(dtype), torch.rand(count, generator=generator).to(dtype)


def test_nms_by_hand(backend):
    dets, keep = nms(BOXES, SCORES, 0.5)
    assert keep.tolist() == [0, 1, 3]
    assert torch.equal(dets, torch.cat([BOXES, SCORES[:, None]], 1)[keep])
    assert nms(BOXES, SCORES, 0.3)[1].tolist() == [0, 3]
    assert nms(BOXES, SCORES, 0.95)[1].tolist() == [0, 1, 2, 3]
    assert nms(BOXES, SCORES, 0.95, max_num=2)[1].tolist() == [0, 1]
    assert nms(BOXES, SCORES, 0.5, score_threshold=0.6)[1].tolist() == [0, 1]  # 0.6 is not above 0.6


def test_offset_counts_the_last_pixel(backend):
    boxes = torch.tensor([[0.0, 0, 1, 1], [1, 0, 2, 1]])  # 0 in common, or 2 of 6 pixels
    scores = torch.tensor([0.9, 0.8])
    assert nms(boxes, scores, 0.3, offset=0)[1].tolist() == [0, 1]
    assert nms(boxes, scores, 0.3, offset=1)[1].tolist() == [0]
    assert nms(boxes, scores, 0.34, offset=1)[1].tolist() == [0, 1]


def test_equal_scores_keep_their_order(backend):
    boxes = BOXES[3].repeat(4, 1) + torch.arange(4)[:, None] * 100
    assert nms(boxes, torch.ones(4), 0.5)[1].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("offset", [0, 1])
def test_plain_torch_agrees_with_torchvision(dtype, offset, monkeypatch):
    pytest.importorskip("torchvision")
    boxes, scores = random_boxes(300, dtype=dtype)
    dets, keep = nms(boxes, scores, 0.4, offset)
    monkeypatch.setattr(_torchvision, "serves", lambda device_type: False)
    plain_dets, plain_keep = nms(boxes, scores, 0.4, offset)
    assert 20 < len(keep) < 290
    assert torch.equal(keep, plain_keep) and torch.equal(dets, plain_dets) and dets.dtype == dtype


def test_arrays_come_back_as_arrays():
    for function in (nms, soft_nms):
        dets, keep = function(BOXES.numpy(), SCORES.numpy(), 0.5)
        assert isinstance(dets, np.ndarray) and isinstance(keep, np.ndarray) and keep.dtype == np.int64
    groups = nms_match(torch.cat([BOXES, SCORES[:, None]], 1).numpy(), 0.5)
    assert [group.tolist() for group in groups] == [[0, 2], [1], [3]]


@pytest.mark.parametrize("suppress", [nms, soft_nms, batched_nms])
def test_integer_boxes_keep_their_scores(suppress):
    boxes, scores = torch.tensor([[0, 0, 4, 4], [0, 0, 4, 3], [9, 9, 12, 12]]), torch.tensor([0.5, 0.9, 0.7])
    rest = (torch.zeros(3).long(), dict(iou_threshold=0.5)) if suppress is batched_nms else (0.5,)
    dets, keep = suppress(boxes, scores, *rest)
    expected, expected_keep = suppress(boxes.float(), scores, *rest)
    assert torch.equal(dets, expected) and torch.equal(keep, expected_keep)
    if suppress is soft_nms:
        arrays = soft_nms(boxes.numpy(), scores.numpy(), 0.5)
        assert torch.equal(torch.from_numpy(arrays[0]), expected)


def test_no_boxes(backend):
    for function in (nms, soft_nms):
        dets, keep = function(torch.zeros(0, 4), torch.zeros(0), 0.5)
        assert dets.shape == (0, 5) and keep.shape == (0,) and keep.dtype == torch.int64
    assert nms_match(torch.zeros(0, 5), 0.5) == []
    dets, keep = batched_nms(
        torch.zeros(0, 4), torch.zeros(0), torch.zeros(0).long(), dict(iou_threshold=0.5)
    )
    assert dets.shape == (0, 5) and keep.shape == (0,)


def test_the_selection_is_differentiable():
    boxes, scores = BOXES.clone().requires_grad_(), SCORES.clone().requires_grad_()
    nms(boxes, scores, 0.5)[0].sum().backward()
    assert scores.grad.tolist() == [1, 1, 0, 1]
    assert boxes.grad[2].tolist() == [0, 0, 0, 0]


def test_old_argument_name():
    with pytest.warns(DeprecationWarning, match="iou_thr"):
        assert nms(BOXES, SCORES, iou_thr=0.5)[1].tolist() == [0, 1, 3]


def soft_nms_by_definition(boxes, scores, threshold, sigma, min_score, method):
    """Take the best remaining box, lower the others, until none is left; distinct scores only."""
    remaining, scores, kept = list(range(len(boxes))), scores.double().clone(), []
    overlaps = bbox_overlaps(boxes.double(), boxes.double())
    while remaining:
        best = max(remaining, key=lambda i: scores[i].item())
        kept.append((best, scores[best].item()))
        remaining.remove(best)
        for i in remaining:
            overlap = overlaps[best, i].item()
            if method == "gaussian":
                scores[i] *= np.exp(-(overlap**2) / sigma)
            elif overlap >= threshold:
                scores[i] *= 1 - overlap if method == "linear" else 0
        remaining = [i for i in remaining if scores[i] >= min_score]
    return kept


@pytest.mark.parametrize("method", ["naive", "linear", "gaussian"])
def test_soft_nms_is_its_definition(method):
    boxes, scores = random_boxes(60)
    dets, keep = soft_nms(boxes, scores, 0.3, 0.5, 0.05, method)
    expected = soft_nms_by_definition(boxes, scores, 0.3, 0.5, 0.05, method)
    assert keep.tolist() == [index for index, _ in expected] and 5 < len(keep) < 60
    torch.testing.assert_close(
        dets[:, 4], torch.tensor([score for _, score in expected]), rtol=1e-5, atol=1e-6
    )
    assert torch.equal(dets[:, :4], boxes[keep])


def test_soft_nms_by_hand():
    dets, keep = soft_nms(BOXES, SCORES, 0.3)
    assert keep.tolist() == [0, 3, 1, 2]
    # 0.8 * (1 - 1/3); 0.7 * (1 - 9/10), then * (1 - 45/145) for its overlap with box 1
    expected = [0.9, 0.6, 0.8 * 2 / 3, 0.7 / 10 * 100 / 145]
    torch.testing.assert_close(dets[:, 4], torch.tensor(expected))
    assert soft_nms(BOXES, SCORES, 0.3, min_score=0.1)[1].tolist() == [0, 3, 1]


def test_nms_match_takes_overlaps_at_the_threshold():
    dets = torch.cat([BOXES, SCORES[:, None]], 1)
    assert [g.tolist() for g in nms_match(dets, 1 / 3)] == [[0, 1, 2], [3]]
    assert [g.tolist() for g in nms_match(dets, 0.34)] == [[0, 2], [1], [3]]


def test_batched_nms_keeps_classes_apart(backend):
    boxes, scores = BOXES[[0, 2, 2]], torch.tensor([0.5, 0.9, 0.8])
    classes = torch.tensor([0, 0, 1])
    dets, keep = batched_nms(boxes, scores, classes, dict(type="nms", iou_threshold=0.5))
    assert keep.tolist() == [1, 2]
    assert torch.equal(dets[:, :4], boxes[keep])
    assert batched_nms(boxes, scores, classes, dict(iou_threshold=0.5), class_agnostic=True)[1].tolist() == [
        1
    ]
    cfg = dict(iou_threshold=0.5, class_agnostic=True)
    assert batched_nms(boxes, scores, classes, cfg)[1].tolist() == [1]
    assert cfg == dict(iou_threshold=0.5, class_agnostic=True)  # the caller's stays as it was
    assert batched_nms(boxes, scores, classes, None)[1].tolist() == [1, 2, 0]


@pytest.mark.parametrize("split_thr", [1, 10000])
@pytest.mark.parametrize("shift", [-1.0, -150.0, -1e4])
def test_classes_stay_apart_where_corners_are_negative(shift, split_thr, backend):
    boxes, scores = random_boxes(150)
    boxes = boxes + shift
    classes = torch.arange(150) % 5
    dets, keep = batched_nms(boxes, scores, classes, dict(iou_threshold=0.3, split_thr=split_thr))
    assert keep.tolist() == batched_nms_by_definition(boxes, scores, classes, 0.3, False)
    assert torch.equal(dets[:, :4], boxes[keep])


def test_a_box_at_the_distance_of_another_class_is_kept(backend):
    """The second box was moved by 101 onto the first one."""
    boxes = torch.tensor([[0.0, 0.0, 100.0, 100.0], [-101.0, -101.0, -1.0, -1.0]])
    _, keep = batched_nms(boxes, torch.tensor([0.9, 0.8]), torch.tensor([0, 1]), dict(iou_threshold=0.5))
    assert keep.tolist() == [0, 1]


@pytest.mark.parametrize("kind", ["nms", "soft_nms"])
def test_classes_one_by_one_give_the_same(kind, backend):
    boxes, scores = random_boxes(500)
    classes = torch.arange(500) % 7
    whole = batched_nms(boxes, scores, classes, dict(type=kind, iou_threshold=0.4))
    split = batched_nms(boxes, scores, classes, dict(type=kind, iou_threshold=0.4, split_thr=100))
    assert torch.equal(whole[1].sort()[0], split[1].sort()[0])
    torch.testing.assert_close(whole[0][:, 4], split[0][:, 4], rtol=1e-3, atol=1e-4)
    limited = batched_nms(
        boxes, scores, classes, dict(type=kind, iou_threshold=0.4, split_thr=100, max_num=9)
    )
    assert torch.equal(limited[1], split[1][:9]) and len(limited[0]) == 9


@pytest.mark.parametrize("split_thr", [1, 10000])
@pytest.mark.parametrize("kind", ["nms", "soft_nms"])
def test_the_best_of_all_classes_are_kept_for_every_type(kind, split_thr):
    boxes, scores = random_boxes(50)
    cfg = dict(type=kind, iou_threshold=0.4, split_thr=split_thr)
    dets, keep = batched_nms(boxes, scores, torch.arange(50) % 3, cfg)
    best, best_keep = batched_nms(boxes, scores, torch.arange(50) % 3, cfg | dict(max_num=4))
    assert torch.equal(best_keep, keep[:4]) and torch.equal(best, dets[:4]) and len(keep) > 4


def test_agnostic_boxes_are_split_by_class_too():
    """As in mmcv: from split_thr boxes on only boxes of the same class suppress each other."""
    boxes, scores, classes = BOXES[[0, 0, 0]], torch.tensor([0.9, 0.8, 0.7]), torch.tensor([0, 1, 1])
    cfg = dict(iou_threshold=0.5, class_agnostic=True)
    assert batched_nms(boxes, scores, classes, cfg)[1].tolist() == [0]
    assert batched_nms(boxes, scores, classes, cfg | dict(split_thr=4))[1].tolist() == [0]
    assert batched_nms(boxes, scores, classes, cfg | dict(split_thr=3))[1].tolist() == [0, 1]


def batched_nms_by_definition(boxes, scores, classes, threshold, is_agnostic):
    """Greedy, one box after another; distinct scores only."""
    overlaps, kept = bbox_overlaps(boxes.double(), boxes.double()), []
    for i in scores.argsort(descending=True).tolist():
        rivals = [k for k in kept if is_agnostic or classes[k] == classes[i]]
        if all(overlaps[k, i] <= threshold for k in rivals):
            kept.append(i)
    return kept


@pytest.mark.parametrize("is_agnostic", [False, True])
@pytest.mark.parametrize("split_thr", [1, 150, 151])
@pytest.mark.parametrize("max_num", [-1, 7])
def test_batched_nms_is_its_definition(is_agnostic, split_thr, max_num, backend):
    boxes, scores = random_boxes(150)
    classes = torch.randint(0, 6, (150,), generator=torch.Generator().manual_seed(3)) * 3
    cfg = dict(iou_threshold=0.3, split_thr=split_thr, max_num=max_num, class_agnostic=is_agnostic)
    dets, keep = batched_nms(boxes, scores, classes, cfg)
    joint = is_agnostic and split_thr == 151
    expected = batched_nms_by_definition(boxes, scores, classes, 0.3, joint)
    assert keep.tolist() == expected[: max_num if max_num > 0 else None]
    assert torch.equal(dets, torch.cat([boxes, scores[:, None]], 1)[keep])


def test_export_and_compile():
    if not _torchvision.serves("cpu"):
        pytest.skip("torchvision's operators do not load")
    boxes, scores = random_boxes(60)

    class Nms(torch.nn.Module):
        def forward(self, boxes, scores, classes):
            return (
                *nms(boxes, scores, 0.4, 1, max_num=9),
                *batched_nms(boxes, scores, classes, dict(iou_threshold=0.4, max_num=9)),
            )

    arguments = (boxes, scores, torch.arange(60) % 3)
    expected = Nms()(*arguments)
    N = torch.export.Dim("N", min=2, max=5000)
    program = torch.export.export(Nms(), arguments, dynamic_shapes=({0: N},) * 3)
    fewer = tuple(given[:41] for given in arguments)
    for one, wanted in zip(program.module()(*fewer), Nms()(*fewer), strict=True):
        assert torch.equal(one, wanted)
    compiled = torch.compile(Nms(), fullgraph=True, backend="eager", dynamic=True)
    for found in (program.module()(*arguments), compiled(*arguments)):
        for one, wanted in zip(found, expected, strict=True):
            assert torch.equal(one, wanted)


def test_functions_of_others_are_called_for_each_class():
    seen = []

    def record(boxes, scores):
        seen.append(boxes)
        return torch.cat([boxes, scores[:, None]], 1), torch.arange(len(boxes))

    boxes = torch.tensor([[1.0, 2, 3, 4, 0.5], [2, 2, 3, 4, 0.5], [3, 2, 3, 4, 0.5]])
    dets, keep = batched_nms(boxes, torch.tensor([0.5, 0.9, 0.7]), torch.tensor([7, 0, 7]), dict(type=record))
    assert [one.tolist() for one in seen] == [boxes[1:2].tolist(), boxes[::2].tolist()]
    assert keep.tolist() == [1, 2, 0] and dets.shape == (3, 6)
    assert batched_nms(boxes[:0], boxes[:0, 0], boxes[:0, 0], dict(type=record))[0].shape == (0, 6)


def test_kinds_are_looked_up_never_evaluated():
    with pytest.raises(KeyError, match="type must be one of"):
        batched_nms(BOXES, SCORES, torch.zeros(4).long(), dict(type="__import__('os')"))
    with pytest.raises(KeyError, match="is taken"):
        register_nms("nms", soft_nms)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: nms(torch.zeros(3, 5), torch.zeros(3), 0.5), r"nms: boxes must be \[N, 4\], got \[3, 5\]"),
        (lambda: nms(BOXES, torch.zeros(3), 0.5), r"nms: scores must be \[4\], got \[3\]"),
        (lambda: nms(BOXES, SCORES, 0.5, 2), "nms: offset must be 0 or 1, got 2"),
        (lambda: soft_nms(BOXES, SCORES, method="hard"), "soft_nms: method must be one of"),
        (lambda: nms_match(torch.zeros(()), 0.5), r"nms_match: dets must be \[N, 5\], got \[\]"),
        (lambda: batched_nms(BOXES, SCORES[:2], SCORES, {}), r"batched_nms: scores must be \[4\], got \[2\]"),
        (lambda: batched_nms(BOXES, SCORES, SCORES[:1], {}), r"batched_nms: idxs must be \[4\], got \[1\]"),
        (lambda: batched_nms(BOXES[0], SCORES, SCORES, {}), r"boxes must be .*N, 8\], got \[4\]"),
        (lambda: bbox_overlaps(SCORES[0], BOXES), r"bboxes1 must be \[N, 4\], got \[\]"),
        (lambda: nms_match(BOXES, 0.5), r"nms_match: dets must be \[N, 5\], got \[4, 4\]"),
        (lambda: bbox_overlaps(BOXES, BOXES, mode="giou"), "bbox_overlaps: mode must be 'iou' or 'iof'"),
        (lambda: bbox_overlaps(BOXES, BOXES, offset=3), "bbox_overlaps: offset must be 0 or 1, got 3"),
        (
            lambda: bbox_overlaps(BOXES, BOXES[:2], aligned=True),
            r"bboxes2 must be \[4, 4\] as bboxes1 where aligned, got \[2, 4\]",
        ),
        (lambda: bbox_overlaps(torch.ones(2, 3), BOXES), r"bboxes1 must be \[N, 4\], got \[2, 3\]"),
    ],
)
def test_rejections(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_overlaps_by_hand():
    torch.testing.assert_close(bbox_overlaps(BOXES[:1], BOXES), torch.tensor([[1, 1 / 3, 0.9, 0]]))
    torch.testing.assert_close(bbox_overlaps(BOXES, BOXES[:1], "iof")[:, 0], torch.tensor([1, 0.5, 1, 0]))
    torch.testing.assert_close(
        bbox_overlaps(BOXES[:2], BOXES[1:3], aligned=True), torch.tensor([1 / 3, 45 / 145])
    )
    whole = bbox_overlaps(BOXES[:1].long(), BOXES.long())
    torch.testing.assert_close(whole, torch.tensor([[1, 1 / 3, 0.9, 0]]))
    one = torch.tensor([[0.0, 0, 1, 1]])
    assert bbox_overlaps(one, one + torch.tensor([1.0, 0, 1, 0]), offset=1).item() == pytest.approx(2 / 6)
    assert bbox_overlaps(torch.zeros(0, 4), BOXES).shape == (0, 4)
    assert bbox_overlaps(torch.zeros(0, 4), torch.zeros(0, 4), aligned=True).shape == (0,)


@pytest.mark.parametrize("M, N, aligned", [(0, 2, False), (2, 0, False), (0, 0, False), (0, 0, True)])
def test_overlaps_of_no_boxes_have_a_gradient(M, N, aligned):
    boxes = [torch.full((count, 4), torch.nan, requires_grad=True) for count in (M, N)]
    bbox_overlaps(*boxes, aligned=aligned).sum().backward()
    assert all(torch.equal(given.grad, torch.zeros_like(given)) for given in boxes)
