"""The values of ``--cfg-options``."""

import argparse
import math

import pytest

from visdet.command_line import CfgOptions
from visdet.option_values import option_value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (" 1e-3 ", 0.001),
        ("-3", -3),
        ("007", "007"),
        ("1_000", "1_000"),
        ("-inf", -math.inf),
        ("None", None),
        ("null", "null"),
        ("false", False),
        ('"True"', "True"),
        ("", ""),
        ("1,2", [1, 2]),
        ("(1,)", (1,)),
        ("(1,2),(3,4)", [(1, 2), (3, 4)]),
        (" [ (1, 2), [3 , None] ] ", [(1, 2), [3, None]]),
        ("['a b', c , (1, 2)]", ["a b", "c", (1, 2)]),
        ("['my, bolt','nut']", ["my, bolt", "nut"]),
        ("\"('a','b')\"", ("a", "b")),
        ("it's, x's", ["it's", "x's"]),
        ("a = b", "a = b"),
        ("/my data/the  set (1)/x", "/my data/the  set (1)/x"),
        ("(old) photos/x", "(old) photos/x"),
        ("'C:\\new'", "C:\\new"),
        ("http://h/p?a=1&b=2", "http://h/p?a=1&b=2"),
        ("a(b)", "a(b)"),
        ("dict()", {}),
        ("{'k': 1, n: [x]}", {"k": 1, "n": ["x"]}),
        ("[dict(type='MultiStepLR',milestones=[5])]", [{"type": "MultiStepLR", "milestones": [5]}]),
        ("dict(a=dict(b='x, y', c=(1, 2)), d=e/f)", {"a": {"b": "x, y", "c": (1, 2)}, "d": "e/f"}),
        ("photos#1", "photos#1"),
        ("/a/x,/b/y", ["/a/x", "/b/y"]),
    ],
)
def test_values(text, value):
    found = option_value(text)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dict(a, b)", "write dict"),
        ("dict(**x)", "write dict"),
        ("{1, 2}", "write dict"),
        ("[SGD(lr=1)]", r"'SGD\(lr=1\)': write dict\(type='NAME', key=value\)"),
        ("range(1, 2)", "write dict"),
        ("[1, 2", "close its brackets"),
        ("[(1, 2]", "close its brackets"),
        ("[/a/x, /b/y]", "put its texts into quotes"),
    ],
)
def test_what_is_no_value(text, message):
    with pytest.raises(ValueError, match=message):
        option_value(text)


def test_the_option_of_the_tools():
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--cfg-options", nargs="+", action=CfgOptions)
    given = parser.parse_args(["--cfg-options", "a=b=c", "x.y=True", "--cfg-options", "z= 1 "]).cfg_options
    assert given == {"a": "b=c", "x.y": True, "z": 1}
    for wrong in ("a", "=1", "a..b=1", ".a=1", "a=dict(b)"):
        with pytest.raises(argparse.ArgumentError, match=r"expected KEY=VALUE|cannot read"):
            parser.parse_args(["--cfg-options", wrong])
