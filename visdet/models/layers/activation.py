"""Activation layers by config name."""

from typing import Any

from torch import nn

from visdet.registry import MODELS

for _layer in (
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.PReLU,
    nn.ELU,
    nn.GELU,
    nn.SiLU,
    nn.Sigmoid,
    nn.Tanh,
    nn.Identity,
):
    MODELS.register_module(_layer.__name__, module=_layer)

_HAVE_INPLACE = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SiLU)


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
    layer_type = options.pop("type")
    if isinstance(layer_type, str):
        layer_type = MODELS.get(layer_type)
    if issubclass(layer_type, _HAVE_INPLACE):
        options.setdefault("inplace", inplace)
    return layer_type(**options)
