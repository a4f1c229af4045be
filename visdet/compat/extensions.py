"""The bridge to research repositories, which provides the modules that their unmodified sources import.

After ``install()``, visdet provides these modules. A module that is installed is not replaced.

* ``MultiScaleDeformableAttention`` (Deformable DETR, DINO, Mask2Former, MaskDINO and others)
* ``groundingdino._C`` (GroundingDINO from its repository), ``detrex._C`` (detrex) and ``adet._C`` (AdelaiDet)
* ``DCNv3`` (InternImage), ``DCNv4.ext``, ``dcnv4._C``, ``GeometricKernelAttention`` (MapTR) and
  ``dfa3D._ext`` (DFA3D)
* ``deformable_aggregation_ext``, alone or within a package (SparseDrive, Sparse4D, SparseDriveV2, RIFT), and
  ``deformable_aggregation_with_depth_ext`` likewise (SparseDriveV2, BIP3D)
* ``bev_pool_ext``, ``bev_pool_v2_ext``, ``voxel_layer``, ``voxel_pooling_ext`` and its two successors within a package
  (BEVFusion, BEVDet, BEVDepth and others), and ``local_aggregate._C`` and those of GaussianFormer-2 and
  QuadricFormer
* ``mmcv._ext`` (mmcv 1.x and 2.x without compiled operators)
* ``flash_attn`` (SparseDrive, StreamPETR, HiP-AD)
* ``detectron2._C`` (deformable convolution and rotated boxes), the extensions of ``mmdet3d.ops`` up to mmdet3d 0.18 and
  of ``pcdet.ops``, ``iou3d_cuda``, ``pointnet2_ops._ext``, ``chamfer`` (SurroundOcc) and ``_msmv_sampling_cuda``
  (SparseBEV, SparseOcc)
* ``dvr`` (RayIoU's evaluation in SparseOcc and others)
* ``nms_ext``, ``roi_align_ext`` and the other extensions of ``mmdet.ops`` of mmdetection 2.0 to 2.2
* ``numba.errors``, ``torch._six``, ``torchvision.models.utils`` and ``pkg_resources``, which numba, torch, torchvision
  and setuptools have dropped

``load`` and ``load_inline`` of ``torch.utils.cpp_extension`` return the module of one of these names, too, and compile
nothing. They compile other names as before.
"""

import functools
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ._bridge import Bridge, Installable
from ._deferred import deferred

__all__ = ["NAMES", "install", "installed", "missing_extension", "provided", "uninstall"]

_PROVIDERS = {
    "MultiScaleDeformableAttention": "msda_ext",
    "chamfer": "points_ext:chamfer",
    "detrex._C": "detrex_ext",
    "adet._C": "adet_ext",
    "DCNv3": "dcnv3_ext",
    "GeometricKernelAttention": "geometric_ext",
    "dvr": "dvr_ext",
    "mmcv._ext": "mmcv_ext",
    "detectron2._C": "detectron2_ext",
    "flash_attn": "flash_attention",
    "flash_attn.flash_attn_interface": "flash_attention",
    "flash_attn.bert_padding": "flash_padding",
    "numba.errors": "numba.core.errors",
    "pkg_resources": "setuptools_resources",
    "torch._six": "torch_six",
    "torchvision.models.utils": "torch.hub",
}
# Modules that are provided within any package, too, by the ends of their names.
_WITHIN_PACKAGES = {
    "groundingdino._C": "msda_ext",
    "DCNv4.ext": "dcnv4_ext",
    "dcnv4._C": "dcnv4_ext",
    "dfa3D._ext": "dfa3d_ext",
    "deformable_aggregation_ext": "aggregation_ext",
    "deformable_aggregation_ext_a800": "aggregation_ext",
    "deformable_aggregation_with_depth_ext": "aggregation_ext",
    "bev_pool_ext": "bev_ext",
    "occ_pool_ext": "bev_ext",
    "bev_pool_v3_ext": "bev_ext",
    "bev_pool_v2_ext": "bev_ext",
    "voxel.voxel_layer": "bev_ext",
    "voxel_pooling_ext": "bev_ext",
    "voxel_pooling_inference_ext": "bev_ext",
    "voxel_pooling_train_ext": "bev_ext",
    "local_aggregate._C": "gaussian_ext",
    "local_aggregate_prob._C": "gaussian_prob_ext",
    "local_aggregate_prob_fast._C": "gaussian_prob_ext",
    "local_aggregate_prob_sq._C": "gaussian_sq_ext",
    "utils.compiling_info": "mmdet_ext:compiling_info",
}
# The extensions of which a module has those functions that it declares for them.
_SERVED_BY = {
    "mmdet_ext": "nms_ext roi_align_ext roi_pool_ext deform_conv_ext deform_pool_ext carafe_ext carafe_naive_ext "
    "sigmoid_focal_loss_ext masked_conv2d_ext corner_pool_ext",
    "mmcv_ext_points": "chamfer_2d.chamfer_2d",
    "mmcv_ext_activations": "e2e_sigmoid_focal_loss_ext",
    "points_ext": "assign_score_withk_ext ball_query_ext furthest_point_sample_ext gather_points_ext group_points_ext "
    "interpolate_ext knn_ext ingroup_inds_cuda pointnet2_batch_cuda pointnet2_stack_cuda pointnet2_ops._ext "
    "feature_decorator_ext",
    "views_ext": "_msmv_sampling_cuda",
    "mmcv_ext_voxels": "sparse_conv_ext",
    "boxes_ext": "iou3d_cuda iou3d_nms_cuda roiaware_pool3d_ext roiaware_pool3d_cuda roipoint_pool3d_cuda",
}
for _module, _extensions in _SERVED_BY.items():
    for _extension in _extensions.split():
        _WITHIN_PACKAGES[_extension] = f"{_module}:{_extension}"
# What may stand before these names, as in "e2e_deformable_aggregation_ext".
_PREFIX = re.compile(r"[^.]*_(?=deformable_aggregation(_with_depth)?_ext$)")
_PACKAGES = ("flash_attn",)
_NO_OPERATORS = ("setuptools_resources", "torch_six")
NAMES = (*_PROVIDERS, *_WITHIN_PACKAGES)
_COMPILED = re.compile(r"'(?:[\w.]*\.)?(_?C|_?ext|\w+(?:_ext|_cuda|_cpu|_C))'")


def install() -> None:
    """Make the extensions importable. A program must call this before it imports them. A second call changes nothing.

    Raises:
        visdet.ops.NotBuiltError: visdet's own libraries are missing.
    """
    from visdet.ops.devices import require

    require("cpu")
    bridge.watch()


def uninstall() -> None:
    """Remove the provided modules from ``sys.modules``. Modules that have imported them keep them."""
    if bridge in sys.meta_path:
        sys.meta_path.remove(bridge)
    _compiling.uninstall()
    for name in provided():
        module = sys.modules.pop(name)
        parent, _, child = name.rpartition(".")
        package = sys.modules.get(parent)
        if package is not None and vars(package).get(child) is module:
            delattr(package, child)


def provided() -> list[str]:
    """Return the names of the extensions that have been imported from visdet."""
    specs = {name: getattr(module, "__spec__", None) for name, module in sys.modules.items()}
    return [name for name, spec in specs.items() if isinstance(getattr(spec, "loader", None), _Loader)]


def missing_extension(error: ImportError) -> str | None:
    """Return the name of the compiled extension that an import has not found, or None if it was another module."""
    found = _COMPILED.search(str(error))
    return found and found[1]


class Extensions(Installable):
    """A finder at the end of ``sys.meta_path``, which is asked only for modules that no other finder finds.

    Args:
        only: the name of the only module that it provides. The default is all of them.
    """

    name = "extensions"
    package = None
    install = staticmethod(install)
    uninstall = staticmethod(uninstall)
    is_present = True

    def __init__(self, only: str | None = None) -> None:
        self.only = only

    @property
    def is_installed(self) -> bool:
        return self in sys.meta_path

    def watch(self) -> None:
        """Do the same as ``install``, but without importing torch before an extension is imported."""
        if not self.is_installed:
            sys.meta_path.append(self)
        if self.only is None:
            _compiling.watch()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        provider = _PROVIDERS.get(name)
        dotted = f".{_PREFIX.sub('', name)}"
        for end, within in _WITHIN_PACKAGES.items():
            if dotted.endswith(f".{end}"):
                provider = within
        if provider is None or self.only not in (None, name):
            return None
        return ModuleSpec(name, _Loader(provider), origin="visdet", is_package=name in _PACKAGES)


class _Loader(Loader):
    """Fills a module with the functions of a module of this package. What an extension lacks raises an error."""

    def __init__(self, provider: str) -> None:
        self.provider = provider

    @property
    def has_operators(self) -> bool:
        """Whether the module stands for a compiled one."""
        name, _, _ = self.provider.partition(":")
        return "." not in name and name not in _NO_OPERATORS

    def exec_module(self, module: ModuleType) -> None:
        from ._served import SERVED

        name, _, extension = self.provider.partition(":")
        source = importlib.import_module(name if "." in name else f"visdet.compat.{name}")
        module.__doc__ = source.__doc__
        if extension:
            found = SERVED[extension]
            module.__getattr__ = deferred(module.__name__)  # type: ignore[method-assign]
        else:
            names = getattr(source, "__all__", [name for name in vars(source) if not name.startswith("_")])
            found = {name: getattr(source, name) for name in names}
            if "__getattr__" in vars(source):
                module.__getattr__ = source.__getattr__  # type: ignore[method-assign]
        if self.has_operators:
            from ._counts import counted

            found = {
                name: counted(f"{module.__name__}.{name}", value) if callable(value) else value
                for name, value in found.items()
            }
        vars(module).update(found)


def _serve_compiled(module: ModuleType, bridge: Bridge) -> Iterator[str]:
    """Replace the functions that compile an extension by ones that return what visdet provides under its name."""
    for name in ("load", "load_inline"):
        bridge.replace(module, name, _serving(getattr(module, name)))
        yield name


def _serving(compiles: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compiles)
    def load(name: str, *arguments: Any, **named: Any) -> Any:
        is_module = named.get("is_python_module", True) and not named.get("is_standalone", False)
        module = _compiled(name) if is_module else None
        if module is None:
            return compiles(name, *arguments, **named)
        from ._counts import CALLS

        CALLS[f"{compiles.__name__}({name!r})"] += 1
        return module

    return load


def _compiled(name: str) -> ModuleType | None:
    """Return the module that visdet provides for an extension of this name, or None if it provides none."""
    if name in provided():
        return sys.modules[name]
    spec: Any = bridge.find_spec(name, None)
    if spec is None or not spec.loader.has_operators:
        return None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


bridge = Extensions()
_compiling = Bridge("extensions", "torch", r"torch\.utils\.cpp_extension", _serve_compiled)
installed = bridge.installed
