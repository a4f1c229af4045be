"""Registries: found with nothing imported before, from foreign scopes, and helpful about wrong names."""

import threading

import mmengine.registry
import pytest
from programs import ROOT, run_python

import visdet.ops
from visdet import registry
from visdet.registry import MODELS, OPS

ATTENTION = "dict(type='{}', embed_dims=32, num_heads=4, num_levels=2, num_points=3)"


def run(code):
    return "".join(run_python("-c", code))


def test_every_mmengine_registry_has_a_child_in_our_scope():
    roots = {
        name: root
        for name, root in vars(mmengine.registry).items()
        if name.isupper() and isinstance(root, mmengine.registry.Registry)
    }
    assert len(roots) > 15
    for name, root in roots.items():
        assert getattr(registry, name).parent is root and getattr(registry, name).scope == "visdet"
        assert root.children["visdet"] is getattr(registry, name)


def test_ops_hold_the_public_functions():
    assert OPS.get("ms_deform_attn") is visdet.ops.ms_deform_attn
    assert "ms_deform_attn" in OPS and "build_info" not in OPS


def test_op_is_found_with_nothing_imported_before():
    assert "<function ms_deform_attn" in run(
        "from visdet.registry import OPS; print(OPS.get('ms_deform_attn'))"
    )


def test_module_is_built_with_nothing_imported_before():
    out = run(
        f"from visdet.registry import MODELS; print(MODELS.build({ATTENTION.format('MultiScaleDeformableAttention')}))"
    )
    assert "sampling_offsets" in out


def test_module_is_built_from_a_foreign_config():
    code = (
        "from mmengine.registry import DefaultScope, MODELS\n"
        "DefaultScope.get_instance('test', scope_name='mmengine')\n"
        f"print(MODELS.build({ATTENTION.format('visdet.MultiScaleDeformableAttention')}))"
    )
    out = run(code)
    assert "sampling_offsets" in out and "Failed to" not in out


@pytest.mark.parametrize("config", ["dino/dino_shapes.py", "deformable_detr/deformable-detr_shapes.py"])
def test_parts_without_a_scope_are_ours_under_the_default_scope_of_another_package(config):
    run(
        "import sys\n"
        "from types import ModuleType\n"
        "from mmengine.config import Config\n"
        "from mmengine.registry import DefaultScope, MODELS, Registry, TASK_UTILS\n"
        "sys.modules['mmdet'] = ModuleType('mmdet')\n"
        "for parent in (MODELS, TASK_UTILS):\n"
        "    theirs = Registry('theirs', scope='mmdet', parent=parent)\n"
        "    for name in ('ResNet', 'ChannelMapper', 'DetDataPreprocessor', 'DINOHead', 'DeformableDETRHead',\n"
        "                 'FocalLoss', 'L1Loss', 'GIoULoss', 'HungarianAssigner', 'FocalLossCost', 'BBoxL1Cost',\n"
        "                 'IoUCost', 'SinePositionalEncoding', 'MultiScaleDeformableAttention'):\n"
        "        theirs.register_module(name=name, module=type(name, (), {}))\n"
        "DefaultScope.get_instance('test', scope_name='mmdet')\n"
        f"model = Config.fromfile({str(ROOT / 'configs' / config)!r}).model\n"
        "built = MODELS.build({**model, 'type': f'visdet.{model.type}'})\n"
        "assert not [part for part in built.modules() if type(part).__module__ == '__main__']\n"
    )


def test_unknown_name_answers_with_the_nearest():
    with pytest.raises(KeyError) as caught:
        MODELS.build(dict(type="MultiScaleDeformableAttenton"))
    message = str(caught.value)
    assert "'MultiScaleDeformableAttenton' is not in the visdet::model registry" in message
    assert "did you mean 'MultiScaleDeformableAttention'" in message and "custom_imports" in message


def test_a_class_of_ones_own_that_is_not_imported_is_told_of_no_others():
    with pytest.raises(KeyError) as caught:
        MODELS.build(dict(type="OwnNetOfMine"))
    assert "did you mean" not in str(caught.value) and "custom_imports" in str(caught.value)


def test_other_threads_build_after_an_error():
    """mmengine's ``get_instance`` keeps the lock of all registries where a constructor fails."""
    with pytest.raises(TypeError, match="nosuch"):
        registry.VISUALIZERS.build(dict(type="DetLocalVisualizer", name="one that is new", nosuch=1))
    thread = threading.Thread(target=MODELS.build, args=[dict(type="Identity")], daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()


def test_unknown_op_answers_with_the_nearest():
    with pytest.raises(KeyError, match="did you mean"):
        OPS.get("ms_deform_atn")


def test_unknown_name_reached_through_mmengine_gets_the_same_answer():
    in_our_scope = mmengine.registry.DefaultScope.overwrite_default_scope("visdet")
    with in_our_scope, pytest.raises(KeyError, match="did you mean 'DeformableDETR'"):
        mmengine.registry.MODELS.build(dict(type="DeformableDTER"))


def test_membership_is_a_plain_question():
    assert "NoSuchThing" not in MODELS
    assert "no.such.package.Thing" not in MODELS
    assert "MultiScaleDeformableAttention" in MODELS


def test_a_library_of_an_older_source_is_no_unknown_name(tmp_path):
    # As after a pull without a build: the library lacks an operator that a page registers.
    (tmp_path / "page_of_tomorrow.py").write_text(
        "from visdet.ops import _library\n_library.declares('operator_of_tomorrow')\n"
    )
    out = run(
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from visdet.ops import NotBuiltError\n"
        "from visdet.registry import Registry\n"
        "MODELS = Registry('model', scope='visdet', locations=['page_of_tomorrow'])\n"
        "try:\n"
        "    MODELS.get('Anything')\n"
        "except NotBuiltError as error:\n"
        "    print(error)\n"
    )
    assert "has no operator 'operator_of_tomorrow': it was built from an older source; build it with" in out


def test_every_name_is_found_by_its_registry_alone():
    """Processes that are forked before anything registers list what a look-up, or an import of all, registers."""
    code = """
import contextlib, importlib, json, os, pkgutil
import cv2, scipy.optimize, torchvision, torch.distributed.fsdp  # They take seconds, and the processes share them.
from visdet import registry

with contextlib.suppress(ImportError):
    import transformers  # mmengine imports it where it is installed.

def everything():
    importlib.import_module("mmengine.runner")
    for part in ("structures", "models", "datasets", "evaluation", "engine", "visualization"):
        package = importlib.import_module(f"visdet.{part}")
        for module in pkgutil.walk_packages(package.__path__, f"visdet.{part}."):
            importlib.import_module(module.name)

def names(prepare):
    reader, writer = os.pipe()
    if not os.fork():
        prepare()
        found = {}
        for name in NAMES:
            level = getattr(registry, name)
            found[name] = sorted({*level.module_dict, *level.parent.module_dict})
        os.write(writer, json.dumps(found).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as lines:
        return json.loads(lines.read())

NAMES = [name for name in registry.__all__ if name.isupper() and name != "OPS"]
expected = names(everything)
assert sum(map(len, expected.values())) > 250 and "DumpDetections" in expected["METRICS"]
for locations in {tuple(getattr(registry, name)._locations) for name in NAMES}:
    found = names(lambda: [importlib.import_module(location) for location in locations])
    for name in NAMES:
        if tuple(getattr(registry, name)._locations) == locations:
            assert found[name] == expected[name], (name, set(expected[name]) - set(found[name]))
print("all found")
"""
    assert "all found" in run(code)
