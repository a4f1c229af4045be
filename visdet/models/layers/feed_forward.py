"""The transformer's feed-forward block."""

from typing import Annotated, Any

from mmengine.model import BaseModule
from torch import Tensor, nn

from visdet.checks.arguments import Range
from visdet.registry import MODELS

from .builders import build_activation_layer, build_dropout
from .linear import Linear, linear_relu_dropout
from .normalization import add_and_norm
from .plain import is_plain
from .root_registration import register_in_root

_RELU = {"type": "ReLU"}


class HiddenLayer(nn.Sequential):
    """A linear layer, its activation and dropout."""

    def forward(self, x: Tensor) -> Tensor:
        """Return ``dropout(activation(linear(x)))``."""
        linear, activation, dropout = self
        if is_plain(linear, Linear) and is_plain(activation, nn.ReLU) and is_plain(dropout, nn.Dropout):
            return linear_relu_dropout(x, linear, dropout.p if dropout.training else 0.0)
        return super().forward(x)


def relu_perceptron(embed_dims: int, num_hidden: int, num_outputs: int) -> nn.Sequential:
    """Return ``num_hidden`` linear layers of one width, each followed by a ReLU, and one of ``num_outputs`` numbers."""
    layers: list[nn.Module] = []
    for _ in range(num_hidden):
        layers += [nn.Linear(embed_dims, embed_dims), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(embed_dims, num_outputs))


def feed_forward_layers(
    in_channels: int,
    hidden_channels: int,
    out_channels: int,
    num_fcs: int,
    act_cfg: dict[str, Any],
    ffn_drop: float,
) -> nn.Sequential:
    """Return ``num_fcs`` linear layers. Dropout follows each, and an activation comes before it in all but the last.

    Parameter names: ``0.0.*``, ``1.0.*``, ... of the hidden layers, ``{num_fcs-1}.*`` of the last layer.

    Args:
        in_channels, hidden_channels, out_channels: widths of the input, the hidden layers and the output.
        num_fcs: number of linear layers, at least 2.
        act_cfg: config of the activation after each hidden layer.
        ffn_drop: dropout probability after every linear layer.
    """
    widths = [in_channels] + [hidden_channels] * (num_fcs - 2)
    hidden = [
        HiddenLayer(
            Linear(width, hidden_channels),
            # The output of a linear layer is a view. If it were overwritten, autograd would copy the gradient.
            build_activation_layer(act_cfg, inplace=False),
            nn.Dropout(ffn_drop),
        )
        for width in widths
    ]
    return nn.Sequential(*hidden, Linear(hidden_channels, out_channels), nn.Dropout(ffn_drop))


def feed_forward(
    layers: nn.Sequential,
    x: Tensor,
    added: Tensor | None,
    dropout_layer: nn.Module,
    norm: nn.Module | None,
    next_pos: Tensor | None = None,
) -> Tensor:
    """Return ``norm(added + dropout_layer(layers(x)))``, where ``added`` and ``norm`` may be None.

    Args:
        layers: the result of :func:`feed_forward_layers`. next_pos: see ``add_and_norm``.
    """
    dropouts = [dropout_layer]
    if is_plain(layers, nn.Sequential):
        *linear_layers, dropout = layers
        for layer in linear_layers:
            x = layer(x)
        dropouts = [dropout, dropout_layer]
    else:
        x = layers(x)
    if added is not None:
        return add_and_norm(norm, x, added, *dropouts, next_pos=next_pos)
    for dropout in dropouts:
        x = dropout(x)
    return x if norm is None else norm(x)


@register_in_root
@MODELS.register_module()
class FFN(BaseModule):
    """``identity + dropout_layer(Linear(… dropout(act(Linear(x)))))``.

    Parameter names: ``layers.0.0.*``, ``layers.1.0.*``, ... of the hidden layers, ``layers.{num_fcs-1}.*`` of the last
    layer.

    Args:
        embed_dims: channels of input and output.
        feedforward_channels: hidden channels.
        num_fcs: number of linear layers, at least 2.
        act_cfg: activation after each hidden layer.
        ffn_drop: dropout probability after every linear layer.
        dropout_layer: dropout of the block's output before it is added, e.g. ``dict(type='Dropout', drop_prob=0.1)``.
        add_identity: whether to add the input (or ``identity``).

    Source: names and defaults are mmcv's.
    """

    def __init__(
        self,
        embed_dims: int = 256,
        feedforward_channels: int = 1024,
        num_fcs: Annotated[int, Range(2)] = 2,
        act_cfg: dict[str, Any] = _RELU,
        ffn_drop: float = 0.0,
        dropout_layer: dict[str, Any] | None = None,
        add_identity: bool = True,
        init_cfg: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(init_cfg)
        self.layers = feed_forward_layers(
            embed_dims, feedforward_channels, embed_dims, num_fcs, act_cfg, ffn_drop
        )
        self.dropout_layer = build_dropout(dropout_layer)
        self.add_identity = add_identity

    def forward(
        self,
        x: Tensor,
        identity: Tensor | None = None,
        norm: nn.Module | None = None,
        next_pos: Tensor | None = None,
    ) -> Tensor:
        """Return [..., embed_dims] from x [..., embed_dims].

        Args:
            x: the input. identity: replaces x in the sum. norm: a normalisation of the result, or None.
            next_pos: what the next layer will add to the result, or None. It does not change the result.
        """
        added = (x if identity is None else identity) if self.add_identity else None
        return feed_forward(self.layers, x, added, self.dropout_layer, norm, next_pos)
