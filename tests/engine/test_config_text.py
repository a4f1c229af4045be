"""Configs as Python code."""

import collections
import math
from pathlib import Path

import numpy as np
from mmengine.config import Config

from visdet.engine import load_config
from visdet.engine.config.run_config import RunConfig
from visdet.engine.config.text import config_text, values_without_code

VALUES = {
    "steps": list(range(60)),
    "model": {"type": "Net", "sizes": (3,), "empty": [], "nothing": (), "none": None, "options": {}},
    "names": {"a name": 1, "class": True, 7: "it's"},
    "pipeline": [
        {"type": "Load", "path": "C:\\images"},
        {"type": "Flip", "probability": 0.5, "note": "x" * 60},
    ],
    "without_literals": [math.inf, -math.inf],
    "deep": {"a": {"b": [{"c": ("d" * 50, "e" * 50)}]}},
}


def test_code_gives_the_values_back():
    found = {}
    exec(config_text(VALUES), found)
    assert {name: found[name] for name in VALUES} == VALUES
    assert type(found["model"]["sizes"]) is tuple and type(found["steps"]) is list
    assert max(map(len, config_text(VALUES).splitlines())) <= 100


def test_code_by_hand():
    assert (
        config_text({"b": {"type": "Net", "depth": 18}, "a": "x"})
        == "a = 'x'\nb = dict(depth=18, type='Net')\n"
    )
    assert config_text({"a": ["x" * 60, "y" * 60]}).splitlines() == [
        "a = [",
        f"    '{'x' * 60}',",
        f"    '{'y' * 60}',",
        "]",
    ]
    assert config_text({"a": {"b": (1,), "c d": 2}}) == "a = {'b': (1,), 'c d': 2}\n"


def test_objects_are_imported_and_others_described(tmp_path):
    values = {
        "keep": {"f": max, "kind": collections.Counter, "g": [lambda image: image]},
        "numbers": (np.float32(0.5), np.float64(0.1), np.int64(3), np.bool_(True)),
        "path": Path("a") / "b",
        "rest": [b"x", {1, 2}, 1j, None, object()],
    }
    text = config_text(values)
    assert values_without_code(values) == ["keep.g.0", "rest.4"]
    (tmp_path / "copy.py").write_text(text)
    copy = load_config(str(tmp_path / "copy.py"))[0]
    assert copy.keep.f is max and copy.keep.kind is collections.Counter
    assert copy.keep.g[0].startswith("<function ") and "0x" not in text
    assert copy.numbers == (0.5, 0.1, 3, True) and type(copy.numbers[1]) is float
    assert copy.path == str(Path("a") / "b") and copy.rest[:4] == values["rest"][:4]
    assert Config.fromfile(tmp_path / "copy.py").keep.f is max, "mmengine reads it, too"


def test_the_text_of_a_run_follows_its_config(tmp_path):
    config = RunConfig.copy_of(Config({"model": {"depth": 18}}))
    config.model.depth = 34
    config.dump(tmp_path / "config.py")
    assert Config.fromfile(tmp_path / "config.py").model == {"depth": 34}
    assert config.pretty_text == "model = dict(depth=34)\n"
