"""SparseDrive calls layers with hooks, adapters, pruning or parametrisations; see ``visdet.models.layers.plain``."""

import pytest
import torch
from plain_layers import CHECKS, assert_same, check_layers
from tiny_driving import frame, tiny_model
from torch import nn

from visdet.models.layers.plain import is_plain
from visdet.models.sparsedrive.mlp import SideBySide, linear_relu_ln

# Only training reads depths, and the banks of instances have no forward.
UNUSED = ("depth_branch", "head.det_head.instance_bank", "head.map_head.instance_bank")


def case():
    """Return the model in evaluation mode, and a function that runs it."""
    images, samples = frame([0.0, 0.0])
    model = tiny_model().eval()
    for layer in model.modules():
        if hasattr(layer, "weights_fc"):  # a start of zeros would hide errors
            nn.init.normal_(layer.weights_fc.weight, std=0.2)
    return model, lambda model: model(images, samples, mode="tensor")


@pytest.mark.parametrize("check", CHECKS)
def test_layers_are_called(check):
    check_layers(check, *case(), UNUSED)


@torch.no_grad()
def test_the_weights_of_a_hooked_linear_layer_are_those_of_the_sum():
    """The layer that is called for all cameras gives what it gives, split, to queries and cameras."""
    model, run = case()
    expected = run(model)
    sizes = []
    layers = [layer for name, layer in model.named_modules() if name.endswith("weights_fc")]
    for layer in layers:
        layer.register_forward_hook(lambda module, inputs, output: sizes.append(inputs[0].dim()))
    assert_same(run(model), expected)
    assert sizes and set(sizes) == {4}


def test_perceptrons_with_hooks_are_not_computed_side_by_side():
    perceptrons = [nn.Sequential(*linear_relu_ln(8, 1, 2, size)) for size in (3, 2)]
    assert SideBySide.serves(perceptrons) and is_plain(perceptrons[0], nn.Sequential)
    perceptrons[1][3].register_forward_hook(lambda *_: None)
    assert not SideBySide.serves(perceptrons)
    perceptrons[1] = nn.Identity()
    assert not SideBySide.serves(perceptrons)
