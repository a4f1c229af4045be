"""Files that are kept: whole, or not there."""

import errno
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.structures import InstanceData

from visdet.datasets import save_infos
from visdet.engine import write_checkpoint
from visdet.engine.build import write_config
from visdet.engine.inference.detect_files import write_detections_file
from visdet.engine.inference.detections import Detections
from visdet.errors import UnwrittenFileError
from visdet.evaluation.precision_recall import CurveReport
from visdet.export.report import write_report
from visdet.files.writing import write_atomically, written_whole
from visdet.structures import DetDataSample


def fail_with(code):
    def fail(*_arguments, **_options):
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize("old", ["old", None])
@pytest.mark.parametrize(
    ("step", "code"), [("fsync", errno.ENOSPC), ("fsync", errno.EIO), ("replace", errno.EACCES)]
)
def test_a_write_that_fails_leaves_the_old_file_and_names_it(tmp_path, monkeypatch, old, step, code):
    path = tmp_path / "a.json"
    if old:
        path.write_text(old)
    monkeypatch.setattr(os, step, fail_with(code))
    with pytest.raises(
        UnwrittenFileError, match=rf"file {path} \(3 bytes\) cannot be written: {os.strerror(code)}"
    ):
        write_atomically(path, "new")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == (
        [("a.json", "old")] if old else []
    )


def test_any_error_in_the_block_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.bin"
    path.write_text("old")
    with pytest.raises(KeyError), written_whole(path) as partial:
        partial.write_text("half")
        raise KeyError
    assert [file.read_text() for file in tmp_path.iterdir()] == ["old"]


def test_a_full_disk_is_an_error(tmp_path):
    with pytest.raises(UnwrittenFileError, match=r"/dev/full .*No space left on device"):
        write_atomically("/dev/full", b"x")


def test_folders_are_made_links_are_followed_and_devices_are_written(tmp_path):
    target = tmp_path / "far" / "a.json"
    write_atomically(target, "é")
    (tmp_path / "link").symlink_to(target)
    write_atomically(tmp_path / "link", memoryview(b"new"))
    assert target.read_text() == "new" and (tmp_path / "link").is_symlink()
    write_atomically("/dev/null", "x")
    assert not os.path.isfile("/dev/null")
    with pytest.raises(UnwrittenFileError, match=r"far.* cannot be written: Is a directory"):
        write_atomically(tmp_path / "far", "x")


STOPPED = """
import os, signal, sys
from visdet.files.writing import written_whole
with written_whole(sys.argv[1]) as partial:
    partial.write_text(sys.argv[2])
    os.kill(os.getpid(), getattr(signal, sys.argv[2]))
"""


def test_writers_at_once_do_not_meet_and_what_a_killed_one_left_is_removed(tmp_path):
    path = tmp_path / "a [1].json"
    path.write_text("old")
    killed, frozen = (
        subprocess.Popen([sys.executable, "-c", STOPPED, str(path), name]) for name in ("SIGKILL", "SIGSTOP")
    )
    assert killed.wait() == -signal.SIGKILL
    os.waitid(os.P_PID, frozen.pid, os.WSTOPPED | os.WNOWAIT)
    assert path.read_text() == "old"
    with written_whole(path) as outer:
        outer.write_text("outer")
        write_atomically(path, "inner")
        assert path.read_text() == "inner"
    assert path.read_text() == "outer"
    assert sorted(file.read_text() for file in tmp_path.iterdir()) == ["SIGSTOP", "outer"]
    frozen.send_signal(signal.SIGCONT)
    assert frozen.wait() == 0 and [file.read_text() for file in tmp_path.iterdir()] == ["SIGSTOP"]


def detections(path):
    sample = DetDataSample(metainfo={"img_path": "a.jpg", "ori_shape": (4, 6)})
    sample.pred_instances = InstanceData(
        bboxes=torch.zeros(0, 4), scores=torch.zeros(0), labels=torch.zeros(0, dtype=int)
    )
    pixels = np.zeros((4, 6, 3), np.uint8)
    Detections(sample, ["cat"], 0.0, pixels, lambda image, _sample: image).save(path)


WRITERS = {
    "a.json": detections,
    "a.png": detections,
    "predictions.json": lambda path: write_detections_file(path, []),
    "a.npz": lambda path: save_infos(path, [], {}),
    "report.json": lambda path: write_report(
        {"format": "pt2", "precision": "float32", "bytes": {}}, path.parent
    ),
    "a.pth": lambda path: write_checkpoint({}, path),
    "curves_precision_recall.png": lambda path: CurveReport(
        "IoU", {"cat": {"best_threshold": None}}, np.zeros((1, 1))
    ).draw(path.parent, "curves"),
    "config.py": lambda path: write_config(
        SimpleNamespace(cfg=Config({"a": 1}, cfg_text="a = 1", filename=path.name), work_dir=path.parent)
    ),
}


@pytest.mark.parametrize("name", WRITERS)
def test_what_a_user_keeps_is_written_whole_or_not_at_all(tmp_path, monkeypatch, name):
    path = tmp_path / name
    WRITERS[name](path)
    assert path.stat().st_size
    path.write_text("old")
    monkeypatch.setattr(os, "replace", fail_with(errno.ENOSPC))
    with pytest.raises(
        UnwrittenFileError, match=rf"file {path} .*cannot be written: No space left on device"
    ):
        WRITERS[name](path)
    assert path.read_text() == "old" and not list(tmp_path.glob("*partial*"))
