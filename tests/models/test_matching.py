"""Costs and assignment: by hand, against a peer, and with numbers that are not finite."""

import pytest
import torch
from mmengine.structures import InstanceData

from visdet.models.matching import (
    BBoxL1Cost,
    ClassificationCost,
    FocalLossCost,
    HungarianAssigner,
    IoUCost,
    PaddedTargets,
)
from visdet.models.matching.assignment import for_solver, solve_padded
from visdet.structures import DetDataSample

COSTS = [
    {"type": "FocalLossCost", "weight": 2.0},
    {"type": "BBoxL1Cost", "weight": 5.0, "box_format": "xywh"},
    {"type": "IoUCost", "iou_mode": "giou", "weight": 2.0},
]


def sample(boxes, labels):
    out = DetDataSample()
    out.gt_instances = InstanceData(
        bboxes=torch.tensor(boxes, dtype=torch.float32).view(-1, 4),
        labels=torch.tensor(labels, dtype=torch.int64),
    )
    return out


def targets_of(boxes, labels, image_whwh=(1, 1, 1, 1)):
    sizes = torch.tensor([image_whwh])
    return PaddedTargets(boxes_px=boxes, labels=labels, image_whwh=sizes, counts=[len(boxes)])


def test_costs_by_hand():
    predicted = torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, 0.0, 40.0, 20.0]])
    true = targets_of(torch.tensor([[20.0, 10.0, 60.0, 30.0]]), torch.tensor([1]), (100, 50, 100, 50))
    for cost, expected in (
        (ClassificationCost(weight=2.0), -1.0),
        (FocalLossCost(), (0.25 - 0.75) * 0.25 * 0.6931472),
        (BBoxL1Cost(box_format="xyxy"), 0.2 + 0.2 + 0.2 + 0.2),
        (BBoxL1Cost(box_format="xywh", weight=5.0), 5 * 0.4),
        (IoUCost(iou_mode="iou"), -2 / 14),
        (IoUCost(weight=3.0), -3 * (2 / 14 - 4 / 18)),
    ):
        assert float(cost.pairwise(*predicted, true)) == pytest.approx(expected)


def test_further_classes_do_not_change_a_cost():
    labels = torch.tensor([2, 0, 1, 1, 2])
    logits, boxes = torch.randn(6, 9), torch.rand(6, 4)
    costs = [
        FocalLossCost().pairwise(logits[:, :classes], boxes, targets_of(torch.rand(5, 4), labels))
        for classes in (3, 5, 9)
    ]
    assert costs[0].shape == (6, 5) and all(torch.equal(cost, costs[0]) for cost in costs)


def solved(logits, boxes, targets):
    assigner = HungarianAssigner(COSTS)
    return solve_padded(for_solver(assigner.cost(logits, boxes, targets)), targets.counts)


def test_batch_of_layers_matches_as_image_by_image():
    layers, queries = 3, 7
    samples = [
        sample([[1, 2, 20, 30], [5, 5, 40, 30], [0, 0, 64, 48]], [0, 2, 1]),
        sample([], []),
        sample([[3, 3, 9, 9]] * 9, [1] * 9),  # more boxes than queries
    ]
    sizes = [(48, 64), (30, 30), (20, 40)]
    targets = PaddedTargets.from_samples(samples, sizes, torch.device("cpu"))
    assert targets.boxes_px.shape == (3, 9, 4)
    assert targets.counts == [3, 0, 9]
    logits = torch.randn(layers, 3, queries, 4)
    corner = torch.rand(layers, 3, queries, 2) * 20
    boxes = torch.cat((corner, corner + torch.rand(layers, 3, queries, 2) * 20), dim=-1)

    index = solved(logits, boxes, targets)
    assert index.shape == (layers, 3, queries)
    for layer in range(layers):
        for image, one in enumerate(samples):
            alone = PaddedTargets.from_samples([one], [sizes[image]], torch.device("cpu"))
            count = alone.counts[0]
            (of_image,) = solved(logits[layer, image][None], boxes[layer, image][None], alone)
            assert torch.equal(index[layer, image].clamp(max=count), of_image)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_costs_that_are_not_finite_do_not_stop_the_solver(bad):
    samples = [sample([[0, 0, 10, 10], [20, 20, 30, 30]], [0, 1])]
    targets = PaddedTargets.from_samples(samples, [(40, 40)], torch.device("cpu"))
    logits = torch.zeros(1, 1, 3, 2)
    boxes = torch.tensor([[[[20.0, 20, 30, 30], [bad] * 4, [0, 0, 10, 10]]]])
    assert solved(logits, boxes, targets).tolist() == [[[1, 2, 0]]]
    everything = solved(logits + bad, boxes * 0 + bad, targets)
    assert sorted(everything.flatten().tolist()) == [0, 1, 2]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: HungarianAssigner([1.0]), ValueError, "match_costs"),
        (lambda: HungarianAssigner([{"type": "FocalLosCost"}]), KeyError, "FocalLossCost"),
        (lambda: BBoxL1Cost(box_format="cxcywh"), ValueError, "box_format must be 'xyxy' or 'xywh'"),
        (lambda: IoUCost(iou_mode="ciou"), ValueError, "iou_mode must be 'iou' or 'giou'"),
    ],
)
def test_bad_configs(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_bad_ground_truth():
    without = DetDataSample()
    with pytest.raises(ValueError, match=r"data_samples\[0\].gt_instances must have bboxes"):
        PaddedTargets.from_samples([without], [(8, 8)], torch.device("cpu"))
    flat = sample([0.0] * 8, [0, 0])
    flat.gt_instances.bboxes = torch.zeros(2, 5)
    with pytest.raises(ValueError, match=r"bboxes \[N, 4\] and labels \[N\], got \(2, 5\) and \(2,\)"):
        PaddedTargets.from_samples([flat], [(8, 8)], torch.device("cpu"))
