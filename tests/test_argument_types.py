"""Arguments of configs are compared with the annotations of the class that is built."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import pytest

from visdet.checks.argument_types import converted_arguments
from visdet.errors import UserError
from visdet.registry import DATA_SAMPLERS, HOOKS, METRICS, MODELS, TRANSFORMS


class Base:
    def __init__(self, size: int = 1, mode: Literal["a", "b"] = "a") -> None:
        pass


class Example(Base):
    def __init__(
        self,
        needed: float,
        flag: bool = False,
        pair: float | tuple[int, int] | None = None,
        names: Sequence[str] = (),
        table: Mapping[str, float] | None = None,
        layer: dict | Base | None = None,
        function: Callable | None = None,
        anything: Any = None,
        **base: Any,
    ) -> None:
        super().__init__(**base)


Base.__init__.__module__ = Example.__init__.__module__ = Example.__module__ = "visdet.example"


@pytest.mark.parametrize(
    "arguments",
    [
        dict(needed=1),
        dict(needed=math.inf, flag=True, pair=[3, 4], names=["a"], table={"a": 1}),
        dict(needed=0.5, flag=1, pair=(3, 4), layer={"type": "x"}, function=max, size=3, mode="b"),
        dict(needed=0.5, pair=None, layer=Base(), anything=math.nan, names=(name for name in "ab")),
    ],
)
def test_what_fits(arguments):
    assert converted_arguments(Example, arguments) == arguments


class Counts(Base):
    def __init__(
        self,
        in_channels: int | list[int],
        num_heads: int = 8,
        num_cp: int = -1,
        num_fcs: int = 2,
    ) -> None:
        pass


Counts.__init__.__module__ = Counts.__module__ = "visdet.example"


def test_counts_are_not_negative_and_widths_are_positive():
    converted_arguments(Counts, dict(in_channels=[4, 8], num_heads=1, num_cp=-1, num_fcs=0))
    for key, value in (
        ("in_channels", 0),
        ("in_channels", [4, -1]),
        ("num_heads", 0),
        ("num_cp", -2),
        ("num_fcs", -1),
    ):
        with pytest.raises(UserError, match=f"Counts: {key} must be at least"):
            converted_arguments(Counts, {"in_channels": 4, key: value})


def test_whole_floats_become_integers():
    converted = converted_arguments(Example, dict(needed=1, pair=[3.0, 4], size=5.0))
    assert converted == dict(needed=1, pair=[3, 4], size=5)
    assert [type(converted["size"]), type(converted["pair"][0])] == [int, int]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(), r"Example\(\) missing a required argument: 'needed'"),
        (dict(needed="1e-3"), "Example: needed must be float, got '1e-3'"),
        (dict(needed=math.nan), "needed must be float, got nan"),
        (dict(needed=True), "needed must be float, got True"),
        (dict(needed=None), "needed must be float, got None"),
        (dict(needed=1, flag="False"), "flag must be bool, got 'False'"),
        (dict(needed=1, pair=(3, 4, 5)), r"pair must be float \| tuple\[int, int\] \| None, got \(3, 4, 5\)"),
        (dict(needed=1, pair=(3, 4.5)), "pair must be"),
        (dict(needed=1, pair=(3, "4")), "pair must be"),
        (dict(needed=1, names="abc"), r"names must be Sequence\[str\], got 'abc'"),
        (dict(needed=1, names=[1]), r"names must be Sequence\[str\], got \[1\]"),
        (dict(needed=1, table=[("a", 1)]), r"table must be Mapping\[str, float\] \| None"),
        (dict(needed=1, layer=3), "layer must be dict"),
        (dict(needed=1, size=2.5), "size must be int, got 2.5"),
        (dict(needed=1, mode="c"), r"mode must be Literal\['a', 'b'\], got 'c'"),
    ],
)
def test_what_does_not_fit(arguments, message):
    with pytest.raises(UserError, match=message):
        converted_arguments(Example, arguments)


def test_other_packages_are_left_alone():
    assert converted_arguments(dict, {"a": "1"}) == {"a": "1"}


@pytest.mark.parametrize(
    "registry, config, message",
    [
        (TRANSFORMS, dict(type="Resize", scale="320"), "Resize: scale must be float"),
        (TRANSFORMS, dict(type="Resize", scal=3), r"Resize\(\) got an unexpected keyword argument 'scal'"),
        (TRANSFORMS, dict(type="RandomFlip"), r"RandomFlip\(\) missing a required argument: 'prob'"),
        (
            TRANSFORMS,
            dict(type="VectorizeMap", roi_size="30", normalize=True),
            "VectorizeMap: roi_size must be",
        ),
        (TRANSFORMS, dict(type="PackDetInputs", meta_keys="img_id"), "PackDetInputs: meta_keys must be"),
        (TRANSFORMS, dict(type="NormalizeMultiviewImage", mean=1, std=[1, 1, 1]), "mean must be"),
        (TRANSFORMS, dict(type="PhotoMetricDistortion", contrast_range=0.5), "contrast_range must be tuple"),
        (
            TRANSFORMS,
            dict(type="RandomChoice", transforms=[[dict(type="RandomFlip", prob="0.5")]]),
            "RandomFlip: prob must be",
        ),
        (METRICS, dict(type="CocoMetric", proposal_nums=100), "CocoMetric: proposal_nums must be Sequence"),
        (DATA_SAMPLERS, dict(type="GroupInBatchSampler", skip_prob="0"), "skip_prob must be float, got '0'"),
        (HOOKS, dict(type="DetVisualizationHook", draw="yes"), "DetVisualizationHook: draw must be bool"),
        (MODELS, dict(type="MultiScaleDeformableAttention", embed_dims="256"), "embed_dims must be int"),
        (MODELS, dict(type="FocalLoss", gamma=None), "FocalLoss: gamma must be float, got None"),
    ],
)
def test_every_registry_checks(registry, config, message):
    with pytest.raises(UserError, match=message):
        registry.build(config)
