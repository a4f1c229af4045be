"""Activations and dropout by their configs."""

import inspect
from typing import Any

from torch import nn

from visdet.registry import MODELS

for _name in ["ReLU", "ReLU6", "LeakyReLU", "PReLU", "ELU", "GELU", "SiLU", "Sigmoid", "Tanh", "Identity"]:
    MODELS.register_module(_name, module=getattr(nn, _name))


def build_activation_layer(act_cfg: dict[str, Any], inplace: bool = True) -> nn.Module:
    """Return the activation layer that ``act_cfg`` describes.

    Args:
        act_cfg: ``type`` and the keywords of the layer.
        inplace: the default of the keyword ``inplace``, for layers that have it.

    Raises:
        KeyError: the ``type`` is unknown.
        TypeError: the layer does not accept a keyword.
    """
    options = dict(act_cfg)
    layer_type = MODELS.get(options.pop("type"))
    if "inplace" in inspect.signature(layer_type).parameters:
        options.setdefault("inplace", inplace)
    return layer_type(**options)


def build_dropout(dropout_layer: dict[str, Any] | None) -> nn.Module:
    """Return a dropout layer.

    Args:
        dropout_layer: ``dict(type='Dropout', drop_prob=p)``, where p is 0.5 by default, ``dict(type='DropPath',
            drop_prob=p)`` to drop whole samples, where p is 0.1 by default, the config of another registered type, or
            None for the identity.

    Source: names and defaults are mmcv's.
    """
    return nn.Identity() if dropout_layer is None else MODELS.build(dropout_layer)


@MODELS.register_module("Dropout")
def _dropout(drop_prob: float = 0.5, inplace: bool = False) -> nn.Module:
    return nn.Dropout(drop_prob, inplace)


@MODELS.register_module("DropPath")
def _drop_path(drop_prob: float = 0.1) -> nn.Module:
    from torchvision.ops import StochasticDepth  # It takes a second to import.

    return StochasticDepth(drop_prob, "row")
