"""Losses of SparseDrive: boxes, quality, polylines, depth."""

import math

import pytest
import torch
from refused import assert_refused
from sparsedrive_golden import close, module_case
from torch.testing import assert_close
from training_steps import backward

from tests.fuzz.problem import generator_of
from visdet.models.losses import CrossEntropyLoss, GaussianFocalLoss
from visdet.models.sparsedrive import DenseDepthNet, LinesL1Loss, SparseLineLoss
from visdet.registry import MODELS

BOX_LOSS = {
    "type": "SparseBox3DLoss",
    "loss_box": {"type": "L1Loss", "loss_weight": 0.25},
    "loss_centerness": {"type": "CrossEntropyLoss", "use_sigmoid": True},
    "loss_yawness": {"type": "GaussianFocalLoss"},
    "cls_allow_reverse": [5],
}


def test_gaussian_focal_loss_matches_golden():
    config, _, given, expected = module_case("losses")
    loss, pred = GaussianFocalLoss(**config["gaussian_focal"]), given["gauss_pred"].requires_grad_()
    value = loss(pred, given["gauss_target"], avg_factor=given["avg_factor"])
    close(value, expected["gaussian_focal_avg_factor"])
    (gradient,) = torch.autograd.grad(value, pred)
    close(gradient, expected["gaussian_focal_avg_factor/grad_pred"])


def test_masked_rows_equal_picked_rows():
    loss = MODELS.build(BOX_LOSS)
    box, target, quality = torch.randn(6, 10), torch.randn(6, 10), torch.randn(6, 2)
    labels, weight = torch.tensor([5, 0, 5, 1, 5, 2]), torch.rand(6, 10)
    mask = torch.tensor([True, False, True, True, False, False])
    masked = loss(box, target, weight, torch.tensor(3.0), quality=quality, cls_target=labels, mask=mask)
    picked = loss(box[mask], target[mask], weight[mask], 3.0, quality=quality[mask], cls_target=labels[mask])
    assert_close(masked, picked)


def test_no_rows_give_a_zero_with_a_gradient():
    loss = MODELS.build(BOX_LOSS)
    box, quality = torch.zeros(0, 10, requires_grad=True), torch.zeros(0, 2, requires_grad=True)
    out = loss(box, torch.zeros(0, 10), avg_factor=1.0, quality=quality, cls_target=torch.zeros(0).long())
    assert all(float(value.detach()) == 0 for value in out.values())
    backward(out)
    assert box.grad is not None and quality.grad is not None


def test_cross_entropy_by_hand():
    logits, label = torch.tensor([[0.0, math.log(3)]]), torch.tensor([1])
    expected = pytest.approx(math.log(4 / 3))
    assert CrossEntropyLoss()(logits, label).item() == expected
    weighted = CrossEntropyLoss(class_weight=[1.0, 2.0], loss_weight=0.5)
    assert weighted(logits, label).item() == expected
    binary = CrossEntropyLoss(use_sigmoid=True, class_weight=[2.0, 1.0], reduction="sum")
    assert binary(logits, torch.eye(2)[:1]).item() == pytest.approx(2 * math.log(2) + math.log(4))
    assert_refused(
        ValueError,
        (lambda: CrossEntropyLoss(use_mask=True), "use_mask must be False"),
        (
            lambda: CrossEntropyLoss(use_sigmoid=True)(logits, label),
            "same as input size",
        ),
        (lambda: GaussianFocalLoss()(logits, label), "pred and target must have one shape"),
    )


def test_lines_l1_by_hand():
    pred, target = torch.tensor([[0.0, 0, 0, 1]]), torch.zeros(1, 4)
    assert LinesL1Loss(beta=0, loss_weight=3.0)(pred, target, avg_factor=1.0).item() == 1.5
    assert LinesL1Loss(beta=2.0)(pred, target, avg_factor=1.0).item() == pytest.approx(0.125)


@pytest.mark.parametrize("weight", [None, torch.full((2, 4), 3.0)])
def test_masked_lines_have_no_part(weight):
    loss = SparseLineLoss({"type": "LinesL1Loss"}, num_sample=2)
    lines, mask = torch.tensor([[0.0, 0, 0, 9], [5, 5, 5, 7]]), torch.tensor([True, False])
    alone = [None if one is None else one[mask] for one in (lines, 0 * lines, weight)]
    expected = loss(*alone, avg_factor=1.0)
    assert loss(lines, 0 * lines, weight, avg_factor=1.0, mask=mask) == expected
    assert expected["loss_line"] > 0


def test_depth_does_not_depend_on_the_memory_format():
    module = DenseDepthNet(embed_dims=5, num_depth_layers=1)
    maps = torch.randn(2, 3, 5, 4, 6, generator=generator_of(0))
    results = []
    for rows in (maps, maps.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)):
        rows = rows.requires_grad_()
        (depth,) = module([rows])
        results.append(
            (depth.detach(), *torch.autograd.grad(depth.square().sum(), [rows, *module.parameters()]))
        )
    assert results[0][0].shape == (6, 1, 4, 6)
    assert_close(*results)


def test_depth_survives_divergence_and_no_ground_truth():
    module = DenseDepthNet(embed_dims=2, num_depth_layers=1).train()
    loss_of = module.loss
    maps = [torch.full((1, 1, 2, 2, 2), 1e4, requires_grad=True)]
    torch.nn.init.constant_(module.depth_layers[0].weight, 1.0)
    depths = module(maps)
    assert depths[0].isfinite().all()
    for gt in (torch.full((1, 1, 2, 2), 5.0), torch.zeros(1, 1, 2, 2)):
        loss_of(module(maps), [gt]).backward()
        assert maps[0].grad.isfinite().all()
    assert float(loss_of(depths, [torch.zeros(1, 1, 2, 2)]).detach()) == 0
    beyond, last = torch.full((1, 1, 2, 2), 1e3), torch.full((1, 1, 2, 2), module.max_depth)
    assert loss_of([beyond], [last]) == 0
    depths[0].data[0, 0, 0, 0] = math.nan
    assert loss_of(depths, [torch.full((1, 1, 2, 2), 5.0)]).isfinite()
