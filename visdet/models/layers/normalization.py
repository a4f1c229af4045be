"""Normalisation layers by their configs, and the sum of a branch and its input before a normalisation."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from visdet.errors import InvalidInputError
from visdet.ops.fused import batch_norm_add_relu, dropout_add_layer_norm
from visdet.registry import MODELS

from .plain import is_plain


def add_relu(x: Tensor, residual: Tensor | None, relu: bool) -> Tensor:
    """Return ``x + residual``, or the ReLU of that, which may overwrite ``x``."""
    if residual is not None:
        x = x + residual
    return F.relu(x, inplace=True) if relu else x


# mmengine's initialisers find a layer by its name or by the names of its direct bases. Configs name ``_BatchNorm``.
class BatchNorm2d(nn.BatchNorm2d, _BatchNorm):
    """The batch normalisation of torch. In training, its kernels also compute the sum and the ReLU after it."""

    def forward(self, input: Tensor, residual: Tensor | None = None, relu: bool = False) -> Tensor:
        """Return the batch normalisation of ``input`` plus ``residual``, or the ReLU of that; see the operator."""
        if not (self.training and self.affine and self.track_running_stats) or self.momentum is None:
            return add_relu(super().forward(input), residual, relu)
        return batch_norm_add_relu(
            input,
            residual,
            self.weight,
            self.bias,
            self.running_mean,
            self.running_var,
            self.num_batches_tracked,
            self.momentum,
            self.eps,
            relu,
        )


class LayerNorm(nn.LayerNorm):
    """The layer normalisation of torch, which one kernel computes together with the sum before it."""

    def forward(
        self, input: Tensor, residual: Tensor | None = None, p: float = 0.0, next_pos: Tensor | None = None
    ) -> Tensor:
        """Return the layer normalisation of ``residual + dropout(input, p)``; see ``dropout_add_layer_norm``."""
        if self.weight is None or self.bias is None or len(self.normalized_shape) != 1:
            dropped = F.dropout(input, p)
            return super().forward(dropped if residual is None else residual + dropped)
        return dropout_add_layer_norm(input, residual, self.weight, self.bias, p, self.eps, next_pos=next_pos)


class ReLULayerNorm(nn.LayerNorm):
    """The layer normalisation of ``relu(input)``, which one kernel computes."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised values, in the shape of the input."""
        return dropout_add_layer_norm(input, None, self.weight, self.bias, eps=self.eps, relu=True)


for _name, _layer in {
    "BN": BatchNorm2d,
    "BN1d": nn.BatchNorm1d,
    "BN2d": BatchNorm2d,
    "BN3d": nn.BatchNorm3d,
    "SyncBN": nn.SyncBatchNorm,
    "GN": nn.GroupNorm,
    "LN": LayerNorm,
    "IN": nn.InstanceNorm2d,
}.items():
    MODELS.register_module(_name, module=_layer)


def norm_abbreviation(layer_type: type[nn.Module]) -> str:
    """Return the attribute name of a normalisation layer in a ``ConvModule``: 'bn', 'gn', 'ln', 'in' or 'norm'."""
    for base, abbreviation in (
        (_InstanceNorm, "in"),
        (_BatchNorm, "bn"),
        (nn.GroupNorm, "gn"),
        (nn.LayerNorm, "ln"),
    ):
        if issubclass(layer_type, base):
            return abbreviation
    return "norm"


def build_norm_layer(norm_cfg: dict[str, Any], num_features: int) -> nn.Module:
    """Return the normalisation layer that ``norm_cfg`` describes.

    Args:
        norm_cfg: ``type`` ('BN', 'SyncBN', 'GN', 'LN', 'IN' or another registered name), ``requires_grad`` (whether
            scale and shift are trained, by default True), and the keywords of the layer, such as ``eps``, ``momentum``
            or ``num_groups``.
        num_features: channels of the input.

    Raises:
        KeyError: the ``type`` is unknown.
        TypeError: the layer does not accept a keyword, or 'GN' has no ``num_groups``.
    """
    options = dict(norm_cfg)
    layer_type = MODELS.get(options.pop("type", None))
    requires_grad = options.pop("requires_grad", True)
    is_layer = isinstance(layer_type, type)
    if not is_layer or requires_grad not in (True, False):
        raise InvalidInputError(
            f"norm_cfg must have the name of a layer as type, and True or False as requires_grad, got {norm_cfg!r}"
        )
    if issubclass(layer_type, nn.GroupNorm):
        layer = layer_type(num_channels=num_features, **options)
    else:
        layer = layer_type(num_features, **options)
    return layer.requires_grad_(requires_grad)


def drops(dropout: nn.Module) -> bool:
    """Return whether a dropout layer has to be called."""
    if is_plain(dropout, nn.Dropout):
        return dropout.training and dropout.p > 0
    return not is_plain(dropout, nn.Identity)


def add_and_norm(
    norm: nn.Module | None,
    branch: Tensor,
    identity: Tensor,
    *dropouts: nn.Module,
    next_pos: Tensor | None = None,
) -> Tensor:
    """Return ``norm(identity + dropouts(branch))``, where that is possible in one operator.

    Args:
        norm: the normalisation, or None for the sum alone.
        branch, identity: [..., C]. dropouts: layers that the branch goes through, one after another.
        next_pos: what the next layer will add to the result, or None; see ``dropout_add_layer_norm``.
    """
    dropping = [dropout for dropout in dropouts if drops(dropout)]
    if norm is not None and is_plain(norm, LayerNorm):
        if not dropping:
            return norm(branch, identity, next_pos=next_pos)
        if len(dropping) == 1 and is_plain(dropping[0], nn.Dropout):
            return norm(branch, identity, dropping[0].p, next_pos)
    for dropout in dropping:
        branch = dropout(branch)
    total = identity + branch
    return total if norm is None else norm(total)
