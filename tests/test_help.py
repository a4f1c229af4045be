"""Each command explains itself by ``--help``, whatever is installed."""

import argparse
import re

import pytest
from programs import ROOT, run_python

from visdet.command_line import add_config_arguments


def commands():
    """Return the arguments for Python that start each tool, and each module that is run by ``python -m``."""
    found = []
    for path in sorted(
        path for folder in ("visdet", "tools", "benchmarks") for path in ROOT.glob(f"{folder}/**/*.py")
    ):
        if not re.search(r"^if __name__ == .__main__.:", path.read_text(encoding="utf-8"), re.M):
            continue
        if path.parent.name == "tools":
            found.append((f"tools/{path.name}",))
        else:
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found.append(("-m", module.removesuffix(".__main__")))
    return found


# The benchmarks import torch, each in seconds. One process asks them one after another.
ASK = """
import runpy, sys
for module in sys.argv[1:]:
    sys.argv = [module, "--help"]
    print("module", module)
    try:
        runpy.run_module(module, run_name="__main__")
    except SystemExit as error:
        assert not error.code, (module, error.code)
"""


def explain(*arguments):
    return run_python(*arguments)[0]


def test_configs_are_completed_and_copy_is_optional(tmp_path, monkeypatch):
    parser = argparse.ArgumentParser()
    add_config_arguments(parser)
    completer = next(action.completer for action in parser._actions if action.dest == "config")
    assert "dino/dino_shapes" in completer("dino/d")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dino").mkdir()
    assert completer("din")[0] == "dino/"
    assert "[copy NAME [FOLDER]]" in explain("-m", "visdet", "configs", "--help")


def check(explanation, command):
    text = (ROOT / command).read_text() if command.startswith("tools/") else ""
    command_of_visdet = re.search(r'main\(\["([\w-]+)"', text)
    name = command_of_visdet[1] if command_of_visdet else command.split("/")[-1]
    assert explanation.startswith("usage: ") and name in explanation.split("\n\n")[0], explanation


@pytest.mark.parametrize("command", [c for c in commands() if "benchmarks" not in c[-1]], ids=" ".join)
def test_a_command_explains_itself(command):
    check(explain(*command, "--help"), command[-1])


def test_benchmarks_explain_themselves():
    modules = [command[-1] for command in commands() if "benchmarks" in command[-1]]
    _, *explanations = re.split(r"^module .*\n", explain("-c", ASK, *modules), flags=re.MULTILINE)
    for module, explanation in zip(modules, explanations, strict=True):
        check(explanation, module)
