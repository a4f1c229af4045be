"""Boxes and losses: numbers worked out by hand, a peer's numbers, and what is refused."""

import json

import pytest
import torch
from golden import golden, under
from torch.testing import assert_close

from visdet.models.boxes import elementwise_overlaps
from visdet.models.losses import FocalLoss, GIoULoss, L1Loss

A = torch.tensor([0.0, 0.0, 4.0, 2.0])  # area 8
B = torch.tensor([2.0, 1.0, 6.0, 3.0])  # area 8; shares 2 x 1 with A; the hull is 6 x 3


@pytest.mark.parametrize(("mode", "expected"), [("iou", 2 / 14), ("giou", 2 / 14 - 4 / 18)])
def test_overlap_by_hand(mode, expected):
    assert float(elementwise_overlaps(A, B, mode)) == pytest.approx(expected)
    assert float(elementwise_overlaps(A, A, mode)) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="elementwise_overlaps: mode must be"):
        elementwise_overlaps(A, B, "diou")


def test_overlap_of_all_pairs_and_of_nothing():
    boxes = torch.stack((A, B, B + 100))
    pairs = elementwise_overlaps(boxes[:, None], boxes[None], "iou")
    assert pairs.shape == (3, 3)
    assert torch.equal(pairs, pairs.T)
    assert pairs[0, 2] == 0
    assert elementwise_overlaps(boxes[:0, None], boxes[None], "giou").shape == (0, 3)


def test_boxes_without_area_stay_finite():
    point = torch.zeros(4, requires_grad=True)
    overlap = elementwise_overlaps(point, torch.zeros(4), "giou")
    overlap.backward()
    assert overlap == 0
    assert point.grad.isfinite().all()


def test_focal_loss_is_float32_for_16_bit_logits():
    logits = torch.full((1, 1), 20.0, dtype=torch.bfloat16, requires_grad=True)
    loss = FocalLoss()(logits, torch.tensor([1]), reduction_override="sum")
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(0.75 * 20, rel=1e-3)
    assert logits.grad.isfinite().all()


@pytest.fixture(scope="module")
def peer():
    arrays = golden("modules")
    return (
        json.loads(str(arrays["losses/config"])),
        under(arrays, "losses/input"),
        under(arrays, "losses/output"),
    )


@pytest.mark.parametrize("case", ["focal_avg_factor", "focal_weighted", "focal_mean"])
def test_focal_loss_golden(peer, case):
    config, given, expected = peer
    pred = given["focal_pred"].requires_grad_()
    weight = given["focal_weight"] if case == "focal_weighted" else None
    avg_factor = given["avg_factor"] if case != "focal_mean" else None
    loss = FocalLoss(**config["focal"])(pred, given["focal_target"], weight, avg_factor)
    assert_close(loss, expected[case], rtol=1e-5, atol=1e-6)
    (gradient,) = torch.autograd.grad(loss, pred)
    assert_close(gradient, expected[f"{case}/grad_pred"], rtol=1e-4, atol=1e-6)


def test_l1_loss_by_hand():
    pred, target = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[0.0, 4.0], [3.0, 0.0]])
    assert L1Loss(loss_weight=2.0)(pred, target) == 2 * 7 / 4
    assert L1Loss()(pred, target, avg_factor=2.0) == 3.5
    assert L1Loss(reduction="sum")(pred, target, weight=torch.tensor([[1.0], [0.5]])) == 5.0


@pytest.mark.parametrize("loss", [L1Loss(), GIoULoss()])
def test_no_boxes_give_a_connected_zero(loss):
    pred = torch.zeros(3, 4, requires_grad=True)
    value = loss(pred[:0], torch.zeros(0, 4))
    value.backward()
    assert value == 0
    assert torch.equal(pred.grad, torch.zeros(3, 4))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: L1Loss(reduction="median"), "reduction must be 'none' or 'mean' or 'sum', got 'median'"),
        (lambda: L1Loss("sum")(A, A, avg_factor=2.0), "avg_factor"),
        (lambda: FocalLoss(use_sigmoid=False), "use_sigmoid must be True"),
        (lambda: GIoULoss()(torch.zeros(2, 3), torch.zeros(2, 3)), r"must be \[..., 4\]"),
    ],
)
def test_bad_calls(call, message):
    with pytest.raises(ValueError, match=message):
        call()
