"""benchmarks.transforms: what is timed is what a pipeline does."""

import json

import pytest

pytest.importorskip("mmengine", reason="the extra train is not installed")

from benchmarks.transforms import SIZE, draw_photographs, main, measure, race, torchvision_counterparts

PIPELINE = [
    dict(type="LoadImageFromFile"),
    dict(type="LoadAnnotations", with_bbox=True),
    dict(type="RandomFlip", prob=0.5),
    dict(
        type="RandomChoice",
        transforms=[
            [dict(type="RandomChoiceResize", scales=[(60, 200)], keep_ratio=True)],
            [
                dict(type="RandomChoiceResize", scales=[(80, 200)], keep_ratio=True),
                dict(type="RandomCrop", crop_type="absolute_range", crop_size=(40, 60)),
            ],
        ],
    ),
    dict(type="PackDetInputs"),
]


def test_every_transform_is_timed_on_what_the_one_before_it_left(tmp_path):
    rows = race(PIPELINE, draw_photographs(tmp_path, [SIZE] * 2))
    assert [row["transform"] for row in rows] == [
        "LoadImageFromFile",
        "LoadAnnotations",
        "RandomFlip",
        "RandomChoiceResize",
        "RandomCrop",
        "PackDetInputs",
        "the whole pipeline",
    ]
    assert all(row["visdet"] > 0 for row in rows)
    assert [row["transform"] for row in rows if "torchvision" in row] == [
        "LoadImageFromFile",
        "RandomFlip",
        "RandomChoiceResize",
        "RandomCrop",
    ]


def test_the_counterparts_do_the_same(tmp_path):
    from visdet.registry import TRANSFORMS

    (sample,) = draw_photographs(tmp_path, [SIZE] * 1)
    for settings in PIPELINE[:2]:
        sample = TRANSFORMS.build(dict(settings))(sample)
    decoded = torchvision_counterparts(PIPELINE[0])(sample)
    assert decoded.shape == sample["img"].shape == (3, 480, 640)
    resized, boxes = torchvision_counterparts(PIPELINE[3]["transforms"][0][0])(sample)
    ours = TRANSFORMS.build(dict(PIPELINE[3]["transforms"][0][0]))(dict(sample))
    assert resized.shape == ours["img"].shape == (3, 60, 80)
    assert (boxes - ours["gt_bboxes"]).abs().max() < 0.1


def test_a_sample_that_is_given_up_is_timed_and_left_out():
    pace, results = measure(
        lambda sample: sample if sample["keep"] else None, [{"keep": True}, {"keep": False}]
    )
    assert pace > 0 and results == [{"keep": True}]


def test_the_command_writes_a_report(tmp_path, capsys):
    config = tmp_path / "config.py"
    config.write_text(f"train_pipeline = {PIPELINE[:2]}\n")
    assert main([str(config), "--images", "1", "--out", str(tmp_path / "out")]) == 0
    report = json.loads((tmp_path / "out" / "transforms.json").read_text())
    assert [row["transform"] for row in report["results"]][-1] == "the whole pipeline"
    assert "LoadAnnotations" in capsys.readouterr().out
