"""Swin Transformer: mmdet's numbers, the original's checkpoints, freezing, recomputation, refusals."""

import json

import pytest
import torch
from detr_golden import assert_norms
from golden import close, every, golden, golden_state, sampled, under
from mmengine.optim import OptimWrapper
from tiny_detr import VARIANTS, config, train, train_by_graphs
from torch.testing import assert_close
from training_steps import gradients_of

from visdet.engine.graphs import steps
from visdet.models import SwinTransformer
from visdet.registry import MODELS

SMALL = {"embed_dims": 8, "depths": (2, 2), "num_heads": (1, 2), "out_indices": (0, 1), "window_size": 3}


@pytest.mark.parametrize("with_cp", [False, True])
def test_numbers_of_mmdet(with_cp):
    arrays = golden("swin_small")
    model = MODELS.build(
        {"type": "SwinTransformer", **json.loads(str(arrays["config"])), "with_cp": with_cp}
    ).train()
    model.load_state_dict(golden_state(model, arrays), strict=True)
    maps = model(torch.from_numpy(arrays["input/images"]))
    for name, expected in under(arrays, "output").items():
        index, step = every(name)
        close(sampled(maps[int(index)], step), expected)
    sum((output**2).mean() for output in maps).backward()
    assert_norms(gradients_of(model), arrays, 1e-7)


def original_state(model):
    """Return random weights with the names of the original implementation."""
    names = {"stages.": "layers.", "attn.w_msa.": "attn.", "ffn.layers.0.0.": "mlp.fc1."}
    names |= {"ffn.layers.1.": "mlp.fc2.", "patch_embed.projection.": "patch_embed.proj."}
    state = {"norm.weight": torch.ones(16), "head.weight": torch.ones(5, 16)}
    state["layers.0.blocks.1.attn_mask"] = torch.zeros(4, 9, 9)
    for name, value in model.state_dict().items():
        for own, theirs in names.items():
            name = name.replace(own, theirs)
        if not name.startswith("norm"):
            state[name] = torch.randn(value.shape) if value.is_floating_point() else value
    return state


def test_a_checkpoint_of_the_original(tmp_path):
    path = tmp_path / "swin.pth"
    model = SwinTransformer(
        **SMALL, convert_weights=True, init_cfg=dict(type="Pretrained", checkpoint=str(path))
    )
    state = original_state(model)
    torch.save({"model": state}, path)
    model.init_weights()
    assert torch.equal(
        model.stages[0].blocks[1].ffn.layers[0][0].weight, state["layers.0.blocks.1.mlp.fc1.weight"]
    )
    assert torch.equal(
        model.stages[1].blocks[0].attn.w_msa.qkv.bias, state["layers.1.blocks.0.attn.qkv.bias"]
    )
    x = torch.randn(1, 6, 4, 8)
    corners = [x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]]
    merged = torch.nn.functional.layer_norm(
        torch.cat(corners, -1),
        (32,),
        state["layers.0.downsample.norm.weight"],
        state["layers.0.downsample.norm.bias"],
    )
    expected = merged @ state["layers.0.downsample.reduction.weight"].T
    assert_close(model.stages[0].downsample(x), expected, rtol=1e-4, atol=1e-4)


def test_frozen_stages_do_not_learn_or_drop():
    model = SwinTransformer(**SMALL, frozen_stages=1, drop_path_rate=0.5).train()
    learning = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert learning == {name for name in model.state_dict() if name.startswith(("stages.1", "norm1"))} - {
        f"stages.1.blocks.{i}.attn.w_msa.relative_position_index" for i in range(2)
    }
    assert not model.stages[0].training and model.stages[1].training and not model.patch_embed.training


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": (1, 2, 3)}, "depths and num_heads must have one number for each stage"),
        ({"strides": (4, 1)}, "strides must be patch_size, 2"),
        ({"out_indices": (0, 2)}, r"out_indices must be stages 0..1, got \(0, 2\)"),
    ],
)
def test_options_that_cannot_work(options, message):
    with pytest.raises(ValueError, match=message):
        SwinTransformer(**{**SMALL, **options})


@pytest.mark.cuda
def test_replayed_steps_are_eager_steps(monkeypatch):
    monkeypatch.setattr(steps, "_LEAST_FREE", 2)  # as if the memory did not suffice to keep all activations
    backbone = {"type": "SwinTransformer", **SMALL, "drop_path_rate": 0.3, "with_cp": True}
    models = []
    for _ in range(2):
        given = config(**VARIANTS["dino"], backbone=backbone)
        given["neck"] |= {"in_channels": [8, 16]}
        torch.manual_seed(0)
        models.append(MODELS.build(given).cuda().train())
    expected = train(models[0], OptimWrapper)
    losses = train_by_graphs(models[1], OptimWrapper)
    assert_close(losses, expected, rtol=1e-3, atol=1e-3)
