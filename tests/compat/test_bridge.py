"""The machinery of visdet.compat, on packages made for the test: patching at import, restoring, extensions, scripts."""

import importlib
import inspect
import os
import sys
import warnings
from pathlib import Path

import pytest
from programs import run_python

from visdet import compat
from visdet.compat import _bridge, extensions
from visdet.compat.__main__ import main


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package ``vehicle`` whose module ``vehicle.models.car`` has a function and a class to replace."""
    folder = tmp_path / "vehicle" / "models"
    folder.mkdir(parents=True)
    (tmp_path / "vehicle" / "__init__.py").write_text("")
    (folder / "__init__.py").write_text("")
    (folder / "car.py").write_text(
        "def speed():\n    return 1\n\nclass Car:\n    def drive(self):\n        return speed()\n"
    )
    (folder / "bike.py").write_text("def speed():\n    return 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "vehicle.models.car"
    for name in [name for name in sys.modules if name.split(".")[0] == "vehicle"]:
        del sys.modules[name]


@pytest.fixture
def bridge(package):
    def patch(module, bridge):
        bridge.replace(module, "speed", lambda: 2)
        bridge.replace(module.Car, "wheels", 4)
        yield "speed"

    made = _bridge.Bridge("vehicle", "vehicle", package, patch)
    yield made
    made.uninstall()


def state(module):
    return dict(vars(module)), dict(vars(module.Car)), module.__spec__.loader, module.__loader__


def test_a_module_imported_later_is_patched_at_its_import_and_keeps_its_loader(bridge, package):
    bridge.install()
    assert package not in sys.modules
    module = importlib.import_module(package)
    assert module.Car().drive() == 2 and module.Car.wheels == 4
    assert bridge.reached == {package: ["speed"]}
    assert type(module.__loader__).__module__ == type(module.__spec__.loader).__module__
    assert "frozen" in type(module.__loader__).__module__ and "class Car" in inspect.getsource(module)
    assert importlib.import_module("vehicle.models.bike").speed() == 3


def test_a_module_imported_before_is_patched_and_restored_exactly(bridge, package):
    module = importlib.import_module(package)
    before, finders = state(module), list(sys.meta_path)
    bridge.install()
    bridge.install()
    assert module.Car().drive() == 2
    bridge.uninstall()
    bridge.uninstall()
    assert state(module) == before and sys.meta_path == finders and bridge.reached == {}
    assert module.Car().drive() == 1 and not hasattr(module.Car, "wheels")


def test_a_later_patch_survives_the_uninstallation(bridge, package):
    module = importlib.import_module(package)
    bridge.install()
    module.speed = lambda: 5
    bridge.uninstall()
    assert module.speed() == 5 and not hasattr(module.Car, "wheels")


def test_reload_patches_again(bridge, package):
    bridge.install()
    assert importlib.reload(importlib.import_module(package)).speed() == 2


def test_the_context_manager_leaves_what_it_found(bridge, package):
    module = importlib.import_module(package)
    with bridge.installed():
        assert module.speed() == 2
        with bridge.installed():
            pass
        assert module.speed() == 2
    assert module.speed() == 1 and not bridge.is_installed


def test_a_package_that_is_not_installed_is_named():
    bridge = _bridge.Bridge("nothing", "no_such_package", "", lambda module, bridge: [])
    with pytest.raises(ImportError, match=r"visdet\.compat\.nothing: no_such_package is not installed"):
        bridge.install()
    assert not bridge.is_installed


@pytest.mark.parametrize("name, version", [("numpy", r"\d.*"), ("vehicle", r"\(unknown version\)")])
def test_a_changed_package_is_named_with_its_version(name, version, package):
    bridge = _bridge.Bridge("arrays", name, "", lambda module, bridge: [])
    with pytest.warns(
        _bridge.CompatWarning, match=rf"in {name} {version}, {name}\.spin takes \(\).*visdet-ops"
    ):
        bridge.warn(importlib.import_module(name), "spin takes ()")


def test_a_warning_that_is_an_error_leaves_nothing_installed(package):
    def patch(module, bridge):
        bridge.replace(module, "speed", lambda: 2)
        bridge.warn(module, "Car is missing")
        yield "speed"

    module = importlib.import_module(package)
    before, finders = state(module), list(sys.meta_path)
    bridge = _bridge.Bridge("vehicle", "vehicle", package, patch)
    with warnings.catch_warnings():
        warnings.simplefilter("error", _bridge.CompatWarning)
        with pytest.raises(_bridge.CompatWarning), bridge.installed():
            pass
    assert state(module) == before and sys.meta_path == finders and not bridge.is_installed


def test_an_unknown_bridge_is_refused():
    with pytest.raises(ValueError, match=r"there is no bridge 'tensorflow'.*transformers, ultralytics"):
        compat.find("tensorflow")


@pytest.mark.parametrize("name", compat.BRIDGES)
def test_every_bridge_has_the_same_functions(name):
    module = importlib.import_module(f"visdet.compat.{name}")
    assert {"install", "uninstall", "installed"} <= set(module.__all__)
    assert compat.find(name) is module.bridge and module.bridge.name == name


@pytest.fixture
def no_extensions(monkeypatch):
    yield
    extensions.uninstall()


@pytest.mark.parametrize(
    "name",
    [
        "MultiScaleDeformableAttention",
        "deformable_aggregation_ext",
        "e2e_deformable_aggregation_with_depth_ext",
    ],
)
def test_an_extension_is_importable_only_while_installed(name, no_extensions):
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(name)
    with extensions.installed():
        assert importlib.import_module(name).__name__ == name
        assert extensions.provided() == [name]
    assert name not in sys.modules
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(name)


ROOT = str(Path(compat.__file__).resolve().parents[2])


def test_visdet_compat_imports_nothing():
    run_python("-c", "import visdet.compat, sys; assert not {'torch', 'numpy'} & set(sys.modules)")


@pytest.fixture
def program(tmp_path, monkeypatch, capsys, no_extensions):
    """A function that runs ``python -m visdet.compat`` in a folder, and returns its status and both outputs."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: (main(list(map(str, arguments))), *capsys.readouterr())


RUN = ("-m", "visdet.compat", "run", "--only", "extensions")


def test_the_list_of_bridges(program):
    code, out, error = program()
    assert code == 0, error
    assert all(f"\n{name}" in out for name in compat.BRIDGES) and "run SCRIPT" in out
    assert all(name in out for name in ("DCNv3", "deformable_aggregation_with_depth_ext", "bev_pool_v2_ext"))


@pytest.mark.parametrize(
    "line, advice",
    [
        ("from neighbour import _other_sampling_cuda", True),
        ("import selective_scan_cuda_ext", True),
        ("import no_such_module", False),
    ],
)
def test_an_extension_that_is_not_provided_is_named_with_advice(line, advice, tmp_path):
    (tmp_path / "neighbour.py").touch()
    (tmp_path / "script.py").write_text(line)
    name = line.rpartition(" ")[2]
    _, error = run_python(*RUN, tmp_path / "script.py", status=1)
    assert f"'{name}'" in error
    assert (f"visdet does not provide the compiled extension {name}: " in error) == advice


@pytest.mark.parametrize(
    "lines, told",
    [
        (
            "import torch",
            "the program called no operator of visdet (calls in compiled functions do not count)",
        ),
        ("import sys", None),
        (
            "import torch, pointnet2_ops._ext as e\nfor i in range(3): e.gather_points(torch.rand(1, 2, 3), "
            "torch.zeros(1, 1).int())\nraise SystemExit(0)",
            "the program called pointnet2_ops._ext.gather_points (3)",
        ),
    ],
    ids=["none", "without torch", "three"],
)
def test_a_run_tells_at_its_end_what_it_has_called(lines, told, tmp_path):
    (tmp_path / "pointnet2_ops").mkdir()
    (tmp_path / "script.py").write_text(lines)
    out, error = run_python("-m", "visdet.compat", "run", tmp_path / "script.py")
    assert not out
    assert error.splitlines()[-1:] == ([f"visdet: {told}"] if told else [])


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(
        "import subprocess, sys\n"
        "import MultiScaleDeformableAttention as MSDA, neighbour\n"
        "print(__name__, sys.argv[1:], MSDA.__spec__.origin)\n"
        "if sys.argv[1] == 'parent':\n"
        "    sys.exit(subprocess.run([sys.executable, __file__, 'child']).returncode)\n"
    )
    (tmp_path / "neighbour.py").write_text("")
    return path


def test_a_script_and_its_children_run_under_the_bridges(script):
    out, _ = run_python(*RUN, script, "parent", "-m")
    assert sorted(out.splitlines()) == ["__main__ ['child'] visdet", "__main__ ['parent', '-m'] visdet"]


def test_a_script_finds_the_modules_that_it_finds_without_visdet(script, tmp_path):
    """It finds the modules in its own folder, and none in the folder in which the command was given."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "neighbour.py").write_text("raise AssertionError('a module of the current folder')\n")
    (elsewhere / "of_the_current_folder.py").write_text("")
    source = script.read_text()
    script.write_text(
        "import importlib.util\nassert importlib.util.find_spec('of_the_current_folder') is None\n" + source
    )
    assert run_python(*RUN, script, "x", cwd=elsewhere)[0] == "__main__ ['x'] visdet\n"


def test_a_script_is_the_main_program_until_its_process_ends(tmp_path):
    """Its path is absolute, its source can be read, and threads and exit handlers find its classes."""
    script = tmp_path / "script.py"
    script.write_text(
        "import atexit, inspect, os, pickle, threading, time\n"
        "class Result:\n"
        "    pass\n"
        "def save(when):\n"
        "    assert type(pickle.loads(pickle.dumps(Result()))) is Result\n"
        "    print(when)\n"
        "os.chdir('/')\n"
        "assert os.path.isabs(__file__) and os.path.exists(__file__) and __name__ == '__main__'\n"
        "assert 'pickle' in inspect.getsource(save)\n"
        "atexit.register(save, 'at exit')\n"
        "def later():\n"
        "    time.sleep(0.5)\n"
        "    save('in a thread')\n"
        "threading.Thread(target=later).start()\n"
    )
    for program in ([script], ["-m", "script"]):
        assert run_python(*RUN, *program, cwd=tmp_path)[0] == "in a thread\nat exit\n"


def test_a_script_that_does_not_exist_is_named_in_one_line(tmp_path):
    _, error = run_python("-W", "error", *RUN, tmp_path / "absent.py", status=2)
    assert len(error.splitlines()) == 1 and "absent.py': [Errno 2] No such file" in error


def test_a_clone_need_not_be_installed(script):
    assert run_python(*RUN, script, "x", PYTHONPATH="")[0] == "__main__ ['x'] visdet\n"


def test_a_package_and_a_module_run_as_python_runs_them(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    for name in ("__main__", "module"):
        (tmp_path / "package" / f"{name}.py").write_text(
            "import sys; print(__name__, __package__, __spec__.name, __file__, sys.argv)"
        )
    for name in ("package", "package.module"):
        expected, _ = run_python("-m", name, "x", cwd=tmp_path)
        assert run_python(*RUN, "-m", name, "x", cwd=tmp_path)[0] == expected
    _, error = run_python(*RUN, "-m", "package.absent", cwd=tmp_path, status=1)
    assert "No module named package.absent" in error


def test_python_started_with_the_variable_installs_the_bridges(script, tmp_path, program):
    folder = program("startup")[1].strip()
    other = tmp_path / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text("print('the other sitecustomize')\n")
    path = os.pathsep.join([folder, str(other), ROOT])
    out, _ = run_python(script, "x", PYTHONPATH=path, VISDET_COMPAT="extensions")
    assert out == "the other sitecustomize\n__main__ ['x'] visdet\n"
    _, error = run_python(script, "x", PYTHONPATH=path, VISDET_COMPAT="", status=1)
    assert "No module named 'MultiScaleDeformableAttention'" in error


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["run"], "usage: python -m visdet.compat"),
        (["run", "-m"], "usage: python -m visdet.compat"),
        (["fly"], "usage: python -m visdet.compat"),
        (["run", "--only", "jax", "x.py"], "--only must be names from transformers,"),
    ],
    ids=" ".join,
)
def test_wrong_command_lines(arguments, words, program):
    status, _, error = program(*arguments)
    assert status == 2 and words in error
