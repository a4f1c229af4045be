"""DeformableFeatureAggregation and its key points: golden vectors, by hand, and what configs may ask."""

import pytest
import torch
from refused import assert_refused
from sparsedrive_golden import built, close
from torch.testing import assert_close

from tests.fuzz.problem import generator_of
from visdet.ops import feature_maps_format
from visdet.ops.deformable_aggregation_fused import locations_and_weights
from visdet.registry import MODELS

BOX_POINTS = {
    "type": "SparseBox3DKeyPointsGenerator",
    "num_learnable_pts": 2,
    "fix_scale": [[0, 0, 0], [0.45, 0, 0]],
}
LINE_POINTS = {
    "type": "SparsePoint3DKeyPointsGenerator",
    "num_sample": 4,
    "num_learnable_pts": 2,
    "fix_height": (0, 1),
    "ground_height": -1.5,
}


def make_module(**changes):
    config = {
        "type": "DeformableFeatureAggregation",
        "embed_dims": 16,
        "num_groups": 4,
        "num_levels": 2,
        "num_cams": 2,
        "kps_generator": BOX_POINTS,
        **changes,
    }
    torch.manual_seed(0)
    module = MODELS.build(config)
    torch.nn.init.normal_(module.weights_fc.weight, std=0.3)
    return module


def make_inputs(B=2, N=5, anchor_dims=11, C=16):
    """Return instance features, anchors in front of both cameras, embeddings, maps, metas."""
    generator = generator_of(1)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    anchor = draw(B, N, anchor_dims) * 0.5
    # Camera 0 looks along +x, camera 1 along -x: u = 32 + 30 * lateral / depth.
    forward = torch.tensor([[32.0, -30, 0, 160], [16, 0, -30, 80], [1, 0, 0, 5], [0, 0, 0, 1]])
    backward = torch.tensor([[-32.0, 30, 0, 160], [-16, 0, -30, 80], [-1, 0, 0, 5], [0, 0, 0, 1]])
    metas = {
        "projection_mat": torch.stack([forward, backward]).expand(B, -1, -1, -1),
        "image_wh": torch.tensor([64.0, 32.0]).expand(B, 2, 2),
    }
    maps = [draw(B, 2, C, 8, 16), draw(B, 2, C, 4, 8)]
    return draw(B, N, C), anchor, draw(B, N, C), maps, metas


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(
    "case", ["DeformableFeatureAggregation", "DeformableFeatureAggregation_add_no_camera_embed"]
)
def test_matches_golden(case, flat):
    module, given, expected = built(case, "DeformableFeatureAggregation")
    metas = {"projection_mat": given["projection_mat"], "image_wh": given["image_wh"]}
    maps = [given[f"feature_maps/{level}"] for level in range(3)]
    features = feature_maps_format(maps)
    for actual, name in zip(features, ("feature", "spatial_shape", "start_index"), strict=True):
        close(actual, expected[f"flat_{name}"])
    points = module.kps_generator(given["anchor"], given["instance_feature"])
    close(points, expected["key_points"])
    logits, camera_logits = module._get_logits(
        given["instance_feature"], given["anchor_embed"], given["projection_mat"]
    )
    none = logits.new_empty(0)
    camera_logits = none if camera_logits is None else camera_logits
    locations, weights = locations_and_weights(points, *metas.values(), logits, camera_logits, none)
    close(locations.permute(0, 3, 1, 2, 4), expected["points_2d"])
    close(weights.permute(0, 1, 3, 4, 2, 5), expected["weights"])
    output = module(
        given["instance_feature"], given["anchor"], given["anchor_embed"], features if flat else maps, metas
    )
    close(output, expected["output"])


def test_fixed_key_points_match_golden():
    module, given, expected = built("SparseBox3DKeyPointsGenerator")
    close(module(given["anchor"]), expected["fixed_only"])


@pytest.mark.parametrize("use_camera_embed", [False, True])
@pytest.mark.parametrize("generator", [BOX_POINTS, LINE_POINTS], ids=["box", "line"])
def test_everything_that_learns_gets_a_gradient(generator, use_camera_embed):
    module = make_module(kps_generator=generator, use_camera_embed=use_camera_embed)
    module(*make_inputs(anchor_dims=11 if generator is BOX_POINTS else 8)).square().sum().backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in module.parameters() if p.requires_grad)


def test_config_is_left_alone_and_residual_modes():
    before = dict(BOX_POINTS)
    inputs = make_inputs()
    added = make_module(residual_mode="add").eval()
    joined = make_module(residual_mode="cat").eval()
    assert before == BOX_POINTS
    output = joined(*inputs)
    assert output.shape == (2, 5, 32) and torch.equal(output[..., 16:], inputs[0])
    assert_close(added(*inputs), output[..., :16] + inputs[0])


def test_a_projection_that_requires_grad_gets_one():
    inputs = make_inputs()
    fused = make_module()(*inputs)
    projection = inputs[-1]["projection_mat"].clone().requires_grad_()
    metas = {**inputs[-1], "projection_mat": projection}
    output = make_module()(*inputs[:-1], metas)
    assert_close(output, fused, rtol=1e-4, atol=1e-4)
    (grad,) = torch.autograd.grad(output.square().sum(), projection)
    assert grad.isfinite().all() and grad.any()


def test_attention_dropout_keeps_the_mean():
    """Whole (camera, point) pairs are dropped, and the others are scaled up; see the tests of the operator."""
    module = make_module(attn_drop=0.5, proj_drop=0.0)
    inputs = make_inputs(N=50)
    assert 0.4 < module._draw_pairs(inputs[0]).float().mean() < 0.6
    mean = torch.stack([module(*inputs) for _ in range(200)]).mean(0)
    kept = module.eval()(*inputs)
    assert (mean - kept).abs().mean() < 0.1 * (kept - inputs[0]).abs().mean()


def test_autocast_keeps_coordinates_in_float32():
    module = make_module(use_camera_embed=True).eval()
    instance_feature, anchor, anchor_embed, maps, metas = make_inputs()
    expected = module(instance_feature, anchor, anchor_embed, maps, metas)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module.kps_generator(anchor, instance_feature).dtype == torch.float32
        output = module(instance_feature, anchor, anchor_embed, [level.bfloat16() for level in maps], metas)
    assert (output.float() - expected).abs().max() < 0.05 * expected.abs().max()


def test_rejections():
    assert_refused(
        ValueError,
        (lambda: make_module(residual_mode="sum"), "residual_mode must be 'add' or 'cat', got 'sum'"),
        (lambda: make_module(attn_drop=1.5), r"attn_drop must be float from 0 to 1, got 1.5"),
        (lambda: make_module(kps_generator={**BOX_POINTS, "fix_scale": [[0.0, 1.0]]}), "fix_scale must be"),
    )
    inputs = list(make_inputs())
    for sizes in ({"num_cams": 3}, {"num_levels": 3}):
        with pytest.raises(ValueError, match=r"projection_mat must be of . cameras, .* got \(2, 2, 2\)"):
            make_module(**sizes)(*inputs)
