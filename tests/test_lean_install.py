"""An installation with torch alone: the operators and the bridges work; training tools say what is missing."""

import ast
import re
import sys

import pytest
from programs import ROOT, run_python

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest requires it there; pip's copy would keep setuptools from being imported

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NOT_INSTALLED = (
    *("mmengine", "numpy", "torchvision", "scipy", "cv2", "PIL", "matplotlib", "rich", "tensorboard", "yaml"),
    *(
        "faster_coco_eval",
        "pycocotools",
        "setuptools",
        "pkg_resources",
        "shapely",
        "transformers",
        "mmcv",
        "mmdet",
    ),
)


def run_with_torch_alone(code, *arguments, status=0):
    """Run Python code in a process where nothing of NOT_INSTALLED can be imported."""
    hide = f"import sys; sys.modules.update(dict.fromkeys({NOT_INSTALLED!r}))\n"
    return run_python("-W", "ignore", "-c", hide + code, *arguments, status=status)


def test_the_core_requirement_is_torch_alone():
    assert [re.match(r"[\w-]+", requirement)[0] for requirement in PROJECT["dependencies"]] == ["torch"]


def test_operators_and_bridges_import_and_run_with_torch_alone():
    out, _ = run_with_torch_alone(
        "import importlib, pkgutil, torch\n"
        "import visdet.compat, visdet.doctor, visdet.ops\n"
        "from visdet.ops import ms_deform_attn\n"
        "for module in pkgutil.iter_modules(visdet.compat.__path__):\n"
        "    if module.name != '__main__':\n"
        "        importlib.import_module(f'visdet.compat.{module.name}')\n"
        "out = ms_deform_attn(torch.ones(1, 6, 1, 4), [(2, 3)], None, torch.full((1, 5, 1, 1, 2, 2), 0.5),\n"
        "                     torch.ones(1, 5, 1, 1, 2))\n"
        "assert out.shape == (1, 5, 4), out.shape\n"
        "print('it works', visdet.ops.build_info()['cpu']['loaded'])\n"
    )
    assert out.startswith("it works")


@pytest.mark.parametrize(
    "module", ["models", "datasets", "evaluation", "engine", "structures", "visualization", "registry"]
)
def test_other_parts_name_what_is_missing_and_the_extra(module):
    _, error = run_with_torch_alone(f"import visdet.{module}", status=1)
    last = error.strip().splitlines()[-1]
    assert "MissingPackageError" in last and "visdet-ops[train]" in last
    assert f"visdet.{module}" in last or "visdet.registry" in last
    assert "mmengine" in last and "numpy" in last


@pytest.mark.parametrize(
    "command", ["train config.py", "infer config.py checkpoint.pth images", "make-shapes x"]
)
def test_commands_end_in_one_message(command):
    code = "import visdet.commands; visdet.commands.main()"
    _, error = run_with_torch_alone(code, *command.split(), status=1)
    (line,) = error.strip().splitlines()
    assert line.startswith("error: ") and "visdet-ops[train]" in line and "mmengine" in line


def test_help_needs_no_large_package():
    code = (
        "from visdet.commands import _MODULES, main\n"
        "for name in _MODULES:\n"
        "    try:\n"
        "        main([name, '--help'])\n"
        "    except SystemExit as end:\n"
        "        assert not end.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    out, _ = run_with_torch_alone(code)
    assert out.startswith("usage: visdet train")


# Import names that are not their distributions' names, and who brings what is nobody's requirement.
DISTRIBUTIONS = {
    "PIL": "pillow",
    "faster_coco_eval": "faster-coco-eval",
    "cv2": "opencv-python",
    "yaml": "mmengine",
}
OPTIONAL = {"argcomplete", "supervision", "shapely", "pycocotools", "mmcv", "mmdet", "transformers"}


def test_what_is_imported_is_required():
    extras = PROJECT["optional-dependencies"]
    train = {re.match(r"[\w-]+", text)[0] for text in (*PROJECT["dependencies"], *extras["train"])}
    export = {re.match(r"[\w-]+", text)[0] for text in extras["export"]}
    for path in (ROOT / "visdet").rglob("*.py"):
        room = path.relative_to(ROOT / "visdet").parts[0]
        if room == "compat":
            continue
        required = train | export if room == "export" else train
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            for name in {name.split(".")[0] for name in names} - {"visdet"} - set(sys.stdlib_module_names):
                assert name in OPTIONAL or DISTRIBUTIONS.get(name, name) in required, (path, name)
