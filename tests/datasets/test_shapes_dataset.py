"""The shapes set: what is drawn, and that its folder is whole whatever happens while it is written."""

import gc
import hashlib
import multiprocessing
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from disk import names_in
from json_files import read_json
from PIL import Image

from visdet.datasets import make_shapes
from visdet.datasets.synthetic import shapes
from visdet.datasets.synthetic.drawn_folder import draw_each
from visdet.datasets.synthetic.shapes import SHAPE_CLASSES, draw_shapes
from visdet.registry import DATASETS

FORK = multiprocessing.get_context("fork")
SMALL = dict(num_train=12, num_val=5, image_size=64)


def digests(folder):
    files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_drawings():
    labels, visible = [], 0
    for index in range(150):
        pixels, objects = draw_shapes(np.random.default_rng([0, 0, index]), 128)
        assert pixels.shape == (128, 128, 3) and pixels.dtype == np.uint8
        assert len(objects) <= 6
        for label, (x1, y1, x2, y2), area, _ in objects:
            assert 0 <= x1 < x2 <= 128 and 0 <= y1 < y2 <= 128
            assert 0 < area <= (x2 - x1) * (y2 - y1)
            labels.append(label)
            visible += area > 0.3 * (x2 - x1) * (y2 - y1)
    counts = np.bincount(labels, minlength=len(SHAPE_CLASSES))
    assert len(labels) > 350 and counts.min() > 0.1 * len(labels)
    assert visible > 0.8 * len(labels)


def test_files_do_not_depend_on_the_workers(tmp_path):
    one = digests(make_shapes(tmp_path / "one", num_workers=1, **SMALL))
    assert one == digests(make_shapes(tmp_path / "three", num_workers=3, **SMALL))
    assert len(one) == 12 + 5 + 3
    other_seed = digests(make_shapes(tmp_path / "other", num_workers=1, seed=1, **SMALL))
    assert other_seed["train/000003.jpg"] != one["train/000003.jpg"]
    assert one["train/000003.jpg"] != one["val/000003.jpg"]


def test_it_is_a_coco_data_set_that_makes_itself(tmp_path):
    config = dict(
        type="ShapesDataset",
        data_root=f"{tmp_path}/data/shapes/",
        ann_file="annotations/instances_val.json",
        data_prefix=dict(img="val/"),
        generator=dict(num_train=3, num_val=9, image_size=64),
        pipeline=[dict(type="LoadImageFromFile"), dict(type="LoadAnnotations"), dict(type="PackDetInputs")],
    )
    lazy = DATASETS.build(dict(config, lazy_init=True))
    assert not Path(tmp_path, "data").exists()
    assert lazy.metainfo["classes"] == SHAPE_CLASSES
    dataset = DATASETS.build(config)
    assert len(dataset) == 9
    content = read_json(Path(tmp_path, "data/shapes/annotations/instances_val.json"))
    assert sum(len(dataset[i]["data_samples"].gt_instances) for i in range(9)) == len(content["annotations"])
    assert dataset[8]["inputs"].shape == (3, 64, 64)
    with Image.open(dataset.get_data_info(0)["img_path"]) as image:
        assert image.size == (64, 64)


def test_a_whole_folder_is_left_alone_and_another_recipe_replaces_it(tmp_path):
    folder = make_shapes(tmp_path / "shapes", num_workers=1, **SMALL)

    def times():
        return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}

    before = times()
    make_shapes(folder, num_workers=1, **SMALL)
    assert times() == before
    own = folder / "anchors.npy"
    own.touch()
    make_shapes(folder, num_workers=1, **(SMALL | dict(num_train=4)))
    assert len(names_in(folder / "train")) == 4 and own.exists()
    assert names_in(tmp_path) == [".shapes.lock", "shapes"]


def test_a_folder_that_a_data_set_reads_is_not_replaced(tmp_path):
    build = DATASETS.build
    config = dict(
        type="ShapesDataset",
        data_root=str(tmp_path / "shapes"),
        ann_file="annotations/instances_train.json",
        data_prefix=dict(img="train/"),
        generator=SMALL,
    )
    dataset = build(config)
    other = dict(config, generator=SMALL | dict(num_train=4))
    with pytest.raises(
        ValueError, match=r"holds num_train=\d+, not num_train=4.*different values of data_root"
    ):
        build(other)
    assert Path(dataset.get_data_info(0)["img_path"]).exists()
    build(config)
    del dataset
    gc.collect()
    assert len(build(other)) == 4


def test_killed_while_drawing(tmp_path):
    folder = tmp_path / "shapes"
    process = FORK.Process(target=make_shapes, args=(folder,), kwargs=dict(num_train=20000, num_workers=2))
    is_held, holds = FORK.Pipe(duplex=False)
    process.start()
    holds.close()
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".shapes.partial-*/*/train/*.jpg")):
        assert time.monotonic() < deadline and process.is_alive()
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert not folder.exists()
    assert is_held.poll(60)  # The other end is closed when the last orphaned worker has ended.
    make_shapes(folder, num_workers=1, **SMALL)  # waits for no lock of the dead
    assert len(names_in(folder / "train")) == 12
    assert len(names_in(folder / "val")) == 5


def test_a_failing_worker_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(shapes, "draw_shapes", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        make_shapes(tmp_path / "shapes", num_workers=2, **SMALL)
    assert names_in(tmp_path) == [".shapes.lock"]


def test_a_killed_worker_is_an_error():
    with pytest.raises(RuntimeError, match="terminated abruptly"):
        draw_each(os._exit, [(1,), (1,)], 2)


def interrupt(number):
    time.sleep(1)  # The parent waits by then. Python loses an interrupt that comes while a process is forked.
    os.kill(os.getpid(), signal.SIGINT)  # Ctrl-C in a terminal reaches every process.
    if number == 1:
        os.kill(os.getppid(), signal.SIGINT)


def test_an_interrupt_ends_the_drawing_processes_without_a_traceback_of_theirs(capfd):
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        draw_each(interrupt, [(number,) for number in range(100)], 2)
    assert time.monotonic() - begin < 20 and not multiprocessing.active_children()
    assert "Traceback" not in capfd.readouterr().err
