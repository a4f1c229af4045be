"""Which errors become one message, and which keep their traceback."""

import errno
import os
import re
import signal
import time
import traceback
from http.client import HTTPException
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from json_files import write_json
from toy_detection import ToyBoxes
from toy_run import error_of, toy_config

from visdet.engine import ConfigError, UserError, build_runner, tool_session
from visdet.engine.checkpoints.checkpoint import register_checkpoint_readers
from visdet.engine.errors import explain
from visdet.engine.hooks import NumClassCheckHook, num_class_check_hook
from visdet.engine.hooks.num_class_check_hook import _compare_lists
from visdet.errors import hints_of
from visdet.registry import MODELS, TRANSFORMS


def explained(tmp_path, **options) -> str | None:
    """Return what a user reads when a run with these options fails."""
    return explain(error_of(tmp_path, **options))


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({"model__channels": -1}, "in the config: model"),
        ({"train_dataloader__dataset__count": None}, "in the config: train_dataloader.dataset"),
    ],
)
def test_an_error_of_somebody_elses_code_keeps_its_traceback_and_names_the_place(tmp_path, options, place):
    error = error_of(tmp_path, **options)
    assert explain(error) is None and place in hints_of(error)


@TRANSFORMS.register_module()
class BrokenTransform:
    """A user's transform with a bug: an error of the named kind."""

    def __init__(self, error: str) -> None:
        self.error = error

    def __call__(self, results):
        raise {"AttributeError": AttributeError, "KeyError": KeyError, "ValueError": ValueError}[self.error](
            "x"
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"optim_wrapper__optimizer": {"type": "MuonWithAuxAdam", "learning_rate": 4}},
            r"optimizer: MuonWithAuxAdam\(\) .* 'learning_rate'; it accepts params, lr, momentum.*, betas",
        ),
        (
            {"optim_wrapper__optimizer": {"type": "SGD", "momentun": 1}},
            r"optimizer: SGD\(\) .*'momentun'; did you mean momentum",
        ),
        (
            {"train_dataloader__batchsize": 4},
            r"train_dataloader: DataLoader\(\) .*'batchsize'; did you mean batch_size",
        ),
    ],
)
def test_an_unknown_keyword_names_the_class_and_what_it_takes(tmp_path, options, message):
    assert re.search(message, explained(tmp_path, **options))


def test_data_sets_of_a_run_name_the_same_classes(tmp_path):
    message = explained(tmp_path, val_dataloader__dataset__metainfo={"classes": ("bright", "dark")})
    for part in ("train_dataloader.dataset", "val_dataloader.dataset", "label 0", "'dark'", "'bright'"):
        assert part in message


READ = {"type": "LoadImageFromFile"}


def test_data_sets_of_a_run_have_one_order_of_channels(tmp_path):
    train, val = (
        coco_dataset(tmp_path, [{"type": "RandomChoice", "transforms": [[READ | {"channel_order": order}]]}])
        for order in ("bgr", "rgb")
    )
    message = explained(tmp_path, train_dataloader__dataset=train, val_dataloader__dataset=val)
    assert "'bgr': 'train_dataloader.dataset', 'rgb': 'val_dataloader.dataset'" in message
    later = {"type": "PipelineSwitchHook", "switch_iter": 3, "switch_pipeline": [READ]}
    message = explained(tmp_path, train_dataloader__dataset=val, custom_hooks=[later])
    assert "'bgr': 'custom_hooks', 'rgb': 'train_dataloader.dataset'" in message
    del train["_delete_"], val["_delete_"]
    both = {"_delete_": True, "type": "ConcatDataset", "datasets": [train, val]}
    assert "the channels of the images differ" in explained(tmp_path, train_dataloader__dataset=both)


def test_validation_leaves_pixels_where_the_boxes_are(tmp_path):
    flipped = coco_dataset(tmp_path, [READ, {"type": "RandomFlip", "prob": 0.5}])
    message = explained(tmp_path, val_dataloader__dataset=flipped)
    assert message.startswith("val_dataloader.dataset.pipeline has RandomFlip, which moves pixels")


def test_what_may_be_a_mistake_is_told_before_a_run(logged):
    boxes, metric = SimpleNamespace(most_boxes=9), SimpleNamespace(ann_file="val.json")
    repeated = SimpleNamespace(dataset=boxes)
    tested = SimpleNamespace(ann_file="relabelled.json")
    loops = {
        "_train_loop": SimpleNamespace(dataloader=SimpleNamespace(dataset=repeated)),
        "_val_loop": None,
        "_test_loop": SimpleNamespace(
            dataloader=SimpleNamespace(dataset=tested), evaluator=SimpleNamespace(metrics=[metric])
        ),
    }
    model = torch.nn.Module()
    model.num_queries = 8
    said = logged(num_class_check_hook, "warn")
    NumClassCheckHook().before_run(SimpleNamespace(hooks=[], model=model, **loops))
    assert said == [
        "an image of train_dataloader.dataset has 9 boxes, but model.num_queries is 8",
        "test_dataloader.dataset reads relabelled.json, but SimpleNamespace compares with val.json",
    ]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("error", ["AttributeError", "KeyError", "ValueError"])
def test_a_bug_in_a_users_transform_keeps_its_traceback(tmp_path, error, num_workers):
    dataset = coco_dataset(tmp_path, [{"type": "BrokenTransform", "error": error}])
    options = {"train_dataloader__dataset": dataset, "train_dataloader__num_workers": num_workers}
    found = error_of(tmp_path, **options)
    assert explain(found) is None and type(found).__name__ == error
    shown = "".join(traceback.format_exception(found))
    assert __file__ in shown and "in __call__" in shown


def test_classes_that_do_not_fit_the_head(tmp_path):
    message = explained(tmp_path, model__num_classes=80)
    assert message.startswith(
        "model.bbox_head.num_classes is 80, but train_dataloader.dataset (ToyBoxes) has 2 classes (dark, bright). "
        "Set model.bbox_head.num_classes=2"
    )
    assert "hooks" not in message


def coco_dataset(tmp_path, pipeline) -> dict:
    """Return the config of a data set whose only image is cut short."""
    content = {
        "images": [{"id": 1, "file_name": "bad.jpg", "height": 32, "width": 32}],
        "annotations": [
            {"id": 1, "image_id": 1, "category_id": 5, "bbox": [2, 2, 9, 9], "iscrowd": 0, "area": 81}
        ],
        "categories": [{"id": 5, "name": "dark"}, {"id": 6, "name": "bright"}],
    }
    write_json(tmp_path / "coco.json", content)
    (tmp_path / "bad.jpg").write_bytes(b"\xff\xd8\xff\xe0 cut short")
    return {
        "_delete_": True,
        "type": "CocoDataset",
        "data_root": str(tmp_path),
        "ann_file": "coco.json",
        "metainfo": {"classes": ("dark", "bright")},
        "pipeline": pipeline,
    }


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_corrupt_image_is_named(tmp_path, num_workers):
    dataset = coco_dataset(
        tmp_path, [{"type": "LoadImageFromFile"}, {"type": "LoadAnnotations"}, {"type": "PackDetInputs"}]
    )
    message = explained(
        tmp_path, train_dataloader__dataset=dataset, train_dataloader__num_workers=num_workers
    )
    assert message.startswith("LoadImageFromFile: ") and "ignore_empty=True" in message.splitlines()[1]
    assert f"cannot read image {tmp_path}/bad.jpg" in message and "BytesIO" not in message


@pytest.mark.parametrize("mistake", [True, False], ids=["mistake", "bug"])
def test_a_fatal_error_is_the_last_entry_of_the_log(tmp_path, monkeypatch, mistake, stdout):
    def fail(self):
        raise UserError("the mistake") if mistake else ZeroDivisionError("the bug")

    monkeypatch.setattr(ToyBoxes, "full_init", fail)
    with pytest.raises(Exception, match=r"the (mistake|bug)"):
        build_runner(toy_config(tmp_path)).train()
    last_entry = next(tmp_path.glob("*/*.log")).read_text().split("ERROR - ")[-1]
    if mistake:
        assert " - the mistake\n(" in last_entry
    else:
        assert " - Traceback" in last_entry and "ZeroDivisionError: the bug" in last_entry
    assert "the bug" not in stdout(), "the terminal shows what the caller makes of it"


def test_an_error_while_the_model_is_built_is_in_the_log(tmp_path):
    explained(tmp_path, model__chanels=3)
    assert "'chanels'" in next(tmp_path.glob("*/*.log")).read_text().splitlines()[-1]


@pytest.mark.parametrize("checkpoint", ["torchvision://resnet18", "https://nowhere.invalid/resnet18.pth"])
@pytest.mark.parametrize("error", [OSError("no network"), HTTPException("no network")], ids=["os", "http"])
def test_pretrained_weights_that_cannot_be_fetched_are_one_message(tmp_path, monkeypatch, checkpoint, error):
    refuse = Mock(side_effect=error)
    monkeypatch.setattr(torch.hub, "download_url_to_file", refuse)
    monkeypatch.setattr("visdet.engine.checkpoints.checkpoint.urlopen", refuse)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    register_checkpoint_readers()
    pretrained = {"type": "Pretrained", "checkpoint": checkpoint}
    with pytest.raises(UserError) as caught:
        MODELS.build({"type": "ResNet", "depth": 18, "init_cfg": pretrained}).init_weights()
    message = explain(caught.value)
    assert checkpoint in message and "no network" in message
    assert "init_cfg" in message and "checkpoint" in message and "if_unavailable=random" in message


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


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "cannot write: No space left on device"),
        (OSError(errno.EISDIR, "Is a directory", "a.json"), "cannot use a.json: Is a directory"),
        (PermissionError(errno.EACCES, "Permission denied", "b.png"), "cannot use b.png: Permission denied"),
        (PermissionError(errno.EACCES, "Permission denied"), None),
        (
            OSError(errno.EMFILE, "Too many open files", "a"),
            "cannot open a: Too many open files. Raise the limit by `ulimit",
        ),
        (
            OSError(errno.ENOMEM, "Cannot allocate memory"),
            "the memory does not suffice: [Errno 12] Cannot allocate",
        ),
        (MemoryError(), "the memory does not suffice: MemoryError. Lower batch_size or num_workers"),
        (
            RuntimeError("[enforce fail] can't allocate memory"),
            "the memory does not suffice: [enforce fail] can't",
        ),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried"),
            "the memory does not suffice: CUDA out of memory.",
        ),
        (FileNotFoundError(errno.ENOENT, "No such file", "c"), None),
        (RuntimeError("The size of tensor a (2) must match that of b"), None),
        (TypeError("got an unexpected keyword argument 'wrong'"), None),
        (KeyError("'Foo' is not in the model registry"), None),
    ],
)
def test_a_file_or_a_disk_that_refuses_is_no_bug_and_other_errors_are(error, message):
    found = explain(error)
    assert found == message or (message and found.startswith(message))


@pytest.fixture
def handlers():
    """Restore the handlers of signals, which an interrupted tool sets to their defaults before it ends."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize(
    ("number", "message"),
    [
        (signal.SIGINT, "interrupted"),
        (signal.SIGTERM, "ended by SIGTERM"),
        (signal.SIGHUP, "ended by SIGHUP"),
    ],
)
def test_a_session_answers_an_interrupt(number, message, capsys):
    with pytest.raises(SystemExit) as caught, tool_session():
        try:
            os.kill(os.getpid(), number)
            time.sleep(10)
        finally:
            os.kill(os.getpid(), number)  # The same request again.
    assert caught.value.code == 128 + number
    assert capsys.readouterr().err == f"{message}\n"


@pytest.mark.usefixtures("handlers")
def test_an_error_after_a_signal_is_its_consequence(capsys):
    with pytest.raises(SystemExit) as caught, tool_session():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        finally:
            raise RuntimeError("DataLoader worker (pid 1) is killed by signal: Terminated.")
    assert caught.value.code == 143 and capsys.readouterr().err == "ended by SIGTERM\n"


def test_a_signal_that_is_ignored_stays_so():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with tool_session():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_cameras_of_a_run_have_one_order():
    front, back = ["front", "back"], ["back", "front"]
    with pytest.raises(ConfigError, match=r"the cameras of train\.dataset and val\.dataset differ: label 0"):
        _compare_lists("cameras", {"train": front, "val": back})
    _compare_lists("cameras", {"train": front, "val": ["CAM_FRONT", "CAM_BACK"]})
