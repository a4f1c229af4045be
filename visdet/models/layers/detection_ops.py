"""Registers the modules of ``visdet.ops`` in MODELS under the names that configs use."""

import inspect

from torch import nn

from visdet import ops
from visdet.registry import MODELS

from .root_registration import register_in_root

__all__: list[str] = []

# mmcv registers these in mmengine's root registry, so that configs of any scope can use them without a prefix.
_BARE_NAMES = {
    "DCN": ops.DeformConv2dPack,
    "DCNv2": ops.ModulatedDeformConv2dPack,
    "carafe": ops.CARAFEPack,
    "SAC": ops.SAConv2d,
    "ConvAWS": ops.ConvAWS2d,
}
for _name, _class in _BARE_NAMES.items():
    MODELS.register_module(_name, module=_class)
    register_in_root(_class, _name)
# mmdet takes modules from mmcv.ops by attribute. In this package they are looked up in the registry like any module.
for _name in ops.__all__:
    _member = getattr(ops, _name)
    if inspect.isclass(_member) and issubclass(_member, nn.Module):
        MODELS.register_module(_name, module=_member)
