"""The arguments of a class of visdet are compared with the annotations of its constructor, however it is built."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import pytest
import torch
from mmengine.registry import MODELS as ROOT_MODELS

from visdet.checks.arguments import (
    Above0,
    Count,
    Positive,
    Range,
    Share,
    check_constructor,
    check_texts,
    checked,
    checked_value,
)
from visdet.errors import UserError
from visdet.models import DINO, FocalLoss, L1Loss
from visdet.registry import (
    DATA_SAMPLERS,
    DATASETS,
    HOOKS,
    METRICS,
    MODELS,
    TASK_UTILS,
    TRANSFORMS,
    VISUALIZERS,
)


class Base:
    def __init__(self, size: int = 1, mode: Literal["a", "b"] = "a") -> None:
        self.size, self.mode = size, mode


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
        widths: Positive | list[Positive] = 1,
        seldom: "Unknown" = None,  # noqa: F821
        **base: Any,
    ) -> None:
        super().__init__(**base)
        self.given = dict(needed=needed, flag=flag, pair=pair, names=names, table=table, layer=layer)
        self.given |= dict(function=function, anything=anything, widths=widths)


Base.__module__ = Example.__module__ = "visdet.example"
check_constructor(Example)


@pytest.mark.parametrize(
    "arguments",
    [
        dict(needed=1, widths=[1, 2]),
        dict(needed=math.inf, flag=True, pair=[3, 4], names=["a"], table={"a": 1}),
        dict(needed=0.5, flag=1, pair=(3, 4), layer={"type": "x"}, function=max, widths=3),
        dict(needed=0.5, pair=None, layer=Base(), anything=math.nan, names=(name for name in "ab")),
    ],
)
def test_what_fits(arguments):
    built = Example(**arguments, size=3, mode="b", seldom="x")
    assert arguments.items() <= built.given.items() and (built.size, built.mode) == (3, "b")


def test_whole_floats_become_integers():
    built = Example(1, pair=[3.0, 4], size=5.0, widths=[2.0])
    assert built.given["pair"] == [3, 4] and built.size == 5
    assert [type(n) for n in (built.given["pair"][0], built.size, built.given["widths"][0])] == [
        int,
        int,
        int,
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(), r"Example\(\) missing a required argument: 'needed'"),
        (dict(needed=1, siez=2), "Example.* 'siez'; it accepts size, mode"),
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
        (dict(needed=1, table={"a": "b"}), "table must be"),
        (dict(needed=1, layer=3), "layer must be dict"),
        (dict(needed=1, widths=[1, 0]), r"widths must be int of 1 or more \| list\[int of 1 or more\], got"),
        (dict(needed=1, size=2.5), "Example: size must be int, got 2.5"),
        (dict(needed=1, mode="c"), r"mode must be 'a' or 'b', got 'c'"),
    ],
)
def test_what_does_not_fit(arguments, message):
    with pytest.raises(UserError, match=message):
        Example(**arguments)


@pytest.mark.parametrize(
    ("kind", "inside", "outside"),
    [
        (Count, [0, 7], [-1]),
        (Positive, [1], [0]),
        (Above0, [0.1, math.inf], [0, -1.0]),
        (Share, [0, 1, 0.5], [-0.1, 1.1, math.nan, "0.5"]),
        (Annotated[float, Range(0, 180, is_open=True)], [180], [0, 181]),
        (Positive | None, [None, 1], [0]),
    ],
)
def test_ranges(kind, inside, outside):
    assert [checked_value("x", value, kind) for value in inside] == inside
    for value in outside:
        with pytest.raises(UserError, match=r"x must be (int|float)"):
            checked_value("x", value, kind)


def test_a_function_checks_its_arguments_too():
    @checked
    def count(number: Positive, /, *rest: int, step: int = 1, **others: int) -> tuple:
        return number, rest, step, others

    assert count(3.0, "a", step=2, more="b") == (3, ("a",), 2, {"more": "b"})
    with pytest.raises(UserError, match="count: number must be int of 1 or more, got 0"):
        count(0)


def test_of_other_packages_only_texts_in_place_of_numbers_are_refused():
    def foreign(count: int, rate=0.1, name="x", *, pairs: list[int] = ()):
        pass

    check_texts(foreign, {"count": 1.5, "rate": None, "name": 3, "more": "a"})
    for given in ({"count": "1"}, {"rate": "2"}, {"pairs": ["3"]}):
        with pytest.raises(UserError, match=f"foreign: {next(iter(given))} must be"):
            check_texts(foreign, given)


def test_arguments_are_checked_whoever_constructs():
    class Own(FocalLoss):
        pass

    for build in (
        lambda: FocalLoss(gamma="2"),
        lambda: Own(gamma="2"),
        lambda: ROOT_MODELS.build(dict(type="visdet.FocalLoss", gamma="2")),
        lambda: DINO(dn_cfg=3),
    ):
        with pytest.raises(UserError, match=r"(FocalLoss|Own): gamma must be float|DINO: dn_cfg must be"):
            build()


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
        (
            TRANSFORMS,
            dict(type="RandomChoice", transforms=[[dict(type="RandomFlip", prob="0.5")]]),
            "RandomFlip: prob must be",
        ),
        (METRICS, dict(type="CocoMetric", proposal_nums=100), "CocoMetric: proposal_nums must be Sequence"),
        (DATA_SAMPLERS, dict(type="GroupInBatchSampler", skip_prob="0"), "skip_prob must be float, got '0'"),
        (HOOKS, dict(type="DetVisualizationHook", draw="yes"), "DetVisualizationHook: draw must be bool"),
        (MODELS, dict(type="FocalLoss", gamma=None), "FocalLoss: gamma must be float, got None"),
        # Arguments of mmdet that would change something.
        (TRANSFORMS, dict(type="Mosaic", img_scale=3), "Mosaic: size must be tuple"),
        (
            TRANSFORMS,
            dict(type="Mosaic", img_scale=(3, 3), size=(3, 3)),
            "img_scale and size, which are the same",
        ),
        (TRANSFORMS, dict(type="Mosaic", size=(3, 3), center_ratio_range=(0, 1)), "between 0.3 and 0.7"),
        (TRANSFORMS, dict(type="MixUp", ratio_range=(0.5, 1.5)), r"write share=\(least, most\)"),
        (TRANSFORMS, dict(type="LoadAnnotations", with_seg=True), "with_seg must be False.* got True"),
        (MODELS, dict(type="DetDataPreprocessor", batch_augments=[]), "batch_augments must be None"),
        (MODELS, dict(type="CrossEntropyLoss", ignore_index=255), "ignore_index must be None"),
        (MODELS, dict(type="ResNet", depth=18, dcn=dict(type="DCN")), "dcn must be None"),
        (TASK_UTILS, dict(type="HungarianAssigner", cls_cost={}), r"write match_costs=\[dict"),
    ],
)
def test_every_registry_checks(registry, config, message):
    with pytest.raises(UserError, match=message):
        registry.build(config)


@pytest.mark.parametrize(
    "registry, config",
    [
        (TRANSFORMS, dict(type="Mosaic", img_scale=(64, 48), bbox_clip_border=True, pad_val=114.0)),
        (TRANSFORMS, dict(type="MixUp", flip_ratio=0, pad_val=114.0, max_iters=15)),
        (TRANSFORMS, dict(type="LoadAnnotations", with_seg=False, poly2mask=True, box_type="hbox")),
        (MODELS, dict(type="DetDataPreprocessor", pad_seg=False, seg_pad_value=255, batch_augments=None)),
        (MODELS, dict(type="CrossEntropyLoss", ignore_index=None, avg_non_ignore=False)),
        (METRICS, dict(type="CocoMetric", sort_categories=False, use_mp_eval=True)),
        (TRANSFORMS, dict(type="FilterAnnotations", by_box=True, by_mask=False, min_gt_mask_area=1)),
        (TRANSFORMS, dict(type="RandomFlip", prob=0.5, swap_seg_labels=None)),
        (MODELS, dict(type="ChannelMapper", in_channels=[8], out_channels=8, conv_cfg=None)),
        (MODELS, dict(type="ResNet", depth=18, base_channels=4, deep_stem=False, stage_with_dcn=[False] * 4)),
        (
            MODELS,
            dict(
                **dict(type="SwinTransformer", embed_dims=4, depths=(1,), num_heads=(1,), strides=(4,)),
                **dict(out_indices=(0,), use_abs_pos_embed=False, pretrained=None),
            ),
        ),
        (TASK_UTILS, dict(type="FocalLossCost", binary_input=False)),
        (DATASETS, dict(type="CocoDataset", lazy_init=True, seg_map_suffix=".png", proposal_file=None)),
        (HOOKS, dict(type="DetVisualizationHook", backend_args=None)),
        (VISUALIZERS, dict(type="DetLocalVisualizer", bbox_color=None, alpha=0.8)),
    ],
)
def test_arguments_of_mmdet_without_effect_here_are_accepted(registry, config):
    built = registry.build(config)
    assert type(built).__name__ == config["type"]
    assert getattr(built, "size", (64, 48)) == (64, 48)


def test_a_reduction_that_is_none_is_refused():
    with pytest.raises(
        UserError, match="L1Loss: reduction_override must be 'none' or 'mean' or 'sum', got True"
    ):
        L1Loss()(torch.ones(2, 4), torch.ones(2, 4), reduction_override=True)
