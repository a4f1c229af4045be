"""Dropout layers by config."""

from typing import Any

from torch import nn

from visdet.registry import MODELS


def build_dropout(dropout_layer: dict[str, Any] | None) -> nn.Module:
    """Return a dropout layer.

    Args:
        dropout_layer: ``dict(type='Dropout', drop_prob=p)``, where p is 0.5 by default, ``dict(type='DropPath',
            drop_prob=p)`` to drop whole samples, where p is 0.1 by default, the config of another registered type, or
            None for the identity.

    Source: names and defaults are mmcv's.
    """
    if dropout_layer is None:
        return nn.Identity()
    options = dict(dropout_layer)
    if options.get("type") == "Dropout":
        options.pop("type")
        return nn.Dropout(options.pop("drop_prob", 0.5), **options)
    if options.get("type") == "DropPath":
        from torchvision.ops import StochasticDepth  # It takes a second to import.

        return StochasticDepth(options.get("drop_prob", 0.1), "row")
    return MODELS.build(options)
