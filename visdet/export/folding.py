"""Frozen norms within the weights of the convolutions before them, as files hold them."""

import copy

import torch
from torch import nn

from visdet.models.backbones.resnet import ResNet
from visdet.models.layers.frozen_norm import fold_frozen_norms


def with_folded_norms(model: nn.Module) -> nn.Module:
    """Return a copy of a model in evaluation, which computes the same with fewer layers.

    The model itself multiplies the weights in each call, since they may be trained. A runtime would do so, too.
    """
    model = copy.deepcopy(model).eval()
    places = {module: name for name, module in model.named_modules()}
    for backbone in model.modules():
        if not isinstance(backbone, ResNet):
            continue
        norms = dict(backbone.layers)
        with torch.no_grad():
            folded = fold_frozen_norms(backbone.layers)
        for conv, product in folded.items():
            weight, shift, _ = product
            assert shift is not None
            conv.weight = nn.Parameter(weight, requires_grad=False)
            conv.bias = nn.Parameter(shift.clone(), requires_grad=False)
            model.set_submodule(places[norms[conv]], nn.Identity())
    return model
