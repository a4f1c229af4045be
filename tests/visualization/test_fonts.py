"""Names in any script look different in every picture."""

import numpy as np
import pytest
import torch
from mmengine.structures import InstanceData

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
    if request.param == "none":
        monkeypatch.setattr(fonts, "_system_fonts", list)
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


def test_what_is_drawn_and_the_warning_that_names_fonts(monkeypatch, logged, capfd):
    monkeypatch.setattr(fonts, "_system_fonts", list)
    monkeypatch.setattr(fonts, "_warned", [])
    warnings = logged(fonts)
    texts = [legible(text)[0][0] for text in ("bolt 0.9", "螺栓 0.9", "a\nb", "垫")]
    assert texts == ["bolt 0.9", "U+87BA U+6813 0.9", "a U+000A b", "U+57AB"]
    assert len(warnings) == 1 and "'螺栓 0.9'" in warnings[0] and "fonts-noto-cjk" in warnings[0]
