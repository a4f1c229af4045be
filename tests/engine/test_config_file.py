"""Config files: bases, imports, placeholders, and files that cannot be read."""

import importlib
import os
import re
import time
import traceback
from pathlib import Path

import pytest

from visdet.datasets.conversion import convert
from visdet.engine import ConfigError, load_config
from visdet.engine.errors import explain
from visdet.errors import InvalidInputError, hints_of
from visdet.models import DINO

READ_BASE = "from mmengine.config import read_base\nwith read_base():\n    from .base import *\n"


def written(tmp_path: Path, text: str | bytes, name: str = "a_config.py") -> str:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def value_of(tmp_path: Path, text: str, name: str = "a_config.py"):
    return load_config(written(tmp_path, text, name))[0].r


def has_not_run(folder: Path) -> bool:
    """Return whether no code has made the file ``ran``."""
    return not (folder / "ran").exists()


def test_a_missing_config_names_near_ones(tmp_path):
    written(tmp_path, "model = dict()")
    with pytest.raises(ConfigError, match=r"a_confg\.py does not exist; did you mean .*a_config\.py\?"):
        load_config(str(tmp_path / "a_confg.py"))


def test_a_missing_config_is_not_looked_for_on_the_whole_disk(tmp_path):
    begin = time.process_time()
    with pytest.raises(ConfigError, match=r"config /not_mounted/cfg\.py does not exist; `visdet configs`"):
        load_config("/not_mounted/cfg.py")
    for number in range(3000):
        (tmp_path / f"cf{number}.txt").touch()
    with pytest.raises(ConfigError, match="does not exist"):
        load_config(str(tmp_path / "cfg.py"))
    assert time.process_time() - begin < 2


def test_a_missing_base_names_near_ones_relative_to_the_config(tmp_path):
    (tmp_path / "family").mkdir()
    written(tmp_path / "family", "model = dict()", "base.py")
    path = written(tmp_path, "_base_ = ['configs/family/base.py']")
    with pytest.raises(
        ConfigError, match=r"a_config\.py.*configs/family/base\.py.*did you mean family/base\.py\?"
    ):
        load_config(path)
    path = written(tmp_path, "_base_ = ['../dino/dino_shapes.py']")
    with pytest.raises(ConfigError, match=r"did you mean visdet::dino/dino_shapes\.py\?"):
        load_config(path)


def test_a_base_of_another_package(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    path = written(tmp_path, "_base_ = 'other_detectors::dino/dino_shapes.py'")
    with pytest.raises(ConfigError, match=r"not installed; did you mean visdet::dino/dino_shapes\.py\?"):
        load_config(path)
    configs = tmp_path / "other_detectors" / ".mim" / "configs" / "dino"
    configs.mkdir(parents=True)
    written(tmp_path / "other_detectors", "raise RuntimeError", "__init__.py")
    importlib.invalidate_caches()
    written(configs, "n = 3", "small.py")
    assert load_config(written(tmp_path, "_base_ = 'other_detectors::dino/small.py'"))[0].n == 3
    with pytest.raises(ConfigError, match=r"did you mean other_detectors::dino/small\.py\?"):
        load_config(written(tmp_path, "_base_ = 'other_detectors::dino/smal.py'"))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("model = dict(", "SyntaxError.*line 1"),
        ("model = dict(type=Missing)", "NameError.*Missing.*line 1"),
        ("_base_ = 'one.py'\nx = _base_.n + 'a'", "TypeError.*line 2"),
        ("import no_such_package\n_base_ = []", "no_such_package.*line 1"),
        ("custom_imports = dict(imports=['no_such_module_anywhere'])", "no_such_module_anywhere"),
        ("_base_ = './nowhere.py'", r"nowhere\.py"),
        ("_base_ = '.'", "no base"),
        ("_base_ = ['one.py', 'two.py']", r"two\.py.*'n'"),
        ("_base_ = 3", "int"),
        ("root = 'x'\n_base_ = root + '/y.py'", "root"),
        ("if True:\n    _base_ = 'one.py'", "_base_"),
        ("_base_ = 'one.py'\nn = dict(a=1)", "n="),
        (f"{READ_BASE}from visdet.models import Nothing\nmodel = dict(type=Nothing)", "Nothing"),
        ("filename = 1", "filename"),
        ("r = '{{$VISDET_UNSET}}'", "VISDET_UNSET"),
        (b"r = '\xe9'", "utf-8"),
        (b"r = 1\0", "cannot be read"),
    ],
)
def test_a_config_that_cannot_be_read(tmp_path, text, named):
    written(tmp_path, "x = 1", "base.py")
    for name in ("one.py", "two.py"):
        written(tmp_path, "n = 1", name)
    with pytest.raises(ConfigError, match=named) as caught:
        load_config(written(tmp_path, text))
    assert tmp_path.name in str(caught.value) and "\n" not in str(caught.value)


def test_what_is_no_config(tmp_path):
    for path, message in (
        (str(tmp_path), "is a folder"),
        (written(tmp_path, "x", "a.txt"), "must end in .py, .json, .yaml, .yml"),
        (written(tmp_path, "[1]", "a.json"), "must hold a dict"),
        (written(tmp_path, "{", "b.json"), "cannot be read"),
        (written(tmp_path, "a: [", "a.yaml"), "cannot be read"),
        (written(tmp_path, "r: !!python/object/apply:os.getcwd []", "code.yaml"), "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_config(path)


@pytest.mark.parametrize(
    ("text", "line"),
    [("model = dict(a=1)\nmodel['b']\n", 2), ("def size():\n    return 1 // 0\n\n\nx = size()\n", 2)],
    ids=["module", "function"],
)
def test_an_error_in_a_config_names_the_line(tmp_path, text, line):
    written(tmp_path, text, "base.py")
    with pytest.raises(ConfigError, match=rf"base\.py, line {line}\)"):
        load_config(written(tmp_path, "_base_ = ['base.py']"))


@pytest.mark.parametrize(
    "config",
    ["custom_imports = dict(imports=['{0}'])", "value = __import__('{0}').x", "_base_ = []\nimport {0}"],
    ids=["custom_imports", "call", "import"],
)
@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("x = {}.nothing", AttributeError),
        ("x = {}['nothing']", KeyError),
        ("x = int('nothing')", ValueError),
        ("import no_such_package", ModuleNotFoundError),
    ],
)
def test_a_bug_in_a_users_module_keeps_its_traceback(tmp_path, monkeypatch, config, code, error):
    name = f"module_with_{error.__name__}"
    (tmp_path / f"{name}.py").write_text(f"\n{code}\n")
    monkeypatch.syspath_prepend(tmp_path)
    path = written(tmp_path, config.format(name))
    with pytest.raises(error) as caught:
        load_config(path)
    assert explain(caught.value) is None and os.path.basename(path) in "".join(hints_of(caught.value))
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (Path(last.filename).name, last.lineno) == (f"{name}.py", 2)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('import os\n_base_ = ["./base.py"]\nr = os.path.join("a", "b")', os.path.join("a", "b")),
        ('_base_ = ["./base.py"]\nimport os\nr = os.path.join("a", "b")', os.path.join("a", "b")),
        ("import os\nr = os.sep", os.sep),
        ("from datetime import date\nr = date(2020, 1, 2).year", 2020),
        ("import json as j\nr = j.loads('[1]')", [1]),
        ("import numpy as np\n_base_ = []\nr = float(np.float32(2) ** 3)", 8.0),
        ("_base_ = 'base.py'\nr = f'{__file__}'[-11:]", "a_config.py"),
        ("import numpy as np\nr = float(np.ones(2).sum())", 2.0),
    ],
)
def test_imports_in_a_config(tmp_path, text, value):
    written(tmp_path, "x = dict(y=[1])", "base.py")
    cfg, _ = load_config(written(tmp_path, text))
    assert cfg.r == value
    assert set(cfg.to_dict()) <= {"r", "x", "work_dir"}, "imported names are not values"


def test_a_config_that_mmengine_reads_lazily(tmp_path):
    written(tmp_path, "x = dict(y=[1])", "base.py")
    cfg, _ = load_config(written(tmp_path, f"{READ_BASE}from visdet.models import DINO\nx.update(kind=DINO)"))
    assert cfg.x == {"y": [1], "kind": DINO} and cfg.filename.endswith("a_config.py")


def test_a_call_of_an_imported_name_says_how_to_write_it(tmp_path):
    written(tmp_path, "x = 1", "base.py")
    text = f"{READ_BASE}import numpy\nr = numpy.ones(2)"
    with pytest.raises(ConfigError, match=r"an import gives its value only when .*_base_"):
        load_config(written(tmp_path, text))


def test_bases_merge(tmp_path):
    written(tmp_path, "a = dict(x=1, y=[dict(z=1)])\nb = dict(c=2)\nn = 3", "one.py")
    written(tmp_path, "t = dict(c=5)", "two.py")
    text = (
        "_base_ = ('one.py', 'two.py')\na = dict(x=2)\nlater = {{_base_.b}}\ntriple = _base_.n * 3\n"
        "same = dict(_delete_=True, q=1)\nb = same\nt = same\nr = ['{{_base_.a.y.0.z}}', {{_base_.n}}]"
    )
    cfg, _ = load_config(written(tmp_path, text))
    assert cfg.a == {"x": 2, "y": [{"z": 1}]} and cfg.later == {"c": 2} and cfg.triple == 9
    assert cfg.b == cfg.t == {"q": 1}, "a dict that is used twice deletes twice"
    assert cfg.r == [1, 3]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('"{{$V_SET:x}}"', "v"),
        ('"{{$V_SET}}"', "v"),
        ('"{{ $V_NO : a b }}"', "a b"),
        ('"{{$V_URL:http://h:80/x}}"', "http://h:80/x"),
        ('"{{$V_EMPTY:x}}"', ""),
        ('"{{$V_WIN}}"', "C:\\new\\1"),
        ('"{{$V_QUOTES}}"', 'it\'s "x"'),
        ('"/r/{{$V_SET:x}}/{{$V_NO:y}}"', "/r/v/y"),
        ('f"{{$V_SET:x}}/{1 + 1}"', "v/2"),
        ('["{{$V_SET}}", {"{{$V_SET}}": 1}]', ["v", {"v": 1}]),
        ("{{'$V_NUMBER:80'}}", 7),
        ("{{'$V_NO:[1, 2]'}}", [1, 2]),
        ("dict(n={{'$V_NUMBER'}} + 1)", {"n": 8}),
        ('"{{fileBasenameNoExtension}}.{{ fileExtname }}"', "a.config..py"),
        ('"{{ a template }} {{b}}"', "{{ a template }} {{b}}"),
        ("{1, 2}", {1, 2}),
    ],
)
def test_placeholders(tmp_path, monkeypatch, text, value):
    for name, content in {
        "SET": "v",
        "EMPTY": "",
        "WIN": "C:\\new\\1",
        "QUOTES": 'it\'s "x"',
        "NUMBER": "7",
    }.items():
        monkeypatch.setenv(f"V_{name}", content)
    monkeypatch.delenv("V_NO", raising=False)
    assert value_of(tmp_path, f"r = {text}", "a.config.py") == value


def test_placeholders_of_json_and_yaml(tmp_path, monkeypatch):
    monkeypatch.setenv("V_QUOTES", 'C:\\new "x"')
    written(tmp_path, '{"n": {"m": {"k": 2}}}', "base.json")
    text = '{"_base_": "base.json", "r": ["{{$V_QUOTES}}", {{\'$V_NO:80\'}}, {{_base_.n.m}}, {"k": "{{$V_NO:a b}}"}]}'
    for name in ("a b.json", "a-b.yaml"):
        assert value_of(tmp_path, text, name) == ['C:\\new "x"', 80, {"k": 2}, {"k": "a b"}]


def test_the_yaml_that_mmengine_writes_of_a_config(tmp_path):
    path = written(tmp_path, "r = dict(scale=(3, 4), steps=[(1, [2]), None, 'a'])")
    load_config(path)[0].dump(tmp_path / "dump.yaml")
    assert load_config(tmp_path / "dump.yaml")[0].r == load_config(path)[0].r


FOLDERS = [
    "it's",
    'a"b',
    "'+__import__('os').system('touch ran')+'",
    r"back\slash",
    "new\nline",
    "{x}",
    "é ß",
    "$A #b: c",
]


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "a.py",
            "r = ['{{fileDirname}}/x', \"{{ fileDirname }}/x\", r'''{{fileDirname}}/x''', f'{{fileDirname}}/{\"x\"}']",
        ),
        ("a.json", '{"r": ["{{fileDirname}}/x", "{{ fileDirname }}/x"]}'),
        (
            "a.yaml",
            "r: ['{{fileDirname}}/x', \"{{ fileDirname }}/x\"]\ns:\n  {{fileDirname}}: {{fileDirname}}/x\n",
        ),
    ],
    ids=["python", "json", "yaml"],
)
def test_a_folder_of_any_name_is_text(tmp_path, monkeypatch, folder, name, text):
    monkeypatch.chdir(tmp_path)
    (tmp_path / folder).mkdir()
    cfg, _ = load_config(written(tmp_path / folder, text, name))
    assert set(cfg.r) == {f"{tmp_path}/{folder}/x"} and has_not_run(tmp_path)
    for key, value in cfg.get("s", {}).items():
        assert (key, value) == (f"{tmp_path}/{folder}", f"{tmp_path}/{folder}/x")


@pytest.mark.parametrize("value", ["open('ran', 'w')", "V", "1 +", "[x for x in (1,)]", "os.sep", ""])
@pytest.mark.parametrize("placeholder", ["{{'$V_CODE'}}", '{{"$V_CODE"}}'])
def test_outside_of_a_text_a_variable_is_a_literal(tmp_path, monkeypatch, value, placeholder):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("V_CODE", value)
    with pytest.raises(
        ConfigError, match=r"a\.py, line 2: outside of a text, .* must stand for a number, a list or"
    ):
        load_config(written(tmp_path, f"import os\nr = dict(x={placeholder})", "a.py"))
    assert has_not_run(tmp_path)


@pytest.mark.parametrize("name", ["a.json", "a.yaml", "sub/b.json"])
def test_a_config_without_code_runs_programs_of_its_folder_alone(tmp_path, name):
    """Also if a JSON file elsewhere leads to the program, or a link does."""
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    for folder in (home / "sub", elsewhere):
        folder.mkdir(parents=True)
        written(folder, f"open({str(tmp_path / 'ran')!r}, 'w')\nn = 1", "code.py")
    (home / "link.py").symlink_to(elsewhere / "code.py")
    written(elsewhere, '{"_base_": "code.py"}', "data.json")
    for base in ("../elsewhere/code.py", f"{elsewhere}/code.py", "../elsewhere/data.json", "link.py"):
        path = os.path.relpath(home / base, (home / name).parent) if base[0] != "/" else base
        with pytest.raises(ConfigError, match=r"code\.py|link\.py") as caught:
            load_config(written(home, f'{{"_base_": "{path}"}}', name))
        assert "is a program outside of its folder" in str(caught.value) and has_not_run(tmp_path)
    inside = "code.py" if "/" in name else "sub/code.py"
    assert load_config(written(home, f'{{"_base_": "{inside}"}}', name))[0].n == 1
    assert load_config(written(home, '{"_base_": "visdet::_base_/default_runtime.py"}', name))[
        0
    ].default_scope
    assert load_config(written(home, "_base_ = '../elsewhere/data.json'", "a.py"))[0].n == 1


@pytest.mark.parametrize("suffix", ["py", "json"])
def test_a_base_of_itself_is_one_message(tmp_path, suffix):
    for name, base in (("a", "b"), ("b", "c"), ("c", "b")):
        text = f"_base_ = '{base}.py'" if suffix == "py" else f'{{"_base_": "{base}.json"}}'
        written(tmp_path, text, f"{name}.{suffix}")
    with pytest.raises(ConfigError) as caught:
        load_config(str(tmp_path / f"a.{suffix}"))
    a, b, c = (rf"\S+{name}\.{suffix}" for name in "abc")
    assert re.fullmatch(
        rf"config {a} inherits from itself: {a} > {b} > {c} > {b}",
        str(caught.value),
    )


def laughs(depth, item="[{0}, {0}]"):
    lines = [f"a{level}: &a{level} {item.format(f'*a{level - 1}')}" for level in range(1, depth)]
    return "\n".join(["a0: &a0 {x: 1, y: 2}", *lines])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (laughs(40), "its aliases repeat values, so that there are over 10000000"),
        (laughs(40, "{{b: {0}, c: {0}}}"), "aliases repeat values"),
        (laughs(40, "{{<<: [{0}, {0}]}}"), "aliases repeat values"),
        ("a: &a [*a]", "an alias stands within the value that it repeats"),
        ("a: &a {b: {c: *a}}", "an alias stands within"),
        ("a: " + "[" * 600, "nested too deeply"),
    ],
    ids=["lists", "dicts", "merged", "itself", "itself far", "deep"],
)
def test_a_short_yaml_text_keeps_nothing_busy(tmp_path, text, told):
    start = time.perf_counter()
    with pytest.raises(ConfigError, match=rf"a\.yaml cannot be read.*{told}"):
        load_config(written(tmp_path, text, "a.yaml"))
    with pytest.raises(InvalidInputError, match=told):
        convert(Path(written(tmp_path, text, "data.yaml")).parent, tmp_path / "out", "yolo")
    assert time.perf_counter() - start < 5


def test_aliases_of_usual_numbers_are_read(tmp_path):
    assert load_config(written(tmp_path, laughs(12) + "\nr: {<<: *a0, y: 3}", "a.yaml"))[0].r == {
        "x": 1,
        "y": 3,
    }
