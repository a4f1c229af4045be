"""Modules that are importable in place of missing ones, as research repositories import them."""

import importlib
import sys
from collections import Counter

import pytest
import torch

from visdet.compat import _counts, extensions


@pytest.fixture
def make_package(tmp_path, monkeypatch):
    """Return a function that writes a package, makes it importable and forgets it after the test."""
    made = []

    def make(name, **files):
        parts = name.split(".")
        folder = tmp_path.joinpath(*parts)
        folder.mkdir(parents=True, exist_ok=True)
        for parent in [folder, *folder.parents][: len(parts)]:
            (parent / "__init__.py").touch()
        for file, content in files.items():
            (folder / f"{file}.py").write_text(content)
        made.append(parts[0])
        for key in [key for key in sys.modules if key.split(".")[0] == parts[0]]:
            monkeypatch.delitem(sys.modules, key)
        importlib.invalidate_caches()

    monkeypatch.syspath_prepend(str(tmp_path))
    with extensions.installed():
        yield make
    for key in [key for key in sys.modules if key.split(".")[0] in made]:
        del sys.modules[key]


OTHERS = {  # compiled modules, each with a function of it that visdet does not have
    "pcdet.ops.pointnet2.pointnet2_stack.pointnet2_stack_cuda": "vector_pool_wrapper",
    "mmdet3d.ops.feature_decorator.feature_decorator_ext": "feature_decorator_forward",
    "adet._C": "bezier_align_forward",
    "detectron2._C": "COCOevalAccumulate",
    "mmdet.ops.dcn.deform_pool_ext": "deform_psroi_pooling_forward",
}


@pytest.mark.parametrize("name, function", OTHERS.items(), ids=OTHERS)
def test_functions_that_are_not_provided_fail_when_called(name, function, make_package):
    make_package(name.rpartition(".")[0])
    with pytest.raises(NotImplementedError, match=rf"{name}.{function}: visdet does not provide"):
        getattr(importlib.import_module(name), function)()


@pytest.mark.parametrize(
    "folder, module, function",
    [
        ("mmdet3d.ops.voxel", "voxel_layer", "hard_voxelize"),
        ("DCNv4", "ext", "dcnv4_forward"),
        ("dcnv4", "_C", "flash_deform_attn_backward"),
        ("pcdet.ops.ingroup_inds", "ingroup_inds_cuda", "forward"),
        ("mmdet3d.ops.bev_pool", "bev_pool_ext", "bev_pool_forward"),
        ("projects.mmdet3d_plugin.ops.bev_pool_v2", "bev_pool_v2_ext", "bev_pool_v2_backward"),
        ("ops.voxel_pooling", "voxel_pooling_ext", "voxel_pooling_forward_wrapper"),
        (
            "bevdepth.ops.voxel_pooling_train",
            "voxel_pooling_train_ext",
            "voxel_pooling_train_forward_wrapper",
        ),
        ("local_aggregate", "_C", "local_aggregate_backward"),
        ("mmdet3d.ops.ball_query", "ball_query_ext", "ball_query_wrapper"),
        ("vendored.mmdet3d.ops.spconv", "sparse_conv_ext", "indice_conv_fp32"),
        ("mmdet3d.ops.iou3d", "iou3d_cuda", "nms_gpu"),
        ("pcdet.ops.iou3d_nms", "iou3d_nms_cuda", "boxes_iou_bev_cpu"),
        ("models.csrc", "_msmv_sampling_cuda", "_ms_deform_attn_cuda_c2345_forward"),
        ("pointnet2_ops", "_ext", "three_nn"),
        ("detectron2", "_C", "deform_conv_forward"),
        ("detrex", "_C", "dcnv3_forward"),
        ("adet", "_C", "ms_deform_attn_forward"),
        ("GroundingDINO.groundingdino", "_C", "ms_deform_attn_backward"),
        (
            "projects.mmdet3d_plugin.ops",
            "deformable_aggregation_ext_a800",
            "deformable_aggregation_forward",
        ),
        ("local_aggregate_prob", "_C", "local_aggregate_backward"),
        ("head.local_aggregate_prob_fast", "_C", "local_aggregate"),
        ("local_aggregate_prob_sq", "_C", "local_aggregate"),
        ("dfa3D", "_ext", "wms_deform_attn_forward"),
        ("projects.ops", "e2e_deformable_aggregation_ext", "deformable_aggregation_forward"),
        (
            "projects.ops",
            "my_deformable_aggregation_with_depth_ext",
            "deformable_aggregation_with_depth_forward",
        ),
        ("seed", "e2e_sigmoid_focal_loss_ext", "sigmoid_focal_loss_backward_cuda"),
        ("mmdet.ops.utils", "compiling_info", "get_compiling_cuda_version"),
        ("mmdet.ops.dcn", "deform_conv_ext", "deform_conv_backward_parameters"),
        ("mmdet.ops.chamfer_2d", "chamfer_2d", "backward"),
        ("ops", "occ_pool_ext", "occ_pool_forward"),
    ],
)
def test_functions_of_extensions_within_packages_are_provided(folder, module, function, make_package):
    make_package(folder, wrapper=f"from . import {module} as ext\ncall = ext.{function}\n")
    wrapper = importlib.import_module(f"{folder}.wrapper")
    assert wrapper.call.__module__.startswith("visdet.compat.")
    assert sys.modules[f"{folder}.{module}"] is wrapper.ext
    extensions.uninstall()
    assert not hasattr(sys.modules[folder], module)


def test_a_module_that_is_there_is_kept(make_package):
    make_package("mmdet3d.ops.voxel", voxel_layer="hard_voxelize = 'own'\n")
    assert importlib.import_module("mmdet3d.ops.voxel.voxel_layer").hard_voxelize == "own"


def test_other_modules_are_still_missing(make_package):
    make_package("mmdet3d.ops.voxel")
    for name in ("mmdet3d.ops.voxel.other_ext", "mmdet3d.voxel_layer", "flash_attn_2", "numba.error"):
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(name)


def test_detectron2_and_detrex_without_their_compiled_parts(make_package, monkeypatch):
    make_package("detectron2")
    make_package("detrex")
    from detectron2 import _C
    from detrex import _C as of_detrex

    assert "visdet" in _C.get_compiler_version() and _C.get_cuda_version() and not _C.has_cuda()
    assert of_detrex.get_cuda_version() == _C.get_cuda_version()
    monkeypatch.setattr(_counts, "CALLS", Counter())
    boxes = torch.tensor([[5.0, 5, 4, 2, 30], [5, 5, 4, 2, 30]])
    for nms in (_C.nms_rotated, torch.ops.detectron2.nms_rotated):
        assert nms(boxes, torch.tensor([0.5, 0.6]), 0.5).tolist() == [1]
    assert "detectron2._C.nms_rotated (1), torch.ops.detectron2.nms_rotated (1)" in _counts.summary()


def test_errors_of_numba(make_package):
    make_package("numba.core", errors="class NumbaPerformanceWarning(Warning):\n    pass\n")
    from numba.core.errors import NumbaPerformanceWarning as today
    from numba.errors import NumbaPerformanceWarning

    assert NumbaPerformanceWarning is today


def test_names_of_torch_1(make_package):
    from torch._six import container_abcs, inf, string_classes

    assert isinstance("a", string_classes) and isinstance([], container_abcs.Sequence) and inf > 0


def test_utilities_of_torchvisions_models(make_package):
    from torchvision.models.utils import load_state_dict_from_url

    assert load_state_dict_from_url is importlib.import_module("torch.hub").load_state_dict_from_url


def test_resources_of_setuptools(make_package, monkeypatch):
    if importlib.util.find_spec("pkg_resources").origin != "visdet":
        pytest.skip("this setuptools has pkg_resources")
    make_package("zoo", model="")
    resources = importlib.import_module("pkg_resources")
    assert resources.resource_filename("zoo", "model.py").endswith("zoo/model.py")
    assert resources.resource_exists("zoo", "model.py") and not resources.resource_exists("zoo", "other.py")
    version = resources.parse_version(resources.get_distribution("torch").version)
    assert version > resources.parse_version("2.0")
    with pytest.raises(resources.DistributionNotFound):
        resources.get_distribution("not-a-distribution")
    with pytest.raises(ModuleNotFoundError, match="not_a_package"):
        resources.resource_filename("not_a_package", "a")
    with pytest.raises(ImportError, match=r"pkg_resources\.declare_namespace"):
        resources.declare_namespace("zoo")
