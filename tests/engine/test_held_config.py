"""A checkpoint is whole: it holds the config, and reading that runs no code."""

import os

import pytest
import torch
from toy_run import PIPELINE, detector_of, train

import visdet
from visdet.commands import main
from visdet.engine import CheckpointError, Detector, load_config, read_checkpoint
from visdet.engine.checkpoints.held_config import config_of, names_checkpoint
from visdet.engine.config.text import config_text

SHAPES = "deformable_detr/deformable-detr_shapes"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A checkpoint whose config imports a module of the user's."""
    folder = tmp_path_factory.mktemp("trained")
    split = {"test_dataloader__dataset__pipeline": PIPELINE}
    train(folder, train_cfg__max_iters=10, **split)
    return folder / "best.pth"


def held(text):
    return {"meta": {"cfg": text}}


def test_a_config_comes_back_as_it_was_trained():
    cfg, _ = load_config(SHAPES)
    text = config_text({**cfg.to_dict(), "load_from": "x.pth", "trust_checkpoint": True})
    back = config_of({"meta": {"cfg": text, "experiment_name": "shapes_20261129_111111"}}, "a/b.pth")
    assert back.filename == "shapes.py" and "load_from" not in back and "trust_checkpoint" not in back
    expected = {
        key: value for key, value in cfg.to_dict().items() if key not in ("load_from", "work_dir", "resume")
    }
    assert back.to_dict() == expected


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (
            "x = dict(a=-1, b=(1,), c=float('-inf'), d={'e f': [None, True]})",
            {"a": -1, "b": (1,), "c": -torch.inf, "d": {"e f": [None, True]}},
        ),
        ("import os\n_base_ = []\nx = dict({1: 2}, a=1e-3)", {1: 2, "a": 1e-3}),
        ("default_scope = 'mmdet'\nx = dict(type='mmdet.DINO')", {"type": "DINO"}),
        ("x = dict(type='mmdet.models.detectors.DINO')", {"type": "DINO"}),
    ],
)
def test_values_of_several_writers_are_read(text, value):
    assert config_of(held(text), "a.pth").x == value


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("x = __import__('os').system('touch ran')", r"x = __import__\('os'\)"),
        ("import os\nos.system('touch ran')", r"os\.system"),
        ("x = [item for item in (1, 2)]", "x = "),
        ("import os\nx = dict(type=os.system)", r"os\.system"),
        ("x = dict(type='os.system', command='touch ran')", r"x\.type='os\.system'"),
        ("x = dict(type='this')", r"x\.type='this'"),
        ("x = dict(type='visdet.this')", r"x\.type='visdet\.this'"),
        ("optim_wrapper = dict(constructor='subprocess.run')", r"optim_wrapper\.constructor"),
        ("runner_type = 'os.abort'", "runner_type"),
        ("default_scope = 'antigravity'", "default_scope"),
        ("custom_imports = dict(imports=['a.b'])", r"custom_imports a\.b"),
    ],
)
def test_code_in_a_config_is_named_and_not_run(text, named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=f"runs code: .*{named}.*trust_checkpoint=True"):
        config_of(held(text), "a.pth")
    assert os.listdir() == []


def test_a_checkpoint_without_a_config_says_what_to_give():
    for content in ({}, {"meta": None}, held(""), held({"a": 1})):
        with pytest.raises(CheckpointError, match=r"a\.pth holds no config\. Give the one"):
            config_of(content, "a.pth")
    with pytest.raises(CheckpointError, match="cannot be read"):
        config_of(held("x = ("), "a.pth")


def test_what_names_a_checkpoint(tmp_path, monkeypatch):
    names = ("a.pth", "b.safetensors", "https://a/b", "dino-4scale_r50_coco", tmp_path / "c.pt")
    assert all(map(names_checkpoint, names))
    assert not any(map(names_checkpoint, (SHAPES, "my_config.py", "photos", None, 3)))


def test_one_file_infers_tests_and_is_trained_on(tmp_path, checkpoint, stdout, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="custom_imports toy_detection"):
        visdet.init_detector(checkpoint)
    trusted = {"trust_checkpoint": True}
    cfg, _ = load_config(checkpoint, trusted)
    detector = Detector(cfg, checkpoint, "cpu")
    assert detector.dataset_meta["classes"] == ("dark", "bright")
    metrics = visdet.evaluate(checkpoint, None, trusted, work_dir=tmp_path / "test")
    assert metrics["toy/images"] == 13
    assert "differs" not in stdout()
    results = [
        visdet.train(None, {**trusted, "train_cfg.max_iters": 10}, from_=checkpoint, work_dir="run")
        for _ in range(2)
    ]
    assert [result.work_dir for result in results] == [str(tmp_path / "run"), str(tmp_path / "run_2")]
    assert "run holds another run" in stdout()


def test_a_config_that_is_given_wins_and_the_difference_is_said(tmp_path, checkpoint, stdout):
    content = read_checkpoint(checkpoint)
    content["meta"]["cfg"] = content["meta"]["cfg"].replace("toy_detection", "")
    content["meta"]["cfg"] = content["meta"]["cfg"].replace("custom_imports", "other")
    torch.save(content, tmp_path / "plain.pth")
    steps = [PIPELINE[0], {"type": "Resize", "scale": (16, 16)}, PIPELINE[2]]
    detector_of(tmp_path, tmp_path / "plain.pth", test_dataloader__dataset__pipeline=steps)
    told = " ".join(stdout().split())
    assert "differs from that of" in told and "pipeline.1.type is 'Resize' (there 'LoadAnnotations')" in told


def test_best_and_last_are_always_there(tmp_path):
    none = tmp_path / "none"
    none.mkdir()
    (none / "last.pth.partial").symlink_to("gone.pth")  # as a run that was killed leaves it
    train(
        none,
        val_cfg=None,
        val_dataloader=None,
        val_evaluator=None,
        train_cfg__max_iters=4,
        default_hooks__checkpoint={"type": "CheckpointHook", "interval": 2, "max_keep_ckpts": 1},
    )
    for name in ("best.pth", "last.pth"):
        assert os.readlink(none / name) == "iter_4.pth"
    best = tmp_path / "best"
    best.mkdir()
    last = best / "last.pth"
    last.write_text("of the user")
    train(best, train_cfg__max_iters=10)
    assert os.readlink(best / "best.pth") == "best_toy_accuracy_iter_10.pth"
    assert last.read_text() == "of the user"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["infer", "a.pth"], "required: images"),
        (["infer", SHAPES], "required: checkpoint, images"),
        (["test", SHAPES], "required: checkpoint"),
        (["test", "a.pth", "b.pth"], "unrecognized arguments: b.pth"),
        (["test", "a.pth", "--nonsense", "3"], "unrecognized arguments: --nonsense 3"),
        (["infer", "a.pth", "b.jpg", "--score-threshold=3"], "=3; did you mean '--score-thr'?"),
        (["test", "a.pth", "--imgsz=640"], "for --imgsz write the scale of Resize"),
    ],
)
def test_wrong_arguments_are_told(arguments, message, capsys):
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err
