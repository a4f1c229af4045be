"""Docstrings of the public operators have the parts that CONTRIBUTING asks for."""

import inspect
import re

import pytest

from visdet import ops

FUNCTIONS = [name for name in ops.__all__ if inspect.isfunction(getattr(ops, name))]
# A definition in plain torch and a second name of a function refer to the docstring of the operator.
SECOND_NAMES = ("carafe_naive", "deformable_aggregation_function")
OPERATORS = [
    name
    for name in FUNCTIONS
    if not name.endswith("_reference") and name not in (*SECOND_NAMES, "register_nms")
]
# Arithmetic on coordinates, and tools.
WITHOUT_SOURCE = re.compile(r"abs_|rel_|normalize|denormalize|generate_grid|build_info|explain")


def docstring(name):
    return inspect.getdoc(getattr(ops, name)) or ""


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_say_first_what_they_return(name):
    first = docstring(name).split("\n\n")[0]
    assert first.startswith("Let " if name == "register_nms" else "Return "), first
    assert re.search(r"[.:]$|in O\(B \+ N\) memory", first), first


def descriptions(name):
    return dict(re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", docstring(name), re.MULTILINE))


@pytest.mark.parametrize("name", OPERATORS)
def test_every_argument_is_described_in_sentences(name):
    described = descriptions(name)
    arguments = list(inspect.signature(getattr(ops, name)).parameters)
    if len(arguments) > 1:
        assert [argument for argument in arguments if argument not in described] == []
    assert [text for text in described.values() if not text.endswith(".")] == []


@pytest.mark.parametrize("name", OPERATORS)
def test_help_gives_the_shapes_that_stand_beside_the_arguments(name):
    described = descriptions(name)
    signature = inspect.getsource(inspect.unwrap(getattr(ops, name))).split('"""')[0]
    for argument, shape in re.findall(r"^    (\w+): .*# (\[[^\]]*\])", signature, re.MULTILINE):
        assert described[argument].startswith(shape), argument


@pytest.mark.parametrize("name", [name for name in OPERATORS if not WITHOUT_SOURCE.match(name)])
def test_operators_name_their_source(name):
    assert re.search(r"^Source: .*\.$", docstring(name), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", [name for name in ops.__all__ if name not in FUNCTIONS])
def test_classes_have_a_docstring(name):
    assert docstring(name).split("\n\n")[0].endswith("."), docstring(name)
