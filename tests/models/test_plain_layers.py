"""Layers with hooks, adapters, pruning or parametrisations are called; see ``is_plain``."""

import pytest
import torch
from plain_layers import CHECKS, check_layers
from tiny_detr import VARIANTS, batch, build
from torch import nn
from torch.testing import assert_close

from visdet.models.layers.normalization import add_and_norm
from visdet.models.layers.plain import all_rows, is_plain
from visdet.registry import MODELS

TOKENS = torch.linspace(-9, 9, 160).sin().view(2, 5, 16)
IMAGES = torch.linspace(-99, 99, 6144).sin().view(2, 3, 32, 32)
SWIN = {"embed_dims": 8, "depths": (2, 2), "num_heads": (1, 2), "out_indices": (0, 1), "window_size": 3}
ATTENTION = {"type": "MultiheadAttention", "embed_dims": 16, "num_heads": 2, "batch_first": True}
MODULES = {
    "attention": (ATTENTION, TOKENS),
    "attention_of_queries_first": (ATTENTION | {"batch_first": False, "bias": False}, TOKENS),
    "ffn": ({"type": "FFN", "embed_dims": 16, "feedforward_channels": 24}, TOKENS),
    "swin": ({"type": "SwinTransformer", **SWIN}, IMAGES),
    "resnet": ({"type": "ResNet", "depth": 18, "base_channels": 4}, IMAGES),
    "resnet50": ({"type": "ResNet", "depth": 50, "base_channels": 4, "norm_eval": False}, IMAGES),
}
# What a prediction does not call: losses, denoising, and branches that only training or other references need.
UNUSED = ("dn_query_generator", "bbox_head.loss")


def case(family):
    """Return a model in evaluation mode, and a function that runs it."""
    torch.manual_seed(0)
    if family in MODULES:
        config, inputs = MODULES[family]
        return MODELS.build(config).eval(), lambda model: model(inputs)
    images, samples = batch()
    return build(family).eval(), lambda model: model(images, samples, mode="tensor")


FAMILIES = {check: [*MODULES, *VARIANTS] for check in CHECKS} | {
    "quantised": ["ffn", "swin", "two_stage", "dino"]
}


@pytest.mark.parametrize(("check", "family"), [(check, one) for check in CHECKS for one in FAMILIES[check]])
def test_layers_are_called(check, family):
    # peft adapts one of several names of a layer, and would leave the other branches of these heads as they are.
    shared = ("bbox_head",) if family in ("base", "shared_two_stage") else ()
    check_layers(check, *case(family), UNUSED, shared)


def halves(module, inputs, output):
    return output / 2


@pytest.mark.parametrize("name", ["layer2", "layer2.0.downsample", "layer1.0.bn2"])
def test_a_hook_changes_what_follows(name):
    """A hook sees the output of its own module alone, also where a kernel would compute what follows."""
    model, run = case("resnet50")
    model.train()
    seen = []
    module = model.get_submodule(name)
    module.register_forward_hook(lambda module, inputs, output: seen.append((inputs[0], output.clone())))
    before = run(model)[-1]
    [(given, output)] = seen
    if "." in name:
        assert_close(output, module(given))
    module.register_forward_hook(halves)
    assert not torch.allclose(run(model)[-1], before)


def test_an_embedding_with_an_adapter_is_called():
    class Shifted(nn.Embedding):
        def forward(self, index):
            return super().forward(index) + 1

    plain, shifted, limited = nn.Embedding(4, 3), Shifted(4, 3), nn.Embedding(4, 3, max_norm=0.1)
    assert all_rows(plain) is plain.weight
    assert torch.equal(all_rows(shifted), shifted.weight + 1)
    assert (all_rows(limited).norm(dim=1) <= 0.1 + 1e-6).all()


def test_a_subclass_of_a_norm_is_called_as_it_is_defined():
    class Doubled(MODELS.get("LN")):
        def forward(self, input):
            return super().forward(input) * 2

    norm = Doubled(16)
    assert not is_plain(norm, MODELS.get("LN"))
    expected = nn.functional.layer_norm(TOKENS + TOKENS, (16,)) * 2
    assert_close(add_and_norm(norm, TOKENS, TOKENS), expected)


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.register_forward_hook(halves),
        lambda layer: layer.register_forward_pre_hook(lambda *_: None),
        lambda layer: layer.register_full_backward_hook(lambda *_: None),
        lambda layer: layer.register_full_backward_pre_hook(lambda *_: None),
        lambda layer: setattr(layer, "forward", lambda x: x),
        lambda layer: nn.utils.spectral_norm(layer),
        lambda layer: nn.utils.parametrizations.weight_norm(layer),
    ],
    ids=["hook", "pre-hook", "backward", "backward-pre", "forward", "spectral_norm", "weight_norm"],
)
def test_what_is_not_plain(change):
    layer = nn.Linear(3, 3)
    assert is_plain(layer, nn.Linear) and not is_plain(layer, nn.Conv2d)
    change(layer)
    assert not is_plain(layer, nn.Linear)


def test_a_compiled_layer_is_plain():
    attention, run = case("attention")
    compiled = torch.compile(attention, backend="eager", fullgraph=True)
    assert_close(run(compiled), run(attention))
