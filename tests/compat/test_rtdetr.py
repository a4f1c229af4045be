"""The deformable attention of the sources of RT-DETR, D-FINE and DEIM, by copies of their modules' interface."""

import importlib
import sys

import pytest
import torch
from torch.testing import assert_close

from tests.fuzz.problem import generator_of
from visdet.compat import _bridge, rtdetr
from visdet.compat._counts import CALLS

pytest.importorskip("transformers")

SHAPES, POINTS = [(4, 3), (2, 5)], [3, 1]
SOURCE = """
import torch
from transformers.models.rt_detr_v2.modeling_rt_detr_v2 import multi_scale_deformable_attention_v2 as stock

def deformable_attention_core_func(value, value_spatial_shapes, sampling_locations, attention_weights):
    L, P = sampling_locations.shape[3:5]
    samples = sampling_locations.flatten(3, 4), attention_weights.flatten(3, 4)
    return FACTOR * stock(value, value_spatial_shapes, *samples, [P] * L)

def deformable_attention_core_func_v2(
    value, value_spatial_shapes, sampling_locations, attention_weights, num_points_list, method="default"OPTION
):
    if not torch.is_tensor(value):
        value = torch.cat(tuple(value), -1).permute(0, 3, 1, 2)
    samples = sampling_locations, attention_weights, num_points_list
    return FACTOR * stock(value, value_spatial_shapes, *samples, method)
"""


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """Return a function that writes a module, imports it, and removes it from ``sys.modules`` at the end."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(name, option="", factor="1"):
        path = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(SOURCE.replace("OPTION", option).replace("FACTOR", factor))
        importlib.invalidate_caches()
        return importlib.import_module(name)

    yield write
    rtdetr.uninstall()
    for name in [name for name in sys.modules if name.partition(".")[0] in ("src", "engine")]:
        del sys.modules[name]


def problem(points):
    rows, samples = sum(h * w for h, w in SHAPES), sum(points)
    draw = generator_of(0)
    value = torch.rand(2, rows, 2, 4, generator=draw)
    levels = [level.permute(0, 2, 3, 1) for level in value.split([12, 10], 1)]
    locations = torch.rand(2, 7, 2, samples, 2, generator=draw) * 1.4 - 0.2
    return value, levels, locations, torch.rand(2, 7, 2, samples, generator=draw)


@pytest.mark.parametrize(
    ("name", "option"),
    [("src.zoo.dfine.utils", ""), ("engine.deim.utils", ", value_shape='default'")],
    ids=["D-FINE", "DEIM"],
)
def test_values_of_one_tensor_and_of_levels(sources, name, option):
    rtdetr.install()
    module = sources(name, option)
    attend, stock = module.deformable_attention_core_func_v2, module.stock
    value, levels, *samples = problem(POINTS)
    for method, visdet_calls in (("default", 2), ("discrete", 0)):
        expected, before = stock(value, SHAPES, *samples, POINTS, method), CALLS["ms_deform_attn"]
        named = {"value_shape": "reshape"} if option else {}
        assert_close(attend(value, SHAPES, *samples, POINTS, method=method, **named), expected)
        assert_close(attend(tuple(levels), SHAPES, *samples, POINTS, method=method), expected)
        assert CALLS["ms_deform_attn"] - before == visdet_calls
    value, _, *samples = problem([2, 2])
    found = module.deformable_attention_core_func(value, SHAPES, *(x.unflatten(3, (2, 2)) for x in samples))
    assert_close(found, stock(value, SHAPES, *samples, [2, 2]))
    rtdetr.uninstall()
    assert module.deformable_attention_core_func_v2.__code__.co_filename == module.__file__


def test_another_computation_and_an_unknown_option_are_left_to_the_sources(sources):
    rtdetr.install()
    with pytest.warns(_bridge.CompatWarning, match="in RT-DETR .* computes something else") as warned:
        other = sources("src.zoo.rtdetr.utils", factor="2")
    assert len(warned) == 2
    module = sources("src.zoo.rtdetrv3.utils", ", more=1")
    value, _, *samples = problem(POINTS)
    before, expected = CALLS["ms_deform_attn"], module.stock(value, SHAPES, *samples, POINTS)
    found = other.deformable_attention_core_func_v2(value, SHAPES, *samples, POINTS)
    assert torch.equal(found, 2 * expected)
    found = module.deformable_attention_core_func_v2(value, SHAPES, *samples, POINTS, more=2)
    assert torch.equal(found, expected) and CALLS["ms_deform_attn"] == before
