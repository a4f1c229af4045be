"""The residual sum of a layer and its normalisation: the same numbers in one call and in separate ones."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from visdet.models.layers.feed_forward import FFN
from visdet.models.layers.ms_deform_attn import MultiScaleDeformableAttention
from visdet.models.layers.multihead_attention import MultiheadAttention
from visdet.models.layers.normalization import LayerNorm, add_and_norm

LEVELS = torch.tensor([[4, 6], [2, 3]])
NORMS = {"LN": LayerNorm(32), "torch": nn.LayerNorm(32), "plain": LayerNorm(32, elementwise_affine=False)}


def layers(drop):
    attention = MultiScaleDeformableAttention(32, num_levels=2, dropout=drop, batch_first=True)
    return {
        "ffn": FFN(32, 64, ffn_drop=drop),
        "self_attn": MultiheadAttention(32, 4, proj_drop=drop, batch_first=True),
        "cross_attn": attention,
    }


def arguments(kind, device):
    if kind != "cross_attn":
        return {}
    return dict(
        value=torch.randn(2, 30, 32, device=device),
        reference_points=torch.rand(2, 5, 2, 2, device=device),
        spatial_shapes=LEVELS.to(device),
    )


@pytest.mark.parametrize("kind", ["ffn", "self_attn", "cross_attn"])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("trains", [False, True])
def test_a_layer_normalises_its_own_sum(kind, norm, trains, device):
    layer = layers(0.0 if trains else 0.5)[kind].to(device).train(trains)
    norm = NORMS[norm].to(device)
    x, more = torch.randn(2, 5, 32, device=device), arguments(kind, device)
    with torch.set_grad_enabled(trains):
        assert_close(layer(x, **more, norm=norm), norm(layer(x, **more)), rtol=1e-5, atol=1e-5)


def test_dropout_within_the_sum(device):
    branch, identity = torch.ones(64, 32, device=device), torch.zeros(64, 32, device=device)
    norm, dropout = LayerNorm(32).to(device), nn.Dropout(0.25)
    out = add_and_norm(norm, branch, identity, nn.Identity(), dropout)
    kept = out > 0
    assert 0.65 < kept.float().mean() < 0.85
    expected = norm(torch.where(kept, 4 / 3, 0.0))
    assert_close(out, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(add_and_norm(None, branch, identity, dropout.eval()), branch)


def test_layers_with_hooks_and_of_other_kinds_are_called():
    class Halved(nn.Module):
        def forward(self, x):
            return x / 2

    called = []
    hooked = nn.Dropout(0.0)
    hooked.register_forward_hook(lambda *_: called.append(1))
    ones = torch.ones(3, 32)
    assert torch.equal(add_and_norm(None, ones, ones, hooked, Halved()), ones * 1.5)
    assert called == [1]
