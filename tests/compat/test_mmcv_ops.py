"""Providing mmcv._ext: by install, by the command, and by the switch in the environment."""

import importlib.util
import sys

import pytest
from programs import run_python

from visdet.compat import mmcv_ext, mmcv_ops


@pytest.fixture(autouse=True)
def no_trace_of_mmcv():
    """Leave the modules and finders as they were: later tests must not find the package made here."""
    finders, modules = (
        list(sys.meta_path),
        {name: module for name, module in sys.modules.items() if _is_mmcv(name)},
    )
    yield
    sys.meta_path[:] = finders
    for name in [name for name in sys.modules if _is_mmcv(name)]:
        del sys.modules[name]
    sys.modules.update(modules)
    importlib.invalidate_caches()


def _is_mmcv(name):
    return name == "mmcv" or name.startswith("mmcv.")


def fake_mmcv(folder, monkeypatch, with_ext):
    package = folder / "mmcv"
    package.mkdir()
    (package / "__init__.py").write_text("")
    if with_ext:
        (package / "_ext.py").write_text("own = True")
    monkeypatch.syspath_prepend(folder)
    for name in ("mmcv", "mmcv._ext"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_install_provides_what_is_missing(tmp_path, monkeypatch):
    fake_mmcv(tmp_path, monkeypatch, with_ext=False)
    assert mmcv_ops.install() and mmcv_ops.install() and "mmcv" not in sys.modules
    import mmcv._ext

    assert mmcv._ext.nms.__wrapped__ is mmcv_ext.nms and mmcv_ops.install()


def test_install_leaves_a_compiled_mmcv_alone(tmp_path, monkeypatch):
    fake_mmcv(tmp_path, monkeypatch, with_ext=True)
    assert not mmcv_ops.install()
    assert importlib.import_module("mmcv._ext").own


def test_scripts_run_with_it(tmp_path):
    (tmp_path / "mmcv").mkdir()
    (tmp_path / "mmcv" / "__init__.py").write_text("")
    script = tmp_path / "script.py"
    script.write_text("import sys, mmcv._ext as e; print(e.get_compiler_version(), sys.argv[1:])")
    command = ("-m", "visdet.compat.mmcv_ops", script, "--a", "b")
    out, _ = run_python(*command, PYTHONPATH=f"{tmp_path}:.")
    assert out.strip() == "none: operators by visdet ['--a', 'b']"


@pytest.mark.parametrize(
    "imported, wish, provided",
    [
        *(("visdet", wish, "False") for wish in ("0", "", None)),
        *((imported, "1", "True") for imported in ("visdet", "visdet.ops")),
    ],
)
def test_the_environment_switch_acts_at_import(imported, wish, provided, tmp_path):
    (tmp_path / "mmcv").mkdir()
    (tmp_path / "mmcv" / "__init__.py").write_text("")
    script = f"import importlib.util as u, {imported}; print(u.find_spec('mmcv._ext') is not None)"
    out, _ = run_python("-c", script, PYTHONPATH=f"{tmp_path}:.", VISDET_MMCV_OPS=wish)
    assert out.strip() == provided


def test_the_switch_without_mmcv_says_so(tmp_path):
    script = "import sys; sys.modules['mmcv'] = None; import visdet"
    _, error = run_python("-c", script, status=1, VISDET_MMCV_OPS="1")
    assert "mmcv is not installed" in error and "mmcv-lite==" in error


@pytest.mark.parametrize("arguments, status", [(["--help"], 0), (["-h"], 0), ([], 2), (["-m"], 2)])
def test_the_command_explains_itself(arguments, status):
    out, error = run_python("-m", "visdet.compat.mmcv_ops", *arguments, status=status)
    assert "python -m visdet.compat.mmcv_ops SCRIPT" in (error if status else out)
