"""Names in any script look different in every picture."""

import itertools

import numpy as np
import pytest
import torch
from mmengine.structures import InstanceData

from visdet.engine.log_curves import draw_curves
from visdet.structures import DetDataSample, fonts
from visdet.structures.fonts import legible
from visdet.visualization import DetLocalVisualizer
from visdet.visualization.driving_views import Scene, draw_frame

NAMES = [
    ("bolt", "nuts"), ("écrou", "ècrou"), ("болт", "гайк"), ("螺栓", "垫圈"), ("ボルト", "ナット"), ("나사", "너트"),
    ("برغي", "صامولة"), ("น็อต", "สกรู"), ("बोल्ट", "नट"), ("🔩", "🔧"), ("a\nb", "a\tb"), ("\U000e0001", "\ud800"),
]  # fmt: skip


@pytest.fixture(params=["fonts of this system", "none"], autouse=True)
def system_fonts(request, monkeypatch):
    """Without fonts of the system, matplotlib's own is the only one."""
    legible.cache_clear()
    monkeypatch.setattr(fonts, "_used", [])
    if request.param == "none":
        monkeypatch.setattr(fonts, "_system_fonts", list)
        monkeypatch.setattr(fonts, "_characters_of_the_system", set)
    yield
    legible.cache_clear()


def detections(name):
    visualizer = DetLocalVisualizer(vis_backends=None)
    visualizer.dataset_meta = {"classes": (name,), "palette": [(255, 0, 0)]}
    sample = DetDataSample(metainfo={"img_shape": (99, 400), "ori_shape": (99, 400)})
    sample.pred_instances = InstanceData(
        bboxes=torch.tensor([[60.0, 50, 300, 90]]), scores=torch.tensor([0.9]), labels=torch.tensor([0])
    )
    return visualizer.draw_sample(np.zeros((99, 400, 3), np.uint8), sample, draw_gt=False)[0]


def frame(name):
    scene = Scene(np.zeros((0, 9)), np.zeros(0, int))
    view = np.zeros((64, 128, 3), np.uint8)
    return draw_frame([view] * 2, [np.eye(4)] * 2, ["a", "b"], [name], truth=scene)


@pytest.mark.parametrize("draw", [detections, frame])
@pytest.mark.parametrize(("one", "other"), NAMES, ids=[ascii(name) for name, _ in NAMES])
def test_different_names_look_different(draw, one, other):
    assert not np.array_equal(draw(one), draw(other))


def test_names_with_a_common_beginning_look_different_in_the_legend():
    assert not np.array_equal(frame("construction_vehicle_large"), frame("construction_vehicle_small"))


def test_runs_look_different_in_curves(tmp_path):
    drawn = []
    for one, other in itertools.pairwise(["螺栓", "垫圈", "bolt"]):
        draw_curves({one: {"loss": {1: 2.0}}, other: {"loss": {1: 3.0}}}, str(tmp_path / "curves.png"))
        drawn.append((tmp_path / "curves.png").read_bytes())
    assert drawn[0] != drawn[1]


def test_what_is_drawn_and_the_warning_that_names_fonts(monkeypatch, capfd):
    monkeypatch.setattr(fonts, "_system_fonts", list)
    monkeypatch.setattr(fonts, "_characters_of_the_system", set)
    monkeypatch.setattr(fonts, "_warned", [])
    warnings = []
    monkeypatch.setattr(fonts, "print_log", lambda text, **options: warnings.append(text))
    texts = [legible(text)[0][0] for text in ("bolt 0.9", "螺栓 0.9", "a\nb", "垫")]
    assert texts == ["bolt 0.9", "U+87BA U+6813 0.9", "a U+000A b", "U+57AB"]
    assert len(warnings) == 1 and "'螺栓 0.9'" in warnings[0] and "fonts-noto-cjk" in warnings[0]


def test_a_font_of_the_system_that_has_the_characters_is_used(monkeypatch):
    """The font is one of matplotlib's own, which has a character of a script that DejaVu Sans Bold lacks."""
    own = set(fonts._opened(fonts._own_font()).get_charmap())
    other = fonts._own_font().replace("DejaVuSans-Bold", "DejaVuSansDisplay")
    other = other if set(fonts._opened(other).get_charmap()) - own else fonts._own_font().replace("-Bold", "")
    character = next(c for c in map(chr, set(fonts._opened(other).get_charmap()) - own) if c.isprintable())
    monkeypatch.setattr(fonts, "_system_fonts", lambda: [other])
    monkeypatch.setattr(fonts, "_characters_of_the_system", lambda: {ord(character)})
    assert legible(character) == ([character], other)
