"""The dependency direction of the package, read from the sources; and what a bare import pulls in."""

import ast
import re
import sys
from importlib.util import resolve_name
from pathlib import Path

import pytest
from programs import run_python

ROOT = Path(__file__).resolve().parents[1] / "visdet"

# What each folder may import of visdet besides itself. An op knows no module, a model knows no data set.
ALLOWED = {
    "ops": {"near_names"},
    "errors": set(),
    "restricted_load": set(),
    "files": {"errors"},
    "structures": {"errors", "lazy_names", "checks"},
    "execution": {"ops"},
    "checks": {"errors"},
    "registry": {"errors", "checks", "near_names"},
    "models": {"ops", "structures", "execution", "checks", "registry", "errors"},
    "datasets": {"structures", "checks", "files", "registry", "errors", "lazy_names", "restricted_load"},
    "evaluation": {"structures", "checks", "files", "registry", "errors"},
    "engine": {
        "structures",
        "execution",
        "checks",
        "files",
        "registry",
        "errors",
        "lazy_names",
        "option_values",
        "restricted_load",
    },
    "visualization": {"structures", "checks", "files", "registry", "errors"},
    "export": {
        *("ops", "models", "engine", "structures", "execution", "files", "checks"),
        *("registry", "errors", "lazy_names", "__version__"),
    },
    "compat": {"ops", "checks", "errors", "restricted_load"},
}
# They say which extra to install before they import its packages.
NEED_TRAIN_EXTRA = {
    "structures",
    "registry",
    "models",
    "datasets",
    "evaluation",
    "engine",
    "visualization",
    "export",
}
EXCEPTIONS = {
    "ops/registration.py": {"registry", "ops"},
}  # puts the operators into OPS; nothing imports it but the registry
# The folders and the files of the engine, from the lowest to the highest. Each imports what stands below it alone.
LAYERS_OF_ENGINE = (
    {"errors"},
    {"process", "log_curves", "first_hook"},
    {"config", "data", "optim"},
    {"checkpoints", "late_numbers", "monitored_metrics", "stages", "advice"},
    {"graphs", "loops", "prepare"},
    {"inference", "build", "run_checkpoints"},
    {"hooks", "summary", "trainer", "run"},
)


def imported(path):
    """Return the dotted names, as lists of parts, that a file imports of visdet, anywhere in it."""
    package = ".".join(["visdet", *path.relative_to(ROOT).parent.parts])
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = resolve_name("." * node.level + (node.module or ""), package)
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return [name.split(".") for name in names if name.startswith("visdet.")]


def imported_parts(path):
    """Return the parts of visdet that a file imports."""
    return {part for _, part, *_ in imported(path)}


@pytest.mark.parametrize("part", ALLOWED)
def test_imports_follow_the_direction(part):
    files = sorted((ROOT / part).rglob("*.py")) or [ROOT / f"{part}.py"]
    assert files
    for path in files:
        allowed = (
            ALLOWED[part]
            | {part}
            | ({"train_extra"} if part in NEED_TRAIN_EXTRA else set())
            | EXCEPTIONS.get(str(path.relative_to(ROOT)), set())
        )
        extra = imported_parts(path) - allowed
        assert not extra, (
            f"{path.relative_to(ROOT.parent)} imports {sorted(extra)}; {part} may import {sorted(allowed)}"
        )


def test_the_engine_has_seven_layers():
    engine = ROOT / "engine"
    layer = {room: number for number, rooms in enumerate(LAYERS_OF_ENGINE) for room in rooms}
    room_of = {path: path.relative_to(engine).parts[0].removesuffix(".py") for path in engine.rglob("*.py")}
    assert layer.keys() == {*room_of.values()} - {"__init__"}, "each folder and each file has a layer"
    for path, room in room_of.items():
        if room != "__init__":
            rooms = {name[2] for name in imported(path) if name[1] == "engine"}
            higher = {other for other in rooms - {room} if layer[other] >= layer[room]}
            assert not higher, f"{path.relative_to(ROOT)} imports {sorted(higher)}"


def test_others_import_what_the_operators_publish():
    private = re.compile(r"visdet\.ops\.(\w+\.)*_|from visdet\.ops(\.\w+)* import .*\b_")
    assert private.search("from visdet.ops._library import x") and private.search(
        "from visdet.ops.fused import _rows"
    )
    folders = ("models", "engine", "compat", "commands", "visualization")
    for path in [ROOT / "doctor.py", *(file for folder in folders for file in (ROOT / folder).rglob("*.py"))]:
        found = private.search(path.read_text())
        assert not found, f"{path.relative_to(ROOT)}: {found[0]}"


def test_the_reader_of_imports_sees_every_form(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    (tmp_path / "ops").mkdir()
    file = tmp_path / "ops" / "a.py"
    file.write_text(
        "import visdet.models.x\nfrom visdet import engine\nfrom visdet.datasets import y\n"
        "from ..evaluation import z\nfrom .b import c\n"
    )
    assert imported_parts(file) == {"models", "engine", "datasets", "evaluation", "ops"}


def test_ops_import_with_torch_alone():
    code = (
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name.split('.')[0] in ('mmengine', 'torchvision', 'cv2', 'mmcv'):\n"
        "            raise ImportError(f'{name} must not be needed')\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "import visdet.ops\n"
        "assert not {'mmengine', 'torchvision', 'cv2'} & set(sys.modules)\n"
    )
    run_python("-c", code)


def test_ops_import_in_little_more_time_than_torch():
    """torch.compile's front end takes as long to import as torch; a decorator of torch.compiler would bring it in."""
    code = (
        "import sys, torch\n"
        "heavy = [name for name in ('torch._dynamo', 'torch._inductor') if name not in sys.modules]\n"
        "import visdet.ops\n"
        "assert not set(heavy) & set(sys.modules), set(heavy) & set(sys.modules)\n"
    )
    run_python("-c", code)


def test_tests_of_operators_need_torch_alone():
    """``make abi-check`` runs them in an environment without the packages of the extra ``train``."""
    forbidden = re.compile(rf"(from|import) (mmengine|visdet\.({'|'.join(NEED_TRAIN_EXTRA)}))\b")
    for path in sorted((Path(__file__).parent / "ops").glob("*.py")):
        needless = [line for line in path.read_text().splitlines() if forbidden.match(line)]
        assert not needless, f"{path.name}: {needless}"


# The functions of libraries that read pictures, and the files of visdet that may call them.
READERS = {
    "Image.open": {"files/images.py"},
    "cv2.VideoCapture": {"engine/inference/given_images.py", "engine/inference/videos.py"},
}


def test_pictures_are_read_in_one_place():
    """A second reader would lack the first one's limits, and its rule for orientations."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and re.search(
                r"(\bImage\.open|\bimread\w*|imdecode|imfrombytes|decode_(image|jpeg|png)|VideoCapture)$",
                called := ast.unparse(node),
            ):
                found.setdefault(called, set()).add(str(path.relative_to(ROOT)))
    assert found == READERS
