"""Blocks shared by the detectors: names, defaults, numbers, refusals."""

import json
import math

import pytest
import torch
from golden import golden, under
from torch import nn
from torch.testing import assert_close

from visdet.models.layers import (
    FFN,
    ConvModule,
    MultiheadAttention,
    SinePositionalEncoding,
    build_activation_layer,
    build_norm_layer,
)
from visdet.models.necks import ChannelMapper


def names(module):
    return set(module.state_dict())


@pytest.mark.parametrize(
    ("norm_cfg", "expected"),
    [
        (None, {"conv.weight", "conv.bias"}),
        ({"type": "GN", "num_groups": 2}, {"conv.weight", "gn.weight", "gn.bias"}),
        (
            {"type": "BN"},
            {
                "conv.weight",
                "bn.weight",
                "bn.bias",
                "bn.running_mean",
                "bn.running_var",
                "bn.num_batches_tracked",
            },
        ),
    ],
)
def test_conv_module_names(norm_cfg, expected):
    assert names(ConvModule(3, 4, 1, norm_cfg=norm_cfg)) == expected


def test_conv_module_is_conv_norm_activation():
    block = ConvModule(3, 4, 3, padding=1, norm_cfg={"type": "GN", "num_groups": 2})
    x = torch.randn(2, 3, 5, 7)
    assert_close(block(x), torch.relu(block.gn(block.conv(x))))
    linear = ConvModule(3, 4, 3, act_cfg=None)
    assert_close(linear(x), linear.conv(x))


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"type": "BN"}, nn.BatchNorm2d),
        ({"type": "SyncBN"}, nn.SyncBatchNorm),
        ({"type": "LN"}, nn.LayerNorm),
        ({"type": "GN", "num_groups": 4}, nn.GroupNorm),
        ({"type": nn.LayerNorm}, nn.LayerNorm),
    ],
)
def test_norm_by_name(config, kind):
    given = dict(config)
    layer = build_norm_layer({**config, "requires_grad": False}, 8)
    assert isinstance(layer, kind)
    assert not any(parameter.requires_grad for parameter in layer.parameters())
    assert config == given  # configs are never changed
    assert build_norm_layer({**config, "eps": 0.5}, 8).eps == 0.5


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: build_norm_layer({"type": "BatchNorm"}, 8), KeyError, "BatchNorm"),
        (lambda: build_norm_layer({"type": "GN"}, 8), TypeError, "num_groups"),
        (lambda: build_activation_layer({"type": "Relu"}), KeyError, "ReLU"),
        (lambda: FFN(num_fcs=1), ValueError, "num_fcs"),
        (
            lambda: MultiheadAttention(10, 3),
            AssertionError,
            "embed_dim must be divisible by num_heads",
        ),
        (lambda: SinePositionalEncoding(5), ValueError, "num_feats must be even and positive, got 5"),
        (lambda: ChannelMapper([4, 8], 4, num_outs=1), ValueError, "num_outs must be at least"),
    ],
)
def test_bad_calls(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_ffn_names_and_sum():
    ffn = FFN(8, 12)
    assert names(ffn) == {f"layers.{i}.{p}" for i in ("0.0", "1") for p in ("weight", "bias")}
    x, identity = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    inner = ffn.layers[1](torch.relu(ffn.layers[0][0](x)))
    assert_close(ffn(x), x + inner)
    assert_close(ffn(x, identity), identity + inner)
    ffn.add_identity = False
    assert_close(ffn(x), inner)
    assert "layers.1.0.weight" in names(FFN(8, 12, num_fcs=3))


@pytest.mark.parametrize("name", ["SinePositionalEncoding", "SinePositionalEncoding_plain"])
def test_positional_encoding_golden(name):
    arrays = golden("modules")
    encoding = SinePositionalEncoding(**json.loads(str(arrays[f"{name}/config"])))
    given, expected = under(arrays, f"{name}/input"), under(arrays, f"{name}/output")
    assert_close(encoding(given["mask"]), expected["masked"], rtol=1e-4, atol=1e-5)
    assert_close(encoding(None, given["shape_only"]), expected["unmasked"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", ["bool", "float", "of_heads", "padding", "padding_and_float", "none"])
def test_multihead_attention_is_that_of_torch(kind, batch_first):
    attention = MultiheadAttention(8, 2, batch_first=batch_first).eval()
    query, key, value = torch.randn(3, 4, 8), torch.randn(3, 5, 8), torch.randn(3, 5, 8)
    masks = {}
    if kind == "bool":
        masks["attn_mask"] = torch.rand(4, 5) > 0.7
    elif "float" in kind:
        masks["attn_mask"] = torch.randn(4, 5)
    elif kind == "of_heads":
        masks["attn_mask"] = torch.randn(6, 4, 5)
    if "padding" in kind:
        masks["key_padding_mask"] = torch.arange(5).expand(3, 5) > 2
    if not batch_first:
        query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
    padding = masks.get("key_padding_mask")
    if kind == "padding_and_float":  # torch wants one type for both
        padding = torch.zeros(3, 5).masked_fill(padding, -math.inf)
    expected = attention.attn(
        query, key, value, need_weights=False, attn_mask=masks.get("attn_mask"), key_padding_mask=padding
    )[0]
    assert_close(attention(query, key, value, **masks) - query, expected)
