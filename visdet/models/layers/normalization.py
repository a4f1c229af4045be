"""Normalisation layers by config name."""

from typing import Any

from torch import nn

from visdet.errors import InvalidTypeError
from visdet.registry import MODELS

__all__ = ["build_norm_layer", "norm_abbreviation"]

for _name, _layer in {
    "BN": nn.BatchNorm2d,
    "BN1d": nn.BatchNorm1d,
    "BN2d": nn.BatchNorm2d,
    "BN3d": nn.BatchNorm3d,
    "SyncBN": nn.SyncBatchNorm,
    "GN": nn.GroupNorm,
    "LN": nn.LayerNorm,
    "IN": nn.InstanceNorm2d,
}.items():
    MODELS.register_module(_name, module=_layer)


def norm_abbreviation(layer_type: type[nn.Module]) -> str:
    """Return the name under which parameters of a normalisation layer are stored: 'bn', 'gn', 'ln', 'in' or 'norm'."""
    for base, abbreviation in (
        (nn.modules.instancenorm._InstanceNorm, "in"),  # before its base class, the batch norm
        (nn.modules.batchnorm._BatchNorm, "bn"),
        (nn.GroupNorm, "gn"),
        (nn.LayerNorm, "ln"),
    ):
        if issubclass(layer_type, base):
            return abbreviation
    return "norm"


def build_norm_layer(norm_cfg: dict[str, Any], num_features: int) -> nn.Module:
    """Return the layer ``norm_cfg`` describes, for ``num_features`` channels.

    Args:
        norm_cfg: ``type`` ('BN', 'SyncBN', 'GN', 'LN', 'IN' or a registered name), ``requires_grad`` (default True:
            whether scale and shift learn), and the layer's own keywords (``eps``, ``momentum``, ``num_groups``, ...).
        num_features: channels of the input.

    Raises:
        KeyError: unknown ``type``. TypeError: a keyword the layer does not take, or 'GN' without ``num_groups``.
    """
    options = dict(norm_cfg)
    layer_type = options.pop("type")
    if isinstance(layer_type, str):
        layer_type = MODELS.get(layer_type)
    requires_grad = options.pop("requires_grad", True)
    if issubclass(layer_type, nn.GroupNorm):
        if "num_groups" not in options:
            raise InvalidTypeError(f"norm_cfg: type 'GN' needs num_groups, got {dict(norm_cfg)}")
        layer = layer_type(num_channels=num_features, **options)
    else:
        layer = layer_type(num_features, **options)
    for parameter in layer.parameters():
        parameter.requires_grad = requires_grad
    return layer
