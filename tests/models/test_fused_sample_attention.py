"""FusedSampleAttention: against plain torch, by hand, its mask, its layouts, its types."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from visdet.models.layers import FusedSampleAttention

B, E, C, G, Q, D, H, W = 2, 10, 6, 3, 5, 7, 8, 9


def module(**options):
    torch.manual_seed(0)
    attention = FusedSampleAttention(
        **{"embed_dims": E, "num_heads": G, "image_dims": C, "num_octaves": 2, **options}
    )
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return attention


def inputs(dtype=torch.float64):
    torch.manual_seed(1)
    return {
        "query": torch.randn(B, Q, E, dtype=dtype),
        "images": torch.randn(B, C, H, W, dtype=dtype),
        "samples": torch.rand(B, Q, D, 2, dtype=dtype) * 2.4 - 1.2,
        "depths": torch.rand(B, Q, D, dtype=dtype),
    }


def drawn():
    """Return an attention in double precision, and its inputs."""
    return module().double(), inputs()


def written_out(attention, query, images, samples, depths, sample_mask=None):
    """The attention with keys."""
    sampled = F.grid_sample(images, samples, align_corners=False).permute(0, 2, 3, 1)  # [B, Q, D, C]
    queries = attention.query_proj(query).view(B, Q, G, C)
    scores = torch.einsum("bqgc,bqdc->gbqd", queries, sampled)
    if attention.num_octaves:
        depth_keys = F.grid_sample(attention.depth_key(images), samples, align_corners=False)
        for octave, keys in enumerate(depth_keys.split(2, 1)):
            angle = 2 * math.pi * 2**octave * depths
            scores = scores + keys[:, 0] * angle.sin() + keys[:, 1] * angle.cos()
    scores = scores / math.sqrt(C)
    if sample_mask is not None:
        scores = scores.masked_fill(sample_mask, -math.inf)
    sums = torch.einsum("gbqd,bqdc->bqgc", scores.softmax(-1), sampled)
    return attention.output_proj(sums.flatten(2)) + query


@pytest.mark.parametrize("num_octaves", [0, 2])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("fused", [True, False])
def test_is_what_it_says(num_octaves, channels_last, fused):
    attention = module(num_octaves=num_octaves, fused=fused).double()
    given = inputs()
    if channels_last:
        given["images"] = given["images"].contiguous(memory_format=torch.channels_last)
    out, weights = attention(**given)
    assert_close(out, written_out(attention, **given))
    assert weights.shape == (B, G, Q, D)
    assert_close(weights.sum(-1), torch.ones(B, G, Q, dtype=torch.float64))


def test_gradients_are_the_definitions():
    grads = []
    for fused in (True, False):
        attention = module(fused=fused).double()
        given = {name: tensor.requires_grad_() for name, tensor in inputs().items()}
        out, weights = attention(**given)
        (out.square().sum() + weights.square().sum()).backward()
        grads.append([tensor.grad for tensor in (*given.values(), *attention.parameters())])
    for ours, expected in zip(*grads, strict=True):
        assert expected.abs().max() > 0
        assert_close(ours, expected)


def test_masked_samples_count_for_nothing():
    attention, given = drawn()
    mask = torch.rand(B, Q, D) < 0.4
    mask[..., 0] = False
    out, weights = attention(**given, sample_mask=mask)
    assert_close(out, written_out(attention, **given, sample_mask=mask))
    assert not weights.masked_select(mask.unsqueeze(1)).any()


def test_query_without_samples_takes_nothing():
    attention, given = drawn()
    mask = torch.zeros(B, Q, D, dtype=torch.bool)
    mask[0, 1] = True
    given = {name: tensor.requires_grad_() for name, tensor in given.items()}
    out, weights = attention(**given, sample_mask=mask)
    assert not weights[0, :, 1].any()
    assert_close(out[0, 1], given["query"][0, 1] + attention.output_proj.bias)
    out.sum().backward()
    assert all(tensor.grad.isfinite().all() for tensor in given.values())


def test_autocast_keeps_scores_and_weights_in_float32():
    attention, given = module(), inputs(torch.float32)
    exact, exact_weights = attention(**given)
    with torch.autocast("cpu", torch.bfloat16):
        rounded, weights = attention(**given)
    assert weights.dtype == torch.float32
    assert_close(weights, exact_weights, rtol=0.1, atol=0.03)
    assert_close(rounded, exact, rtol=0.1, atol=0.1)


@pytest.mark.parametrize(("queries", "depth_samples"), [(0, D), (Q, 0)])
def test_empty(queries, depth_samples):
    attention, given = drawn()
    given["query"] = given["query"][:, :queries]
    for name in ("samples", "depths"):
        given[name] = given[name][:, :queries, :depth_samples]
    out, weights = attention(**given)
    assert weights.shape == (B, G, queries, depth_samples)
    assert_close(out, given["query"] + attention.output_proj.bias)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: FusedSampleAttention(num_heads=0), "num_heads must be"),
        (lambda: FusedSampleAttention(num_octaves=-1), "num_octaves must be"),
        (
            lambda: module().double()(**{**inputs(), "depths": None}),
            "depths must be given, num_octaves is 2",
        ),
    ],
)
def test_bad_calls(call, message):
    with pytest.raises(ValueError, match=message):
        call()
