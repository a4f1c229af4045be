"""benchmarks.transforms: what is timed is what a pipeline does."""

import pytest

pytest.importorskip("mmengine", reason="the extra train is not installed")

from json_files import read_json

from benchmarks.transforms import SIZE, draw_photographs, main, measure, race

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
    assert all(row["pace"] > 0 for row in rows)


def test_a_sample_that_is_given_up_is_timed_and_left_out():
    pace, results = measure(
        lambda sample: sample if sample["keep"] else None, [{"keep": True}, {"keep": False}]
    )
    assert pace > 0 and results == [{"keep": True}]


def test_the_command_writes_a_report(tmp_path, stdout):
    config = tmp_path / "config.py"
    config.write_text(f"train_pipeline = {PIPELINE[:2]}\n")
    assert main([str(config), "--images", "1", "--out", str(tmp_path / "out")]) == 0
    report = read_json(tmp_path / "out" / "transforms.json")
    assert [row["transform"] for row in report["results"]][-1] == "the whole pipeline"
    assert "LoadAnnotations" in stdout()
