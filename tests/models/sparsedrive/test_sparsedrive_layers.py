"""Attention, feed-forward block, encoders and refinement of SparseDrive."""

import math

import pytest
import torch
from refused import assert_refused
from sparsedrive_golden import built, close
from torch.testing import assert_close

from visdet.models.sparsedrive import (
    AsymmetricFFN,
    MultiheadFlashAttention,
    SparseBox3DEncoder,
    SparseBox3DRefinementModule,
)
from visdet.models.sparsedrive.boxes.box3d import decode_box, encode_box


@pytest.mark.parametrize("case", ["SparseBox3DEncoder_cat", "SparseBox3DEncoder_add", "SparsePoint3DEncoder"])
def test_encoders_match_golden(case):
    module, given, expected = built(case, case.split("_")[0])
    close(module(given["anchor"]), expected["output"])


@pytest.mark.parametrize("case", ["SparseBox3DRefinementModule", "SparseBox3DRefinementModule_normalize_yaw"])
def test_box_refinement_matches_golden(case):
    module, given, expected = built(case, "SparseBox3DRefinementModule")
    inputs = [given[name] for name in ("instance_feature", "anchor", "anchor_embed")]
    anchor, classification, quality = module(*inputs, given["time_interval"])
    close(anchor, expected["anchor"])
    close(classification, expected["classification"])
    close(quality, expected["quality"])
    close(module(*inputs, 1.0)[0], expected["anchor_time_interval_1"])


@pytest.mark.parametrize("case", ["AsymmetricFFN", "AsymmetricFFN_same_width"])
def test_ffn_matches_golden(case):
    module, given, expected = built(case, "AsymmetricFFN")
    close(module(given["x"]), expected["output"])


def test_attention_matches_golden():
    module, given, expected = built("MultiheadFlashAttention")
    query, key, value, query_pos, key_pos = (
        given[name] for name in ("query", "key", "value", "query_pos", "key_pos")
    )
    close(module(query, query_pos=query_pos), expected["self_attention"])
    close(module(query, key, value, query_pos=query_pos, key_pos=key_pos), expected["cross_attention"])
    close(module(query, key, query_pos=query_pos, key_pos=key_pos), expected["key_only"])


def test_rejections():
    assert_refused(
        ValueError,
        (lambda: MultiheadFlashAttention(16, 2, batch_first=False), r"batch_first must be True, got False"),
        (lambda: AsymmetricFFN(num_fcs=1), "num_fcs"),
        (lambda: SparseBox3DEncoder(8, mode="mul"), r"mode must be 'add' or 'cat', got 'mul'"),
    )


def test_box_code_by_hand():
    box = torch.tensor([[1.0, 2.0, 3.0, math.e, 1.0, math.e**2, math.pi / 2, 4.0, 5.0]])
    code = encode_box(box)
    assert_close(code, torch.tensor([[1.0, 2, 3, 1, 0, 2, 1, 0, 4, 5]]), atol=1e-6, rtol=0)
    assert_close(decode_box(code), box)
    assert encode_box(torch.zeros(1, 9)).isfinite().all()
    assert decode_box(torch.full((1, 11), 1e4)).isfinite().all()


def test_anchors_keep_float32_under_autocast():
    encoder = SparseBox3DEncoder([8, 4, 4, 4], mode="cat", output_fc=False)
    refine = SparseBox3DRefinementModule(20, refine_yaw=True, with_quality_estimation=True)
    anchor = torch.randn(1, 3, 11) * 30
    with torch.autocast("cpu", dtype=torch.bfloat16):
        embed = encoder(anchor)
        refined, classification, _ = refine(embed, anchor, embed)
    assert_close(embed, encoder(anchor), rtol=0, atol=0)
    assert refined.dtype == torch.float32 and classification.dtype == torch.bfloat16
    assert_close(refined, refine(embed, anchor, embed)[0], rtol=0, atol=0)
