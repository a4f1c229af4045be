"""What ``visdet inspect`` says of checkpoints and exported folders."""

import pytest
import torch
from json_files import write_json

from visdet.commands import main
from visdet.commands.inspect import checkpoint_rows
from visdet.engine import UserError, load_config
from visdet.engine.config.text import config_text


@pytest.fixture
def content():
    cfg, _ = load_config("dino/dino_shapes")
    meta = {
        "cfg": config_text(cfg.to_dict()),
        "iter": 30,
        "epoch": 0,
        "experiment_name": "mine_20261129_000000",
    }
    meta |= {"dataset_meta": {"classes": ("nut", "bolt")}, "category_ids": [7, 9]}
    return {"meta": {**meta, "score_thresholds": {"nut": 0.25}}, "state_dict": {"a": torch.zeros(3, 4)}}


def test_a_checkpoint_is_described(content, tmp_path, stdout):
    torch.save(content, tmp_path / "a.pth")
    main(["inspect", str(tmp_path / "a.pth")])
    said = stdout()
    for part in (
        "1 tensors, 12 numbers",
        "30 iterations",
        "2: nut (7), bolt (9)",
        "(the checkpoint's validation): nut 0.25",
        "mine.py, model DINO",
        "LoadImageFromFile(channel_order='rgb')",
        "DetDataPreprocessor(",
        "no, it holds no state of an optimizer",
    ):
        assert part in said
    assert "None" not in said


@pytest.mark.parametrize(
    ("change", "row", "text"),
    [
        ({"cfg": None}, "config", "holds no config"),
        ({"cfg": "custom_imports = dict(imports=['mine'])"}, "config", "custom_imports mine"),
        ({"score_thresholds": None}, "thresholds", "no validation has measured them"),
        ({"category_ids": None}, "classes", "2: nut, bolt"),
    ],
)
def test_what_a_checkpoint_lacks_is_said(content, change, row, text):
    content["meta"].update(change)
    shown = str(checkpoint_rows(content, "a.pth")[row])
    assert text in shown and not shown.rstrip().endswith(":")
    assert "weights" in checkpoint_rows({"a": torch.zeros(2)}, "a.pth")


def test_an_exported_folder_is_described(tmp_path, stdout):
    record = {"format": "onnx", "classes": ["nut"], "inputs": [{"name": "images"}], "limits": {"a": 1}}
    write_json(tmp_path / "model.json", record)
    main(["inspect", str(tmp_path)])
    said = stdout()
    assert all(part in said for part in ("format       onnx", "['nut']", "a=1", "files        model.json"))


@pytest.mark.parametrize(
    ("text", "message"), [(None, "has no model.json"), ("{", "cannot be read"), ("3", "cannot")]
)
def test_a_folder_of_something_else_is_one_message(text, message, tmp_path, capsys):
    (tmp_path / "best.pth").touch()
    if text is not None:
        (tmp_path / "model.json").write_text(text)
    with pytest.raises(SystemExit):
        main(["inspect", str(tmp_path)])
    assert message in capsys.readouterr().err
    with pytest.raises(UserError, match="holds no weights"):
        checkpoint_rows({}, "a.pth")
