"""Registers the modules of ``visdet.ops`` in MODELS under the names that configs use."""

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
# mmdet takes these from mmcv.ops by attribute. In this package they are looked up in the registry like any module.
_MODULES = (
    ops.CARAFE,
    ops.CARAFENaive,
    ops.CARAFEPack,
    ops.CornerPool,
    ops.DeformConv2d,
    ops.DeformConv2dPack,
    ops.DeformRoIPool,
    ops.DeformRoIPoolPack,
    ops.MaskedConv2d,
    ops.ModulatedDeformConv2d,
    ops.ModulatedDeformConv2dPack,
    ops.ModulatedDeformRoIPoolPack,
    ops.RoIAlign,
    ops.RiRoIAlignRotated,
    ops.RoIAlignRotated,
    ops.RoIPool,
    ops.SAConv2d,
    ops.SigmoidFocalLoss,
    ops.SimpleRoIAlign,
    ops.SoftmaxFocalLoss,
)

for _name, _class in _BARE_NAMES.items():
    MODELS.register_module(_name, module=_class)
    register_in_root(_class, _name)
for _class in _MODULES:
    MODELS.register_module(_class.__name__, module=_class)
