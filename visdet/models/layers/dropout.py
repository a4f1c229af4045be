"""Dropout layers by config."""

from typing import Any

from torch import nn

from visdet.registry import MODELS

__all__ = ["build_dropout"]


def build_dropout(dropout_layer: dict[str, Any] | None) -> nn.Module:
    """Return a dropout layer.

    Args:
        dropout_layer: ``dict(type='Dropout', drop_prob=p)``, where p is 0.5 by default, the config of another
            registered type, or None for the identity.

    Source: the keyword ``drop_prob`` is mmcv's.
    """
    if dropout_layer is None:
        return nn.Identity()
    options = dict(dropout_layer)
    if options.get("type") == "Dropout":
        options.pop("type")
        return nn.Dropout(options.pop("drop_prob", 0.5), **options)
    return MODELS.build(options)
