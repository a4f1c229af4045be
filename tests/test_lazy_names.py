"""Packages whose modules are imported when their names are first used."""

import ast
import importlib
from pathlib import Path

import pytest
from programs import run_python

from visdet.lazy_names import lazy_names

PACKAGES = [
    "visdet.structures",
    "visdet.datasets",
    "visdet.datasets.synthetic",
    "visdet.datasets.transforms",
    "visdet.engine",
]


def test_every_public_name_is_there_in_a_fresh_process():
    code = (
        "import importlib, sys\n"
        f"packages = [importlib.import_module(name) for name in {PACKAGES}]\n"
        "assert 'torch' not in sys.modules\n"
        "for package in packages:\n"
        "    imported = {}\n"
        "    exec(f'from {package.__name__} import *', imported)\n"
        "    assert package.__all__ and set(package.__all__) <= set(imported) & set(dir(package)), package\n"
    )
    run_python("-W", "ignore", "-c", code)


@pytest.mark.parametrize("package", PACKAGES)
def test_type_checkers_see_the_same_names_in_the_same_modules(package):
    loaded = importlib.import_module(package)
    tree = ast.parse(Path(loaded.__file__).read_text())
    (branch,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {alias.name: node.module for node in branch.body for alias in node.names}
    (table,) = [ast.literal_eval(node) for node in ast.walk(tree) if isinstance(node, ast.Dict)]
    assert table == {name: module or name for name, module in seen.items()}
    assert sorted(seen) == loaded.__all__


def test_an_unknown_name_is_an_attribute_error():
    _, get_attribute, _ = lazy_names("visdet.engine", {"evaluate": "run"})
    assert get_attribute("evaluate").__module__ == "visdet.engine.run"
    assert get_attribute("run").__name__ == "visdet.engine.run"
    with pytest.raises(
        AttributeError, match=r"module 'visdet\.engine' has no attribute 'evaluat'; did you mean"
    ):
        get_attribute("evaluat")


@pytest.mark.parametrize(
    ("package", "wrong", "right"),
    [
        ("visdet", "init_detecter", "'init_detector'"),
        ("visdet", "Train", "'train'"),
        ("visdet.ops", "ms_deform_atn", "'ms_deform_attn'"),
        ("visdet.ops", "roialign", "'RoIAlign' or 'roi_align'"),
        ("visdet.datasets", "CoCoDatset", "'CocoDataset'"),
        ("visdet.ops", "something_else", None),
    ],
)
def test_a_near_name_is_proposed(package, wrong, right):
    loaded = importlib.import_module(package)
    assert not hasattr(loaded, wrong)
    with pytest.raises(AttributeError) as caught:
        getattr(loaded, wrong)
    expected = f"module {package!r} has no attribute {wrong!r}"
    assert str(caught.value).startswith(expected)
    assert (right is None) == ("did you mean" not in str(caught.value)) and (right or "") in str(caught.value)
