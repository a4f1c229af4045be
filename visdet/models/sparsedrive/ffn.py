"""The feed-forward block whose input and output may differ in width."""

from typing import Annotated, Any

from mmengine.model import BaseModule
from torch import Tensor, nn

from visdet.checks.arguments import Range
from visdet.registry import MODELS

from ..layers.builders import build_dropout
from ..layers.feed_forward import feed_forward, feed_forward_layers
from ..layers.normalization import build_norm_layer
from ..layers.precision import as_autocast_input

_RELU = {"type": "ReLU", "inplace": True}


@MODELS.register_module()
class AsymmetricFFN(BaseModule):
    """``identity_fc(x') + dropout_layer(Linear(… drop(act(Linear(x')))))`` with ``x' = pre_norm(x)``.

    The parameter names are ``pre_norm.*``, ``layers.0.0.*``, ..., ``layers.{num_fcs-1}.*`` and ``identity_fc.*``. As in
    published checkpoints, ``identity_fc`` is a linear layer even between equal widths, unless ``feedforward_channels``
    has the same width, too.

    Args:
        in_channels: width of the input, by default ``embed_dims``.
        pre_norm: config of the normalisation of the input, e.g. ``dict(type='LN')``, or None to leave it out.
        embed_dims: width of the output. feedforward_channels: width of the hidden layers.
        num_fcs: number of linear layers, at least 2.
        act_cfg: config of the activation after each hidden layer. ffn_drop: dropout after every linear layer.
        dropout_layer: config of the dropout of the block's output before the sum.
        add_identity: whether the normalised input is added. ``identity_fc`` brings it to the width ``embed_dims``.

    Source: names and defaults are SparseDrive's.
    """

    def __init__(
        self,
        in_channels: int | None = None,
        pre_norm: dict[str, Any] | None = None,
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
        in_channels = in_channels or embed_dims
        self.pre_norm = None if pre_norm is None else build_norm_layer(pre_norm, in_channels)
        self.layers = feed_forward_layers(
            in_channels, feedforward_channels, embed_dims, num_fcs, act_cfg, ffn_drop
        )
        self.dropout_layer = build_dropout(dropout_layer)
        self.add_identity = add_identity
        if add_identity:
            is_plain = in_channels == feedforward_channels == embed_dims
            self.identity_fc = nn.Identity() if is_plain else nn.Linear(in_channels, embed_dims)

    def forward(self, x: Tensor, identity: Tensor | None = None, norm: nn.Module | None = None) -> Tensor:
        """Return the output [..., embed_dims] for x [..., in_channels].

        Args:
            identity: [..., in_channels]. It replaces the normalised x in the sum.
            norm: a normalisation of the output, or None.
        """
        pre_norm = self.pre_norm
        if pre_norm is not None:
            x = pre_norm(x)
        x = as_autocast_input(x)
        added = self.identity_fc(x if identity is None else identity) if self.add_identity else None
        return feed_forward(self.layers, x, added, self.dropout_layer, norm)
