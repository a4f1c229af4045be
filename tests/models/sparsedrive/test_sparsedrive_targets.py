"""Targets of boxes and polylines, and denoising queries."""

import math

import pytest
import torch
from sparsedrive_golden import built, close, lists
from torch.testing import assert_close

from visdet.models.sparsedrive import LinesL1Cost, SparseBox3DTarget, SparsePoint3DTarget
from visdet.models.sparsedrive.base_target import assigned_instances
from visdet.registry import TASK_UTILS


def test_nan_is_survived_and_has_no_weight():
    sampler = SparseBox3DTarget()
    pred = torch.full((1, 4, 10), math.nan)
    unknown = torch.tensor([[1.0] * 7 + [math.nan, 1.0]])
    truth = sampler.ground_truth([torch.tensor([1])], [unknown], torch.device("cpu"))
    pairs = sampler.pair_costs(pred[None, ..., :3], pred[None], truth)
    assert (assigned_instances({"": pairs}, {"": truth})[""].index == 0).sum() == 1
    assert truth.weights.tolist() == [[[1.0] * 8 + [0.0, 1.0]]]


def test_lines_l1_cost_by_hand():
    cost, _ = LinesL1Cost(weight=2.0)(torch.tensor([[0.0, 0, 1, 1]]), torch.tensor([[0.0, 1, 1, 3]]))
    assert cost.tolist() == [[3.0]]
    with pytest.raises(ValueError, match="gt_lines must have 3 axes with permute=True, got 2"):
        LinesL1Cost(permute=True)(torch.zeros(1, 4), torch.zeros(1, 4))


class FixedDraws:
    """Stands in for ``torch.rand_like``: returns the given tensors in turn."""

    def __init__(self, *draws):
        self.draws = list(draws)

    def __call__(self, like):
        draw = self.draws.pop(0)
        return draw.view_as(like)


def test_denoising_matches_golden(monkeypatch):
    sampler, given, expected = built("SparseBox3DTarget_denoising", "SparseBox3DTarget", TASK_UTILS)
    names = ("anchor", "box_target", "cls_target", "attn_mask", "valid_mask", "id_target")
    made = {}
    for step, prefix in (("first", ""), ("second", "next_")):
        draws = FixedDraws(
            *(given[f"{prefix}{name}"] for name in ("rand_noise", "rand_negative", "rand_flag"))
        )
        with monkeypatch.context() as patch:
            patch.setattr(torch, "rand_like", draws)
            made[step] = sampler.get_dn_anchors(
                *(lists(given, f"{prefix}{name}") for name in ("gt_labels", "gt_boxes", "gt_ids"))
            )
        for actual, name in zip(made[step], names, strict=True):
            close(actual, expected[f"{step}/{name}"])

    anchor = made["first"].anchor
    anchor = torch.cat([anchor, anchor.new_zeros(*anchor.shape[:2], 1)], -1)
    # The ranks of these numbers are the permutation that the peer has drawn.
    monkeypatch.setattr(torch, "rand", lambda n, device: given["keep_groups"].argsort() / n)
    carried = sampler.cache_dn(given["first_dn_feature"], anchor, made["first"])
    for name, value in carried.items():
        close(value, expected[f"cached/{name}"])
    feature, anchor, queries = sampler.update_dn(
        given["instance_feature"],
        given["anchor_last"],
        made["second"],
        int(given["num_normal"]),
        given["temporal_valid_mask"],
        carried,
    )
    updated = dict(zip(names, queries, strict=True), instance_feature=feature, anchor=anchor)
    del updated["attn_mask"]
    for name, actual in updated.items():
        close(actual, expected[f"updated/{name}"])


def test_denoising_without_temporal_groups_keeps_nothing():
    sampler = SparseBox3DTarget(num_dn_groups=2)
    queries = sampler.get_dn_anchors([torch.tensor([1])], [torch.ones(1, 9)], [torch.tensor([5])])
    assert queries.id_target is None and queries.anchor.shape == (1, 4, 10)
    assert sampler.cache_dn(torch.zeros(1, 4, 8), queries.anchor, queries) is None


@pytest.mark.parametrize("add_neg_dn", [False, True])
@pytest.mark.parametrize(("count", "max_dn_gt", "room"), [(3, 32, 16), (17, 24, 24), (3, 8, 8), (40, 0, 64)])
def test_denoising_queries_of_a_gpu_have_few_shapes(add_neg_dn, count, max_dn_gt, room):
    options = dict(num_dn_groups=2, num_temp_dn_groups=1, max_dn_gt=max_dn_gt, add_neg_dn=add_neg_dn)
    sampler = SparseBox3DTarget(dn_noise_scale=[1e-3] * 10, **options)
    labels = [torch.arange(count) % 4, torch.tensor([2])]
    boxes = [torch.rand(len(row), 9) * 5 + 1 for row in labels]
    ids = [torch.arange(len(row)) for row in labels]
    found = sampler.get_dn_anchors(labels, boxes, ids, pads=True)
    expected = sampler.get_dn_anchors(labels, boxes, ids)
    copies = 1 + add_neg_dn
    assert found.anchor.shape == (2, 2 * copies * room, 10)
    # With noise this small, each box is matched with its own query.
    for one, other in zip(found[1:3], expected[1:3], strict=True):
        near = [x.unflatten(1, (2, copies, -1))[:, :, 0] for x in (one, other)]
        kept = near[1].shape[2]
        assert_close(near[0][:, :, :kept], near[1], rtol=0, atol=0)
    assert torch.equal(found.valid_mask.sum(1), expected.valid_mask.sum(1))
    # Nothing but itself attends to a query that is there for the shape alone.
    kept = min(count, max_dn_gt or count)
    is_added = (torch.arange(2 * copies * room) % room) >= kept
    assert torch.equal(found.attn_mask[~is_added][:, ~is_added], expected.attn_mask)
    assert torch.equal(found.attn_mask[:, is_added], ~torch.eye(len(is_added), dtype=torch.bool)[:, is_added])
    in_padding = found.cls_target.unflatten(1, (2, copies, -1))[:, :, 0, min(count, room) :]
    assert (in_padding < 0).all()


def test_denoising_queries_stay_within_their_noise_and_never_hold_nan():
    noise = [2.0] * 3 + [0.5] * 7
    sampler = SparseBox3DTarget(num_dn_groups=3, dn_noise_scale=noise, add_neg_dn=False)
    box = torch.tensor([[1.0, 2, 3, 1, 1, 1, 0, math.nan, 0]])
    anchor, target, labels, mask, valid, _ = sampler.get_dn_anchors(
        [torch.tensor([4]), torch.zeros(0, dtype=torch.int64)], [box, torch.zeros(0, 9)]
    )
    assert anchor.isfinite().all() and target.isfinite().all()
    assert ((anchor[0] - target[0]).abs() <= torch.tensor(noise)).all()
    assert labels.tolist() == [[4] * 3, [-1] * 3] and valid.tolist() == [[True] * 3, [False] * 3]
    assert torch.equal(mask, ~torch.eye(3, dtype=torch.bool))


def test_lines_have_no_denoising():
    assert SparsePoint3DTarget(num_dn_groups=3, num_temp_dn_groups=1).num_dn_groups == 0


def test_rejections_of_targets():
    with pytest.raises(ValueError, match="num_temp_dn_groups must be at most num_dn_groups 2, got 3"):
        SparseBox3DTarget(num_dn_groups=2, num_temp_dn_groups=3)
