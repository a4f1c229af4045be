"""Which errors become one message, and which keep their traceback."""

import json

import pytest
import torch
from toy_run import toy_config

from visdet.engine import ConfigError, UserError, build_runner, tool_session
from visdet.engine.errors import explain, nearest_names


def explained(tmp_path, **options) -> str | None:
    """Return what a user reads when a run with these options fails."""
    with pytest.raises(Exception) as caught:
        build_runner(toy_config(tmp_path, **options)).train()
    return explain(caught.value)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (
            {"model__chanels": 3},
            ["ToyDetector does not know the keyword 'chanels'. Did you mean 'channels'?", "explode_at"],
        ),
        (
            {"train_dataloader__batchsize": 3},
            ["DataLoader does not know the keyword 'batchsize'", "'batch_size'"],
        ),
        (
            {"train_cfg__max_iter": 3},
            ["IterBasedTrainLoop does not know the keyword 'max_iter'", "'max_iters'"],
        ),
        (
            {"train_cfg": {"_delete_": True, "max_iter": 3}},
            ["EpochBasedTrainLoop does not know the keyword 'max_iter'", "max_epochs"],
        ),
        (
            {"default_hooks__checkpoint__max_keep": 3},
            ["CheckpointHook does not know the keyword 'max_keep'", "'max_keep_ckpts'"],
        ),
        (
            {"optim_wrapper__optimizer__weight_deacy": 3},
            ["AdamW does not know the keyword 'weight_deacy'. Did you mean 'weight_decay'?"],
        ),
        (
            {"train_dataloader__dataset__cuont": 3},
            ["ToyBoxes does not know the keyword 'cuont'", "'count'", "ann_file"],
        ),
        (
            {"param_scheduler__0__strat_factor": 3},
            ["does not know the keyword 'strat_factor'", "'start_factor'"],
        ),
        (
            {"model__type": "ToyDetecter"},
            ["'ToyDetecter' is not in the visdet::model registry", "'ToyDetector'"],
        ),
        ({"val_evaluator__type": "ToyAcuracy"}, ["'ToyAcuracy' is not in the visdet::metric registry"]),
        (
            {"default_hooks__logger__interval": -5},
            ["interval must be greater than 0", "while building LoggerHook"],
        ),
    ],
)
def test_mistakes_in_a_config(tmp_path, options, parts):
    message = explained(tmp_path, **options)
    for part in parts:
        assert part in message
    assert "Traceback" not in message


def test_classes_that_do_not_fit_the_head(tmp_path):
    message = explained(tmp_path, model__num_classes=80)
    assert message.startswith(
        "model.bbox_head.num_classes is 80, but train_dataloader.dataset (ToyBoxes) has 2 classes (dark, bright). "
        "Set model.bbox_head.num_classes=2"
    )


def test_classes_of_the_validation_set_are_compared_too(tmp_path):
    message = explained(tmp_path, val_dataloader__dataset__metainfo={"classes": ("a", "b", "c")})
    assert "val_dataloader.dataset (ToyBoxes) has 3 classes (a, b, c)" in message


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_corrupt_image_is_named(tmp_path, num_workers):
    content = {
        "images": [{"id": 1, "file_name": "bad.jpg", "height": 32, "width": 32}],
        "annotations": [
            {"id": 1, "image_id": 1, "category_id": 5, "bbox": [2, 2, 9, 9], "iscrowd": 0, "area": 81}
        ],
        "categories": [{"id": 5, "name": "dark"}, {"id": 6, "name": "bright"}],
    }
    (tmp_path / "coco.json").write_text(json.dumps(content))
    (tmp_path / "bad.jpg").write_bytes(b"\xff\xd8\xff\xe0 cut short")
    dataset = {
        "_delete_": True,
        "type": "CocoDataset",
        "data_root": str(tmp_path),
        "ann_file": "coco.json",
        "metainfo": {"classes": ("dark", "bright")},
        "pipeline": [{"type": "LoadImageFromFile"}, {"type": "LoadAnnotations"}, {"type": "PackDetInputs"}],
    }
    message = explained(
        tmp_path, train_dataloader__dataset=dataset, train_dataloader__num_workers=num_workers
    )
    assert f"cannot read image {tmp_path}/bad.jpg" in message and "Traceback" not in message


def test_bugs_keep_their_traceback():
    def broken():
        return torch.ones(2) + torch.ones(3)

    with pytest.raises(RuntimeError) as caught:
        broken()
    assert explain(caught.value) is None
    with pytest.raises(TypeError) as caught:
        broken(wrong=1)
    assert explain(caught.value) is None, "a wrong call in code is nobody's config"
    assert explain(KeyError("x")) is None


def test_a_session_prints_one_message_and_exits(capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as caught, tool_session():
        raise UserError("the message")
    assert caught.value.code == 1
    assert capsys.readouterr().err == "error: the message\n"
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(SystemExit), tool_session():
        raise ConfigError("of one rank")
    assert capsys.readouterr().err == "error (rank 3): of one rank\n"


def test_a_session_lets_bugs_through_and_tracebacks_on_request(monkeypatch):
    with pytest.raises(ZeroDivisionError), tool_session():
        _ = 1 / 0
    monkeypatch.setenv("VISDET_TRACEBACK", "1")
    with pytest.raises(UserError), tool_session():
        raise UserError("x")


def test_a_session_answers_an_interrupt(capsys):
    with pytest.raises(SystemExit) as caught, tool_session():
        raise KeyboardInterrupt
    assert caught.value.code == 130
    assert "--resume" in capsys.readouterr().err


def test_nearest_names():
    assert nearest_names("bbox_haed", ["backbone", "bbox_head", "neck"])[0] == "bbox_head"
    assert nearest_names("zzz", ["backbone"]) == []
