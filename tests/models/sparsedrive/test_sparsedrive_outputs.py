"""Decoders, GridMask and FPN."""

import pytest
import torch
from refused import assert_refused
from sparsedrive_golden import built, close, decoded
from torch.testing import assert_close

from visdet.models.necks import FPN
from visdet.models.sparsedrive import GridMask, SparseBox3DDecoder, SparsePoint3DDecoder
from visdet.models.sparsedrive.boxes.box3d_decoder import results_of
from visdet.registry import TASK_UTILS


@pytest.mark.parametrize("variant", ["", "_no_ids", "_threshold_no_quality", "_threshold"])
def test_box_decoder_matches_golden(variant):
    decoder, given, expected = built(f"SparseBox3DDecoder{variant}", "SparseBox3DDecoder", TASK_UTILS)
    results = decoded(
        decoder, [given["cls_scores"]], [given["box_preds"]], given.get("instance_id"), [given.get("quality")]
    )
    for i, result in enumerate(results):
        for name, value in result.items():
            # The peer leaves cls_scores in the order before the boxes were sorted anew; ours belong to their boxes.
            stored = "cls_scores_aligned" if name == "cls_scores" else name
            close(value, expected[f"sample/{i}/{stored}"])
        for key in expected:
            if key.startswith(f"sample/{i}/"):
                assert key.split("/")[-1].removesuffix("_aligned") in result


def test_fewer_predictions_than_outputs():
    (result,) = decoded(SparseBox3DDecoder(num_output=300), [torch.zeros(1, 4, 3)], [torch.zeros(1, 4, 11)])
    assert result["boxes_3d"].shape == (12, 10) and sorted(result["labels_3d"].tolist()) == sorted(
        [0, 1, 2] * 4
    )
    (result,) = decoded(
        SparseBox3DDecoder(), [torch.zeros(1, 4, 3)], [torch.zeros(1, 4, 11)], torch.arange(4)[None]
    )
    assert sorted(result["instance_ids"].tolist()) == [0, 1, 2, 3]


def test_boxes_near_a_better_one_of_their_class_are_left_out():
    boxes = torch.zeros(1, 5, 11)
    boxes[0, :, 0] = torch.tensor(
        [0.0, 1.0, 2.0, 0.5, 9.0]
    )  # The second box hides no third one, as it is hidden.
    logits = torch.full((1, 5, 2), -9.0)
    logits[0, range(5), [0, 0, 0, 1, 0]] = torch.tensor([3.0, 2.0, 1.0, 0.0, -1.0])
    shuffled = [4, 2, 0, 3, 1]
    decoder = SparseBox3DDecoder(num_output=5, min_distance=1.5)
    ids = torch.arange(5)[None]
    (result,) = decoded(decoder, [logits[:, shuffled]], [boxes[:, shuffled]], ids)
    assert result["boxes_3d"][:, 0].tolist() == [0.0, 2.0, 0.5, 9.0]
    assert result["labels_3d"].tolist() == [0, 0, 1, 0]


def test_line_threshold():
    logits = torch.tensor([[[3.0, -3.0], [-3.0, -3.0]]])
    (result,) = decoded(SparsePoint3DDecoder(score_threshold=0.5), [logits], [torch.zeros(1, 2, 8)])
    assert (
        len(result["vectors"]) == 1
        and result["vectors"][0].shape == (4, 2)
        and result["labels"].tolist() == [0]
    )


def test_results_have_memory_of_their_own(device):
    boxes, ids = torch.arange(12.0, device=device).view(3, 2, 2), torch.arange(3, device=device)
    is_kept = torch.tensor([[True, True], [False, True], [False, False]], device=device)
    results = results_of({"det": {"boxes": boxes, "is_kept": is_kept}, "plan": {"inner": {"ids": ids}}})
    boxes.zero_()
    results[0]["boxes"].fill_(-1)
    assert [result["boxes"].tolist() for result in results] == [[[-1, -1], [-1, -1]], [[6, 7]], []]
    assert [result["ids"].item() for result in results] == [0, 1, 2]
    assert all(result["boxes"].untyped_storage().nbytes() <= 16 for result in results)
    assert results_of({"boxes": torch.zeros(0, 4)}) == results_of({}) == []


def test_grid_mask_blanks_stripes():
    mask, shares = GridMask(prob=1.0), set()
    for seed in range(20):
        torch.manual_seed(seed)
        out = mask(torch.ones(2, 3, 40, 30))
        kept = out[0, 0] == 1
        assert torch.equal(out, kept.float().expand_as(out))  # alike in every image
        assert torch.equal(kept, kept.all(1, keepdim=True) | kept.all(0))  # whole rows and columns
        shares.add(round(float(out.mean()), 3))
    assert len(shares) > 5 and 0.3 < sum(shares) / len(shares) < 0.8


def test_grid_mask_applies_as_often_as_asked():
    mask, images = GridMask(prob=0.3), torch.ones(1, 1, 32, 32)
    changed = sum(bool((mask(images) != images).any()) for _ in range(400))
    assert 80 < changed < 160
    assert mask.eval()(images) is images


def test_fpn_keys_and_sums():
    neck = FPN([4, 6], 5, num_outs=4, add_extra_convs="on_output", relu_before_extra_convs=True).eval()
    convs = neck.fpn_convs
    assert [name for name, _ in neck.named_parameters()] == [
        f"{group}.{i}.conv.{kind}"
        for group, count in (("lateral_convs", 2), ("fpn_convs", 4))
        for i in range(count)
        for kind in ("weight", "bias")
    ]
    maps = torch.randn(1, 4, 7, 9), torch.randn(1, 6, 4, 5)
    outs = neck(maps)
    fine, coarse = neck.lateral_convs[0](maps[0]), neck.lateral_convs[1](maps[1])
    up = torch.nn.functional.interpolate(coarse, size=(7, 9), mode="nearest")
    assert_close(outs[0], convs[0](fine + up))
    assert_close(outs[1], convs[1](coarse))
    assert_close(outs[2], convs[2](outs[1]))
    assert_close(outs[3], convs[3](outs[2].relu()))


@pytest.mark.parametrize("how", [False, "on_input", "on_lateral", True])
def test_fpn_extra_levels(how):
    neck = FPN([4, 6, 8], 5, num_outs=4, start_level=1, add_extra_convs=how)
    outs = neck((torch.randn(1, 4, 16, 16), torch.randn(1, 6, 8, 8), torch.randn(1, 8, 4, 4)))
    assert [out.shape[-1] for out in outs] == [8, 4, 2, 1]
    assert len(neck.fpn_convs) == (4 if how else 2)


def test_fpn_groups_are_those_of_the_3x3_convolutions():
    neck = FPN([4, 8], 6, num_outs=3, add_extra_convs="on_output", out_groups=6)
    assert [conv.conv.groups for conv in neck.lateral_convs] == [1, 1]
    assert [tuple(conv.conv.weight.shape) for conv in neck.fpn_convs] == [(6, 1, 3, 3)] * 3
    maps = torch.randn(1, 4, 8, 8), torch.randn(1, 8, 4, 4)
    before = neck(maps)
    with torch.no_grad():
        neck.lateral_convs[1].conv.bias[2] += 1.0  # Channel 2 of both levels changes, and no other.
    changed = [
        (new - old).abs().amax(dim=(0, 2, 3)) > 1e-4 for old, new in zip(before, neck(maps), strict=True)
    ]
    assert all(channels.tolist() == [False, False, True, False, False, False] for channels in changed)


def test_fpn_rejections():
    assert_refused(
        ValueError,
        (lambda: FPN([4], 4, 1, add_extra_convs="on_top"), "add_extra_convs"),
        (lambda: FPN([4, 4], 4, 1), "num_outs must be at least the 2 levels used"),
        (lambda: FPN([4], 4, 1, conv_cfg={"type": "DCNv2"}), "conv_cfg must be None"),
    )
