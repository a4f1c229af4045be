"""MultiScaleDeformableAttention: against a peer, its start, its layouts, its types."""

import copy
import math

import pytest
import torch
from torch.testing import assert_close

from visdet.models.layers import MultiScaleDeformableAttention

SHAPES = torch.tensor([[5, 7], [3, 4]])
S = 5 * 7 + 3 * 4


def module(**options):
    torch.manual_seed(0)
    attention = MultiScaleDeformableAttention(
        **{"embed_dims": 12, "num_heads": 3, "num_levels": 2, "num_points": 2, "batch_first": True, **options}
    ).eval()
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return attention


def inputs(reference_size=2):
    torch.manual_seed(1)
    return {
        "query": torch.randn(2, 6, 12),
        "value": torch.randn(2, S, 12),
        "query_pos": torch.randn(2, 6, 12),
        "reference_points": torch.rand(2, 6, 2, reference_size),
        "spatial_shapes": SHAPES,
    }


def test_starts_as_a_ring_of_uniform_weights():
    attention = MultiScaleDeformableAttention(embed_dims=32, num_heads=8, num_levels=3, num_points=2)
    bias = attention.sampling_offsets.bias.detach().view(8, 3, 2, 2)
    assert torch.equal(bias[:, 0], bias[:, 2])
    assert_close(bias[:, :, 1], 2 * bias[:, :, 0])
    assert_close(bias[0, 0, 0], torch.tensor([1.0, 0.0]))
    assert_close(bias[1, 0, 0], torch.tensor([1.0, 1.0]))
    assert_close(bias[4, 0, 0], torch.tensor([-1.0, 0.0]), atol=1e-6, rtol=0)
    for parameter in (attention.sampling_offsets.weight, *attention.attention_weights.parameters()):
        assert not parameter.any()
    assert attention.value_proj.weight.abs().max().item() <= math.sqrt(6 / 64)


def test_one_reference_serves_the_whole_batch_and_all_levels():
    attention, given = module(), inputs()
    shared = given["reference_points"][:1, :, :1]
    expected = attention(**{**given, "reference_points": shared.expand(2, -1, 2, -1)})
    assert_close(attention(**{**given, "reference_points": shared}), expected)


def test_identity_and_default_value():
    attention = module(num_levels=1)
    query, identity = torch.randn(2, 35, 12), torch.randn(2, 35, 12)
    given = {"reference_points": torch.rand(2, 35, 1, 2), "spatial_shapes": SHAPES[:1]}
    difference = attention(query, identity=identity, **given) - attention(query, value=query, **given)
    assert_close(difference, identity - query)


def test_channels_that_do_not_suit_the_heads():
    for options in ({"embed_dims": 10}, {"embed_dims": 12, "value_proj_ratio": 0.5}):
        with pytest.raises(ValueError, match=r"embed_dims .*must be divisible .* and 4"):
            MultiScaleDeformableAttention(num_heads=4, **options)


@pytest.mark.parametrize("with_gradients", [True, False])
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("query", lambda query: query[..., :8], "12x8 and 12x"),
        ("value", lambda value: value[:, :-1], "must lie within the S = 46 rows of value"),
        (
            "value",
            lambda value: value[:1],
            r"reference_points must be .* B = 1 as in value and L = 2, got \(2, 6, 2, 2\)",
        ),
        (
            "reference_points",
            lambda points: points[..., :1],
            r"reference_points must be .* got \[2, 6, 2, 1\]",
        ),
        ("key_padding_mask", lambda _: torch.zeros(2, 5) > 0, r"must match the size"),
    ],
)
def test_bad_inputs_are_named(with_gradients, name, change, message):
    given = inputs()
    given[name] = change(given.get(name))
    with torch.set_grad_enabled(with_gradients), pytest.raises((RuntimeError, ValueError), match=message):
        module()(**{**given, "query_pos": None})


# Autocast's type or None, the type of everything that has one, and how far gradients may be from those in float64. A
# rounded position may be on the other side of a texel's centre, where the gradient of a location jumps.
PRECISIONS = {
    "float64": (None, torch.float64, 1e-10),
    "float32": (None, torch.float32, 1e-4),
    "bfloat16": (None, torch.bfloat16, 0.3),
    "autocast to bfloat16": (torch.bfloat16, torch.float32, 0.3),
    "autocast to float16": (torch.float16, torch.float32, 5e-2),
}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("reference_size", [2, 4])
def test_gradients_with_masked_values(reference_size, batch_first, precision, device):
    autocast, dtype, tolerance = PRECISIONS[precision]
    attention = module(batch_first=batch_first).to(dtype)
    given = inputs(reference_size)
    del given["spatial_shapes"]
    masked = torch.rand(2, S) < 0.3
    given["value"][masked] = math.inf  # What padding holds counts for nothing.
    weight = torch.randn(2, 6, 12).to(dtype)
    if not batch_first:
        given.update({name: given[name].transpose(0, 1) for name in ("query", "value", "query_pos")})
        weight = weight.transpose(0, 1)
    computed = torch.promote_types(dtype, torch.float32)
    given = {
        name: tensor.to(computed if name == "reference_points" else dtype) for name, tensor in given.items()
    }

    def gradients(attention, given, autocast, device):
        leaves = {name: tensor.detach().to(device).requires_grad_() for name, tensor in given.items()}
        with torch.autocast(device, autocast, enabled=autocast is not None):
            out = attention(**leaves, key_padding_mask=masked.to(device), spatial_shapes=SHAPES)
        total = (out * weight.to(out)).sum()
        wanted = [leaf for name, leaf in leaves.items() if name != "value"]
        return out, torch.autograd.grad(total, [*wanted, *list(attention.parameters())[:4]])

    exact = {name: tensor.double() for name, tensor in given.items()}
    reference = copy.deepcopy(attention).double()
    expected, expected_grads = gradients(reference, exact, None, "cpu")
    out, grads = gradients(attention.to(device), given, autocast, device)
    assert out.isfinite().all()
    assert (out.cpu() - expected).norm() <= tolerance * expected.norm()
    for one, other in zip(grads, expected_grads, strict=True):
        assert (one.cpu() - other).norm() <= tolerance * other.norm() + 1e-9
